"""Context parallelism on a part of a model: a region, and the functions with which tensors enter and leave it.

Outside a region every rank of its group computes the same, on whole sequences; inside, each rank has its own rows.
Attention in the region has the style `ContextParallelAttention` and gets the region's plan. Other attention stays
local.

At the border of a region, a gradient on the outside is `partial` or `replicated`: see `sharding/placement.py`.
Parameters that are used inside a region always have partial gradients: `replicate` them, or let FSDP sum them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from trainer.distributed.context_parallel.inputs import check_mask
from trainer.distributed.context_parallel.live import LivePlan, flat_mesh, opened
from trainer.distributed.context_parallel.planning.mask import Mask
from trainer.distributed.context_parallel.planning.options import ContextParallelError, ContextParallelOptions
from trainer.distributed.sharding.exchange import exchange
from trainer.distributed.sharding.layout import AxisLayout
from trainer.distributed.sharding.placement import check_rows, replicate, shard, unshard
from trainer.distributed.sharding.ranges import Range


@dataclass(frozen=True)
class Region:
    """An open region: the handle for its attention, and `shard`, `unshard` and `replicate` for its layout and group.

    attention_plan: (sequences,) int64, the `plan` of attention that has the style `ContextParallelAttention`.
    """

    attention_plan: torch.Tensor
    layout: AxisLayout
    group: dist.ProcessGroup
    live: LivePlan

    def shard(self, x: torch.Tensor, dim: int, *, grad: str = "partial") -> torch.Tensor:
        """Return this rank's rows of a tensor that every rank has whole."""
        return shard(x, self.layout, dim, group=self.group, grad=grad)

    def unshard(self, x: torch.Tensor, dim: int, *, grad: str = "partial") -> torch.Tensor:
        """Return all rows of a tensor of which each rank has its own."""
        return unshard(x, self.layout, dim, group=self.group, grad=grad)

    def replicate(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor that every rank uses in the region; its gradient is the sum of all ranks' gradients."""
        return replicate(x, self.group)


@contextmanager
def region(
    mesh: DeviceMesh,
    layout: AxisLayout,
    mask: Mask | None = None,
    options: ContextParallelOptions | None = None,
    *,
    kv_layout: AxisLayout | None = None,
    sequences: int | None = None,
) -> Iterator[Region]:
    """Open a region over the ranks of a mesh, around forward AND backward; several may be open at once.

    mesh: 1-D; for `hybrid` 2-D, (ring, head group). layout: who owns which tokens of the region (`options.layout(...)`
    makes one); mask: intersected with the mask of each attention; kv_layout: the layout of the keys, for cross
    attention to another sharded sequence; sequences: of the batch, by default as many as the mask has.

    Raises:
        ContextParallelError: a layout for another number of ranks; or, at the end, no attention ran in the region
            although modules of this process are parallelised over `mesh`.
    """
    options = options or ContextParallelOptions()
    mesh, groups = flat_mesh(mesh, options)
    for part in (layout, kv_layout or layout):
        if part.degree != mesh.size():
            raise ContextParallelError(
                f"a layout for {part.degree} ranks does not fit a region over {mesh.size()} ranks; make it for them"
            )
    check_mask(mask, layout.length, (kv_layout or layout).length, sequences)
    live = LivePlan(mesh, layout, mask, options, kv_layout, groups)
    with opened(live, sequences) as handle:
        yield Region(handle, layout, mesh.get_group(), live)


def borrow(x: torch.Tensor, layout: AxisLayout, *, group: dist.ProcessGroup, copies: int = 1) -> torch.Tensor:
    """Return this rank's rows of the samples of all ranks, from whole sequences of its own samples; a collective.

    x: (B, S, ...), the same on each `copies` consecutive ranks of the group (the context-parallel ranks of one
    data-parallel rank) -> (G * B, rows, ...), with G such sets of ranks, samples in the order of ranks. The gradient of
    x is partial over its copies.

    Raises:
        ContextParallelError: copies that do not divide the ranks.
        ValueError: sequences of another length than the layout's.
    """
    sets, rank, each = _sets(copies, group), group.rank(), x.shape[0] * layout.length
    check_rows(x, 1, layout.length)
    # Each copy sends its part of the rows that the copies have in common.
    shards = tuple(((s * each, (s + 1) * each),) for s in range(sets))
    cut = AxisLayout("samples", each * sets, shards).cut(copies)
    before = sum(cut.local_length(copy) for copy in range(rank // copies * copies, rank))
    mine = x.flatten(0, 1).narrow(0, before, cut.local_length(rank))
    samples = x.shape[0] * sets
    rows = exchange(mine, cut, layout.repeated(samples).ranges, dim=0, group=group, outside="refuse")
    return rows.unflatten(0, (samples, layout.local_length(rank)))


def give_back(x: torch.Tensor, layout: AxisLayout, *, group: dist.ProcessGroup, copies: int = 1) -> torch.Tensor:
    """Undo `borrow`: this rank's rows of all samples (G * B, rows, ...) -> whole sequences (B, S, ...) of its own.

    Every copy gets them; the gradient of the result is partial over the copies.

    Raises:
        ContextParallelError: copies that do not divide the ranks.
        ValueError: another number of rows than the layout's.
    """
    sets = _sets(copies, group)
    check_rows(x, 1, layout.local_length(group.rank()))
    if x.shape[0] % sets:
        raise ContextParallelError(f"{x.shape[0]} samples cannot be given back to {sets} sets of ranks in equal parts")
    each = x.shape[0] // sets * layout.length
    wanted: list[list[Range]] = [[(r // copies * each, (r // copies + 1) * each)] for r in range(group.size())]
    rows = exchange(x.flatten(0, 1), layout.repeated(x.shape[0]), wanted, dim=0, group=group, outside="refuse")
    return rows.unflatten(0, (x.shape[0] // sets, layout.length))


def _sets(copies: int, group: dist.ProcessGroup) -> int:
    if copies < 1 or group.size() % copies:
        raise ContextParallelError(f"{copies} copies do not divide the {group.size()} ranks of the region")
    return group.size() // copies
