"""Whole shards of K and V by the collectives: all-gather, and reduce-scatter of their gradients.

Collectives want shards of one length: shorter ones are padded to the longest, and nobody reads the padding.
"""

from collections.abc import Iterator

import torch

from trainer.distributed.context_parallel.execution.stages import StageRun, pack
from trainer.distributed.context_parallel.planning.plan import Stage
from trainer.distributed.sharding.exchange import Pending, gather_shards, reduce_shards
from trainer.distributed.sharding.ranges import Offsets, Range, intersection


def gather_rows(k: torch.Tensor, v: torch.Tensor, rows: torch.Tensor, stage: Stage, run: StageRun) -> Pending:
    """Start gathering every rank's k, v (B, K, T, D); on arrival those that `stage` holds are in `rows`."""
    plan = run.plan
    mine = k.new_empty(plan.longest, 2, *k.shape[:2], k.shape[3])
    pack(k, v, ((0, k.shape[2]),), into=mine)
    mine[k.shape[2] :] = 0
    gathered, pending = gather_shards(mine, run.group, kind="kv")

    def arrived() -> None:
        for owner, there, here in _pieces(stage, run):
            rows[slice(*here)] = gathered[owner, slice(*there)]

    return Pending([pending], [gathered], arrived)


def reduce_rows(gradient: torch.Tensor, stage: Stage, run: StageRun) -> tuple[torch.Tensor, Pending]:
    """Start adding up, at each row's owner, every rank's gradient of the rows it held: (own rows, padded; handle)."""
    plan = run.plan
    shards = gradient.new_zeros(plan.degree, plan.longest, *gradient.shape[1:])
    for owner, there, here in _pieces(stage, run):
        shards[owner, slice(*there)] = gradient[slice(*here)]
    return reduce_shards(shards, run.gradient_group, kind="dkv")


def _pieces(stage: Stage, run: StageRun) -> Iterator[tuple[int, Range, Range]]:
    """Ranges that a stage holds: (owner, place in the owner's shard, place in the stage's buffer)."""
    layout = run.plan.kv_layout.repeated(run.plan.sequences)
    for owner, ranges in enumerate(layout.ranges):
        if owner == run.plan.rank:
            continue
        there = Offsets(ranges)
        for start, stop in intersection(stage.held, ranges):
            yield owner, (there(start), there(stop - 1) + 1), (stage.places(start), stage.places(stop - 1) + 1)
