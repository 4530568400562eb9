"""Choose a method for `auto`: compare how much the busiest rank sends for one layer. Torch-free.

Ranks of a group lie on nodes one after another. A byte to another node counts `NETWORK` times, so that heads are
exchanged inside a node and K/V go between nodes:

    64 ranks, 8 a node, hybrid 8 x 8      node 0: ranks 0 ... 7 exchange heads
                                          ring:   rank 0 - 8 - 16 - ... - 56, of the same heads
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

from longshard.context.planning.capabilities import CAPABILITIES
from longshard.context.planning.cost import AttentionShape, attention_cost, shortest_ring
from longshard.context.planning.lowering import lower
from longshard.context.planning.mask import Mask
from longshard.context.planning.methods import METHODS, make_plan
from longshard.context.planning.options import ContextParallelOptions
from longshard.context.planning.plan import Message, RankPlan, Stage
from longshard.sharding.layout import AxisLayout

NETWORK = 9
"""Bytes that reach a GPU of the node in the time of one byte to another node: 450 GB/s of NVLink, 50 GB/s of network.
"""


@dataclass(frozen=True)
class Candidate:
    """A way to spread attention.

    Attributes:
        options: The options with this method.
        bytes_sent: The most bytes that a rank sends in both directions.
        bytes_outside: The most bytes that a rank sends to other nodes.
        kernels: The most calls of a forward.
        stages: The most stages of a forward.
    """

    options: ContextParallelOptions
    bytes_sent: int
    bytes_outside: int
    kernels: int
    stages: int

    @property
    def weight(self) -> int:
        """The bytes inside a node that would take as long to send as all bytes of this candidate."""
        return self.bytes_sent + (NETWORK - 1) * self.bytes_outside

    def __str__(self) -> str:
        degrees = self.options.hybrid_degrees
        name = self.options.method + (f" {degrees[0]} x {degrees[1]}" if degrees else "")
        outside = f" ({self.bytes_outside / 2**20:,.0f} off node)" if self.bytes_outside else ""
        return f"{name} {self.bytes_sent / 2**20:,.2f} MiB{outside}"


@lru_cache(maxsize=8)
def choose(
    options: ContextParallelOptions,
    masks: tuple[Mask, ...],
    degree: int,
    shape: AttentionShape,
    *,
    batch: Mask | None = None,
    hybrids: bool = True,
    node: int | None = None,
) -> tuple[ContextParallelOptions, str]:
    """Return options with the method that sends least, and the reason in words; cached.

    All methods are compared, even if the options name one already. Methods that send up to a tenth more than the least
    count as equal. If shards are long, the ring is first among them, because it sends messages while it computes tiles.
    If shards are short, all-gather replaces the ring, with fewer messages. Without a ring, the method with the fewest
    calls of `options.kernel` is first.

    Args:
        options: The options that the user wrote. Their method, `hybrid_degrees` and `heads_per_pass` are replaced.
        masks: The different masks of the model's layers.
        degree: The number of ranks.
        shape: The shape of attention on one rank, with its local heads.
        batch: The documents of one batch; None if absent.
        hybrids: Whether the mesh may be 2-D.
        node: Ranks of the group on a node; None if one node has all. A byte to another node counts `NETWORK` times.
    """
    # The layout of `balanced` depends on the batch; before the first batch, `auto` represents it.
    balancer = (
        "auto"
        if options.load_balancer == "balanced" and batch is None
        else options.load_balancer
    )
    masks = masks if batch is None else tuple(mask & batch for mask in masks)
    candidates = []
    for name, method in METHODS.items():
        for hybrid in method.ways(degree, shape.heads):
            if hybrids or hybrid is None:
                way = replace(options, method=name, hybrid_degrees=hybrid, heads_per_pass=0)
                layout = replace(way, load_balancer=balancer).layout(
                    masks[0].q_len, degree, batch
                )
                candidates.append(
                    Candidate(way, *_busiest(way, layout, masks, shape, node or degree))
                )
    candidates.sort(key=lambda c: c.weight)
    best, reason = _best(candidates, masks[0].q_len // degree)
    return best.options, (
        f"{best} ({reason}; a layer, forward and backward: {', '.join(map(str, candidates))}; "
        f"{shape.heads}/{shape.kv_heads} heads over {degree} ranks)"
    )


def _best(candidates: list[Candidate], rows: int) -> tuple[Candidate, str]:
    """Return the best method, and the reason. candidates: ordered by weight; rows: tokens of a rank."""
    near = [c for c in candidates if c.weight <= 1.1 * candidates[0].weight]
    hidden = next((c for c in near if c.options.spread.overlaps), None)
    if hidden is None or rows >= shortest_ring(hidden.stages):
        crosses = any(c.bytes_outside for c in candidates)
        least = "within a tenth of the least that a busiest rank sends"
        least += f", a byte off node counted {NETWORK} times" if crosses else ""
        if hidden is None:
            return min(
                near, key=lambda c: (c.kernels, c.weight)
            ), f"{least}, with the fewest kernels"
        return hidden, f"{least}, hidden behind {rows:,} tokens a rank"
    best = next(c for c in candidates if c.options.method == hidden.options.spread.when_short)
    sent = f"{hidden.bytes_sent / 2**20:,.2f} MiB"
    return best, (
        f"a {hidden.options.method} would send {sent}, in messages and launches that {rows:,} tokens a rank cannot hide"
    )


def _busiest(
    way: ContextParallelOptions,
    layout: AxisLayout,
    masks: tuple[Mask, ...],
    shape: AttentionShape,
    node: int,
) -> tuple[int, int, int, int]:
    """Return the largest values over a sample of ranks: bytes sent, bytes to other nodes, kernel calls and stages.

    All but the stages are sums over the masks. Bytes are of a forward and a backward, calls and stages of a forward.
    node: number of ranks on a node.
    """
    # The kernel that `auto` takes depends on the device; here the least capable kernel stands for it.
    capabilities = CAPABILITIES.get(way.kernel, CAPABILITIES["cpu_flash"])
    heads = way.head_degree(layout.degree)
    # All ranks of a head group send the same number of bytes.
    ranks = range(0, layout.degree, heads)
    rank_costs = []
    # With a causal mask the first ranks send most. Of the other ranks, a sample of about eight is enough.
    for rank in sorted({*ranks[:2], *ranks[:: max(len(ranks) // 8, 1)], ranks[-1]}):
        plans = [make_plan(layout, mask, way.method, rank, head_degree=heads) for mask in masks]
        sent = outside = 0
        for plan, direction in product(plans, ("forward", "backward")):
            kind_bytes = attention_cost(plan, shape, direction).bytes_sent
            sent += kind_bytes.total()
            outside += _outside(plan, direction, kind_bytes, node)
        calls = sum(len(stage) for plan in plans for stage in lower(plan, capabilities).forward)
        stages = max(sum(bool(stage.tiles) for stage in plan.forward) for plan in plans)
        rank_costs.append((sent, outside, calls, stages))
    return tuple(map(max, zip(*rank_costs, strict=True)))


def _outside(plan: RankPlan, direction: str, sent: Mapping[str, int], node: int) -> int:
    """Return how many bytes the plan's rank sends to other nodes in one direction. sent: all its bytes, by kind."""
    if plan.degree <= node:
        return 0
    heads = plan.head_degree
    here = plan.rank // node
    first = plan.rank // heads * heads
    group = [rank // node for rank in range(first, first + heads)]
    head_share = sum(place != here for place in group) / max(heads - 1, 1)
    staged = plan.inner or plan
    # Rank i of the staged plan that has this rank's heads.
    nodes = [(i * heads + plan.rank % heads) // node for i in range(staged.degree)]
    stages = (staged.backward if direction == "backward" else staged.forward)[1:]
    shares = {
        "kv": _share_outside(staged, [(stage, stage.messages) for stage in stages], nodes),
        "dkv": _share_outside(staged, [(stage, stage.home) for stage in stages], nodes),
    }
    return round(sum(size * shares.get(kind, head_share) for kind, size in sent.items()))


def _share_outside(
    plan: RankPlan, sends: Sequence[tuple[Stage, tuple[Message, ...]]], nodes: Sequence[int]
) -> float:
    """Return the rows of K/V sent to other nodes, divided by all rows of K/V sent; 0.0 if none are sent.

    nodes: The node of each rank of the plan.
    """
    total = outside = 0.0
    here = nodes[plan.rank]
    inside = nodes.count(here)
    for stage, messages in sends:
        rows, _ = plan.rows_for(stage, messages)
        total += rows
        # A row of another node arrives once at a node, over the links of all ranks of the node.
        if stage.collective:
            outside += rows * (plan.degree - inside) / inside / (plan.degree - 1)
        else:
            targets = (m for m in messages if m.source == plan.rank and nodes[m.target] != here)
            outside += sum(message.rows for message in targets)
    return outside / total if total else 0.0
