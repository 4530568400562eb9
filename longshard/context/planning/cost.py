"""The exact cost of a plan for a rank: collectives, bytes, FLOPs, memory. Torch-free.

Tests compare it with the counters of `exchange.py`; tables and the choice of a method use it.

Stages: K/V of the next stage arrive while a stage computes, so two buffers are alive; `workspace` is their largest sum.

    stage of a ring         0         1         2         3
    computes with           own       buffer 1  buffer 2  buffer 3    (kind kv; dkv on the way home)
    arriving                buffer 1  buffer 2  buffer 3

Exchange of heads: a rank sends to each other rank its rows of the heads that the other rank computes. After attention
it sends back the other rank's rows (`_TENSORS`).
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from longshard.context.planning.heads import HeadShare, passes_of
from longshard.context.planning.plan import RankPlan
from longshard.sharding.ranges import aligned

SHORT_SHARD = 1024
"""With fewer tokens on a rank, tiles are too short to hide messages (about 800 for Llama 3 8B on NVLink).

In the time of a tile of n queries and n keys, SHORT_SHARD = n rows of K/V are sent: sending a row takes as long as
computing n pairs.
"""
_LAUNCH_BOUND = 2500 / 8
"""Tokens of a rank, for each stage of a ring, below which a GPU waits for the host's launches.

An estimate for Llama 3 8B on an H100.
"""


def shortest_ring(stages: int) -> int:
    """Return the fewest tokens of a rank with which a ring hides its messages and launches behind its tiles.

    Args:
        stages: Number of stages of the ring.
    """
    return max(SHORT_SHARD, int(_LAUNCH_BOUND * stages))


@dataclass(frozen=True)
class LatentShape:
    """The sizes of a latent, which is sent instead of keys and values.

    Attributes:
        rank: R, the numbers from which keys and values are made.
        rotated: P, the numbers that are rotated by position and are the same for all heads.
        value_dim: V, the size of the values of a head.
    """

    rank: int
    rotated: int
    value_dim: int


@dataclass(frozen=True)
class AttentionShape:
    """The local sizes of one attention call.

    Attributes:
        batch: Number of sequences.
        heads: Number of query heads.
        kv_heads: Number of key/value heads.
        head_dim: Size of the queries and keys of a head.
        itemsize: Bytes of an element of q, k and v.
        gradient_itemsize: Bytes of an element of dK and dV when they are sent; 0 means the size of an accumulator.
        latent: With one key/value head, the sizes of the latent; None means that keys and values are sent.
    """

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    itemsize: int
    gradient_itemsize: int = 0
    latent: LatentShape | None = None

    @property
    def value_dim(self) -> int:
        """The size of the values and outputs of a head."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def key_sizes(self) -> tuple[int, int]:
        """The elements of a key and of a value that a token sends for one head. With a latent: its elements and 0."""
        return (
            (self.head_dim, self.head_dim)
            if self.latent is None
            else (self.latent.rank + self.latent.rotated, 0)
        )

    def expansion_flops(self, rows: int) -> int:
        """Return the FLOPs that make the keys and values of a head from latents of one sequence; 0 without a latent.

        Args:
            rows: Number of latents.
        """
        if self.latent is None:
            return 0
        return (
            2
            * rows
            * self.latent.rank
            * (self.head_dim - self.latent.rotated + self.latent.value_dim)
        )

    @property
    def accumulator(self) -> int:
        """Bytes of an element of merged results and summed gradients, which are float32 at least."""
        return max(self.itemsize, 4)


@dataclass
class Cost:
    """The cost for one rank.

    Attributes:
        calls: Number of calls by kind, as `exchange.py` counts them.
        bytes_sent: Bytes by kind, as `exchange.py` counts them.
        bytes_received: Bytes by kind that the other ranks send to this rank.
        flops: Floating-point operations.
        workspace: The largest number of bytes of buffers that are alive at the same time.
    """

    calls: Counter[str] = field(default_factory=Counter)
    bytes_sent: Counter[str] = field(default_factory=Counter)
    bytes_received: Counter[str] = field(default_factory=Counter)
    flops: int = 0
    workspace: int = 0

    def exchanges(self, kind: str, sent: int, received: int) -> None:
        """Add one call.

        Args:
            kind: The kind of the call.
            sent: Bytes that this rank sends.
            received: Bytes that this rank receives.
        """
        self.calls[kind] += 1
        self.bytes_sent[kind] += sent
        self.bytes_received[kind] += received


def attention_cost(
    plan: RankPlan,
    shape: AttentionShape,
    direction: str,
    heads_per_pass: int = 0,
    *,
    query_heads: int = 0,
    keep_exchanged: bool = False,
) -> Cost:
    """Return the cost of one attention call in one direction.

    The workspace counts the rows of a stage and of the next one, and receive buffers, but not inputs and results.

    Args:
        plan: The plan of the rank.
        shape: The local sizes.
        direction: `forward` or `backward`.
        heads_per_pass: Key/value heads that are sent at a time; 0 means all.
        query_heads: Query heads of one key/value head that are sent at a time; 0 means all.
        keep_exchanged: Whether the forward has kept the heads that it exchanged.
    """
    if (
        plan.sequences > 1
    ):  # sequences with masks of their own lie one after another, as one sequence
        shape = replace(shape, batch=1)
    is_backward = direction == "backward"
    if plan.inner is None:
        cost = _staged(plan, shape, is_backward, heads_per_pass)
    else:
        passes = HeadShare.passes(
            shape.heads, shape.kv_heads, plan.head_degree, heads_per_pass, query_heads
        )
        cost = _exchanged(plan, shape, direction, passes, keep_exchanged)
    # Two products in the forward. The backward computes the scores again, and four products of their size.
    flops_per_pair = (
        6 * shape.head_dim + 4 * shape.value_dim
        if is_backward
        else 2 * (shape.head_dim + shape.value_dim)
    )
    staged = plan.inner or plan
    stages = staged.backward if is_backward else staged.forward
    expansions = (3 if is_backward else 1) * shape.expansion_flops(
        sum(stage.rows for stage in stages)
    )
    cost.flops = (
        (flops_per_pair * plan.pairs + expansions)
        * (shape.heads // plan.head_degree)
        * shape.batch
    )
    return cost


def _staged(
    plan: RankPlan, shape: AttentionShape, is_backward: bool, heads_per_pass: int
) -> Cost:
    cost = Cost()
    stages = plan.backward if is_backward else plan.forward
    element = shape.batch * sum(shape.key_sizes)
    alive = [0]
    for start, stop in passes_of(shape.kv_heads, heads_per_pass):
        heads = stop - start
        for stage in stages[1:]:
            kv = element * heads * shape.itemsize
            dkv = element * heads * (shape.gradient_itemsize or shape.accumulator)
            for kind, messages, row in (("kv", stage.messages, kv), ("dkv", stage.home, dkv))[
                : 1 + is_backward
            ]:
                if stage.collective or messages:
                    cost.exchanges(
                        kind, *(rows * row for rows in plan.rows_for(stage, messages))
                    )
            gathered = plan.degree * plan.longest * stage.collective
            alive.append(
                stage.rows * (kv + dkv * is_backward) + gathered * (dkv if is_backward else kv)
            )
    cost.workspace = max(
        map(sum, pairwise([*alive, 0]))
    )  # the buffers of two consecutive stages
    return cost


def _exchanged(
    plan: RankPlan,
    shape: AttentionShape,
    direction: str,
    passes: Sequence[HeadShare],
    keep_exchanged: bool,
) -> Cost:
    """Return the cost of a plan on its rank, with two exchanges of heads in each pass.

    The first sends this rank's rows to each other rank. After the inner plan, the second gives each other rank its rows
    back.
    """
    cost = Cost()
    is_backward = direction == "backward"
    kinds = _TENSORS["keeping" if is_backward and keep_exchanged else direction]
    lengths = [layout.lengths for layout in plan.head_group_layouts]
    here = plan.rank % plan.head_degree
    others = [r for r in range(plan.head_degree) if r != here]
    alive = [0]
    for share in passes:
        kv_heads = share.stop - share.start
        queries = share.queries(0)
        part = replace(shape, heads=queries.stop - queries.start, kv_heads=kv_heads)
        inside = _staged(plan.inner, part, is_backward, 0)
        cost.calls += inside.calls
        cost.bytes_sent += inside.bytes_sent
        cost.bytes_received += inside.bytes_received
        there, back = ([*_pieces(part, share, names)] for names in kinds.values())
        # First exchange: this rank's rows go to each other rank. Second: each other rank gets its own rows back.
        own_bytes, other_bytes = (
            [
                sum(lengths[is_key][r] * row for r in ranks for is_key, row in pieces)
                for pieces in (there, back)
            ]
            for ranks in ([here] * len(others), others)
        )
        going, coming = kinds
        cost.exchanges(going, own_bytes[0], other_bytes[0])
        cost.exchanges(coming, other_bytes[1], own_bytes[1])
        # Twice: as the rows arrive, and in the order of the sequence.
        rows = [2 * sum(each) for each in lengths]
        alive.append(sum(rows[is_key] * row for is_key, row in there) + inside.workspace)
    cost.workspace = max(map(sum, pairwise([*alive, 0])))
    return cost


# The exchange to the ranks of the heads, and the exchange back: kind -> tensors of these sizes (`out`: dout too).
# keeping: a backward after a forward that has kept the exchanged tensors.
_TENSORS = {
    "forward": {"qkv": ("q", "k", "v"), "out": ("out", "lse")},
    "backward": {"qkv_dout": ("q", "out", "out", "lse", "k", "v"), "dqkv": ("q", "dk", "dv")},
    "keeping": {"dout": ("out",), "dqkv": ("q", "dk", "dv")},
}


def _pieces(
    part: AttentionShape, share: HeadShare, names: tuple[str, ...]
) -> Iterator[tuple[bool, int]]:
    """Yield (whether rows have the keys' layout, bytes of a row) for each tensor of a pass. part: sizes of the pass."""
    for name in names:
        if name in ("q", "out"):
            size = part.head_dim if name == "q" else part.value_dim
            yield False, aligned(part.batch * part.heads * size * part.itemsize)
        elif name == "lse":
            yield False, aligned(part.batch * part.heads * part.accumulator)
        elif share.has_gradients if name.startswith("d") else share.has_keys:
            item = (
                part.accumulator if name.startswith("d") and share.copies > 1 else part.itemsize
            )
            yield (
                True,
                aligned(part.batch * part.kv_heads * part.key_sizes[name.endswith("v")] * item),
            )
