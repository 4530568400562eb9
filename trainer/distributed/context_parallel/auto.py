"""Which method, where the configuration leaves it open: by what the busiest rank sends for one layer. Torch-free."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from trainer.distributed.context_parallel.cost import AttentionShape, attention_cost
from trainer.distributed.context_parallel.lowering import CAPABILITIES, Call, Capabilities, lower
from trainer.distributed.context_parallel.mask import Mask
from trainer.distributed.context_parallel.options import ContextParallelOptions
from trainer.distributed.context_parallel.plan import make_plan

# Below so many tokens a rank, a stage's tile is too short to hide a message behind it (about 800 on NVLink for Llama 3
# 8B), and the N - 1 messages of a ring cost more than the memory that it saves.
SHORT_SHARD = 1024


@dataclass(frozen=True)
class Candidate:
    """A way to spread attention: what the busiest rank sends forward and backward, and how many kernels it starts."""

    options: ContextParallelOptions
    bytes_sent: int
    kernels: int

    def __str__(self) -> str:
        degrees = self.options.hybrid_degrees
        name = self.options.method + (f" {degrees[0]} x {degrees[1]}" if degrees else "")
        return f"{name} {self.bytes_sent / 2**20:,.2f} MiB"


@lru_cache(maxsize=8)
def choose(
    options: ContextParallelOptions,
    masks: tuple[Mask, ...],
    degree: int,
    shape: AttentionShape,
    *,
    batch: Mask | None = None,
    hybrids: bool = True,
) -> tuple[ContextParallelOptions, str]:
    """Options with the method that sends least, and the reason in words; cached.

    masks: of the model's layers, each once; shape: local heads. batch: what the documents of one batch hide beside;
    hybrids: whether the mesh may be cut in two. A tenth more counts as alike. Among those the ring comes first, whose
    messages hide behind what is computed if shards are long (if not, all-gather, which sends more in fewer messages),
    then what starts the fewest kernels, those of `options.kernel`.
    """
    candidates = sorted(_candidates(options, masks, degree, shape, batch, hybrids), key=lambda c: c.bytes_sent)
    near = [c for c in candidates if c.bytes_sent <= 1.1 * candidates[0].bytes_sent]
    rows = masks[0].q_len // degree
    ring = next((c for c in near if c.options.method == "ring"), None)
    if ring is None:
        best = min(near, key=lambda c: (c.kernels, c.bytes_sent))
        reason = "within a tenth of the least that a busiest rank sends, with the fewest kernels"
    elif rows >= SHORT_SHARD:
        best = ring
        reason = f"within a tenth of the least that a busiest rank sends, hidden behind {rows:,} tokens a rank"
    else:
        best = next(c for c in candidates if c.options.method == "all_gather")
        reason = (
            f"a ring would send {ring.bytes_sent / 2**20:,.2f} MiB, in messages that {rows:,} tokens a rank cannot hide"
        )
    return best.options, (
        f"{best} ({reason}; a layer, forward and backward: {', '.join(map(str, candidates))}; "
        f"{shape.heads}/{shape.kv_heads} heads over {degree} ranks)"
    )


def _candidates(
    options: ContextParallelOptions,
    masks: tuple[Mask, ...],
    degree: int,
    shape: AttentionShape,
    batch: Mask | None,
    hybrids: bool,
) -> Iterator[Candidate]:
    methods: list[tuple[str, tuple[int, int] | None]] = [("ring", None), ("all_gather", None)]
    if shape.heads % degree == 0:
        methods.append(("all_to_all", None))
    methods += [
        ("hybrid", (heads, degree // heads))
        for heads in range(2, degree)
        if hybrids and degree % heads == 0 and shape.heads % heads == 0
    ]
    # Which kernel `auto` takes depends on the device; the least able one stands for it.
    capabilities = CAPABILITIES.get(options.kernel, CAPABILITIES["cpu_flash"])
    # What `balanced` deals is known with each batch; until then head and tail stands for it.
    balancer = "head_tail" if options.load_balancer == "balanced" and batch is None else options.load_balancer
    masks = masks if batch is None else tuple(mask & batch for mask in masks)
    for method, hybrid in methods:
        way = replace(options, method=method, hybrid_degrees=hybrid, heads_per_pass=0, load_balancer=balancer)
        layout = way.layout(masks[0].q_len, degree, batch)
        busiest = kernels = 0
        # Ranks that differ by their place among neighbours only do the same.
        ranks = range(0, degree, way.head_degree(degree))
        # The first ones send most under a causal mask; of the others a few stand for all.
        for rank in sorted({*ranks[:2], *ranks[:: max(len(ranks) // 8, 1)], ranks[-1]}):
            plans = [make_plan(layout, mask, method, rank, head_degree=hybrid[0] if hybrid else None) for mask in masks]
            directions = [attention_cost(plan, shape, d) for plan in plans for d in ("forward", "backward")]
            busiest = max(busiest, sum(cost.bytes_sent.total() for cost in directions))
            kernels = max(kernels, sum(_kernels(lower(plan, capabilities).forward, capabilities) for plan in plans))
        yield Candidate(replace(options, method=method, hybrid_degrees=hybrid), busiest, kernels)


def _kernels(calls: tuple[tuple[Call, ...], ...], capabilities: Capabilities) -> int:
    return sum(bool(stage) if capabilities.many else len(stage) for stage in calls)
