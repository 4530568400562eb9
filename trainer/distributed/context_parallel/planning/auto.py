"""The choice of a method for `auto`, by how much the busiest rank sends for one layer. Torch-free."""

from dataclasses import dataclass, replace
from functools import lru_cache

from trainer.distributed.context_parallel.planning.capabilities import CAPABILITIES
from trainer.distributed.context_parallel.planning.cost import AttentionShape, attention_cost, shortest_ring
from trainer.distributed.context_parallel.planning.lowering import lower
from trainer.distributed.context_parallel.planning.mask import Mask
from trainer.distributed.context_parallel.planning.methods import METHODS, make_plan
from trainer.distributed.context_parallel.planning.options import ContextParallelOptions
from trainer.distributed.sharding.layout import AxisLayout


@dataclass(frozen=True)
class Candidate:
    """A way to spread attention.

    bytes_sent: the most that a rank sends in both directions; kernels, stages: the most calls and stages of a forward.
    """

    options: ContextParallelOptions
    bytes_sent: int
    kernels: int
    stages: int

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
    """Return options with the method that sends least, and the reason in words; cached.

    masks: the different masks of the model's layers. shape: with local heads. batch: the documents of one batch.
    hybrids: whether the mesh may be 2-D. Methods that send up to a tenth more than the least count as equal. Among them
    the ring is first if shards are long, because its messages are sent while tiles are computed; if shards are short,
    all-gather replaces it, with fewer messages. Without a ring, the method with the fewest calls of `options.kernel` is
    first.
    """
    # The layout of `balanced` depends on the batch; before the first batch, `auto` represents it.
    balancer = "auto" if options.load_balancer == "balanced" and batch is None else options.load_balancer
    masks, candidates = masks if batch is None else tuple(mask & batch for mask in masks), []
    for name, method in METHODS.items():
        for hybrid in method.ways(degree, shape.heads):
            if hybrids or hybrid is None:
                way = replace(options, method=name, hybrid_degrees=hybrid, heads_per_pass=0)
                layout = replace(way, load_balancer=balancer).layout(masks[0].q_len, degree, batch)
                candidates.append(Candidate(way, *_busiest(way, layout, masks, shape)))
    candidates.sort(key=lambda c: c.bytes_sent)
    near = [c for c in candidates if c.bytes_sent <= 1.1 * candidates[0].bytes_sent]
    rows = masks[0].q_len // degree
    hidden = next((c for c in near if c.options.spread.overlaps), None)
    if hidden is None:
        best = min(near, key=lambda c: (c.kernels, c.bytes_sent))
        reason = "within a tenth of the least that a busiest rank sends, with the fewest kernels"
    elif rows >= shortest_ring(hidden.stages):
        best = hidden
        reason = f"within a tenth of the least that a busiest rank sends, hidden behind {rows:,} tokens a rank"
    else:
        best = next(c for c in candidates if c.options.method == hidden.options.spread.when_short)
        reason = (
            f"a {hidden.options.method} would send {hidden.bytes_sent / 2**20:,.2f} MiB, in messages and launches that "
            f"{rows:,} tokens a rank cannot hide"
        )
    return best.options, (
        f"{best} ({reason}; a layer, forward and backward: {', '.join(map(str, candidates))}; "
        f"{shape.heads}/{shape.kv_heads} heads over {degree} ranks)"
    )


def _busiest(
    way: ContextParallelOptions, layout: AxisLayout, masks: tuple[Mask, ...], shape: AttentionShape
) -> tuple[int, int, int]:
    """Return the most bytes that a rank sends, forward and backward; the most kernel calls and stages of a forward."""
    # The kernel that `auto` takes depends on the device; the least capable one represents it.
    capabilities = CAPABILITIES.get(way.kernel, CAPABILITIES["cpu_flash"])
    heads = way.head_degree(layout.degree)
    # All ranks of a head group send as much.
    ranks = range(0, layout.degree, heads)
    busiest = kernels = stages = 0
    # Under a causal mask the first ones send most; a few of the others represent the rest.
    for rank in sorted({*ranks[:2], *ranks[:: max(len(ranks) // 8, 1)], ranks[-1]}):
        plans = [make_plan(layout, mask, way.method, rank, head_degree=heads) for mask in masks]
        directions = [attention_cost(plan, shape, d) for plan in plans for d in ("forward", "backward")]
        busiest = max(busiest, sum(cost.bytes_sent.total() for cost in directions))
        kernels = max(kernels, sum(len(stage) for plan in plans for stage in lower(plan, capabilities).forward))
        stages = max(stages, *(sum(bool(stage.tiles) for stage in plan.forward) for plan in plans))
    return busiest, kernels, stages
