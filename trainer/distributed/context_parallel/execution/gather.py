"""All-gather of whole shards of K and V, and reduce-scatter of their gradients.

The collectives need shards of one length: shorter shards are padded to the longest, and the padding is never read.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist

from trainer.distributed.context_parallel.execution.stages import pack
from trainer.distributed.context_parallel.planning.plan import RankPlan, Stage
from trainer.distributed.sharding.exchange import Pending, gather_shards, reduce_shards
from trainer.distributed.sharding.ranges import Offsets, Range, intersection


def gather_rows(
    k: torch.Tensor, v: torch.Tensor, rows: torch.Tensor, stage: Stage, plan: RankPlan, group: dist.ProcessGroup
) -> Pending:
    """Start gathering every rank's k, v (B, K, T, D); on arrival, copy the rows that `stage` holds to `rows`."""
    mine = k.new_empty(plan.longest, 2, *k.shape[:2], k.shape[3])
    pack(k, v, ((0, k.shape[2]),), into=mine)
    mine[k.shape[2] :] = 0
    gathered, pending = gather_shards(mine, group, kind="kv")

    def arrived() -> None:
        for owner, there, here in _pieces(stage, plan):
            rows[slice(*here)] = gathered[owner, slice(*there)]

    return Pending([pending], [gathered], arrived)


def reduce_rows(
    gradient: torch.Tensor, stage: Stage, plan: RankPlan, group: dist.ProcessGroup
) -> tuple[torch.Tensor, Pending]:
    """Start summing all ranks' gradients of held rows at the owners; return (own rows, padded; handle)."""
    shards = gradient.new_zeros(plan.degree, plan.longest, *gradient.shape[1:])
    for owner, there, here in _pieces(stage, plan):
        shards[owner, slice(*there)] = gradient[slice(*here)]
    return reduce_shards(shards, group, kind="dkv")


def _pieces(stage: Stage, plan: RankPlan) -> Iterator[tuple[int, Range, Range]]:
    """Yield the ranges that a stage holds: (owner, place in the owner's shard, place in the stage's buffer)."""
    for owner, ranges in enumerate(plan.kv_layout.repeated(plan.sequences).ranges):
        if owner == plan.rank:
            continue
        there = Offsets(ranges)
        for start, stop in intersection(stage.held, ranges):
            yield owner, (there(start), there(stop - 1) + 1), (stage.places(start), stage.places(stop - 1) + 1)
