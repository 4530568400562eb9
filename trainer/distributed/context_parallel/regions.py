"""Context parallelism on a part of a model: a region, and how tensors enter and leave it.

Outside a region every rank of its group computes the same, on whole sequences; inside each has its rows. Attention in
the region is parallelised by style and gets the region's plan; attention outside stays local and untouched.

Where the two meet, a gradient on the outside has one of two placements, and the caller says which:

    partial      the ranks' gradients are parts that add up to the whole. So it is where gradients are summed over the
                 ranks anyway (FSDP over `dp_shard_cp`, as in the trainer) and each rank's loss is its part of the sum.
    replicated   every rank has the whole gradient. So it is where nothing is summed afterwards.

            shard(x)                      unshard(y)                          replicate(w)
    forward own rows                      all rows, on every rank             w
    partial  own rows' gradient,          gradients of all ranks added up,    (nothing to do)
             zeros elsewhere              own rows of it
    replicated  own rows' gradients       own rows of it                      gradients of all ranks added up
             of all ranks, put together

Parameters that are used inside a region have partial gradients always: `replicate` them, or let FSDP sum them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from trainer.distributed.context_parallel.inputs import check_mask
from trainer.distributed.context_parallel.live import LivePlan, flat_mesh, opened
from trainer.distributed.context_parallel.planning.mask import Mask
from trainer.distributed.context_parallel.planning.options import ContextParallelError, ContextParallelOptions
from trainer.distributed.sharding.exchange import all_reduce, exchange
from trainer.distributed.sharding.layout import AxisLayout
from trainer.distributed.sharding.ranges import Range

PLACEMENTS = ("partial", "replicated")


@dataclass(frozen=True)
class Region:
    """An open region: the handle for its attention, and its borders, for the layout it was opened with.

    attention_plan: (sequences,) int64, for `plan=` of attention that has the style `ContextParallelAttention`.
    """

    attention_plan: torch.Tensor
    layout: AxisLayout
    group: dist.ProcessGroup
    live: LivePlan

    def shard(self, x: torch.Tensor, dim: int, *, grad: str = "partial") -> torch.Tensor:
        """This rank's rows of a tensor that every rank has whole."""
        return shard(x, self.layout, dim, group=self.group, grad=grad)

    def unshard(self, x: torch.Tensor, dim: int, *, grad: str = "partial") -> torch.Tensor:
        """All rows, on every rank, of a tensor of which each has its own."""
        return unshard(x, self.layout, dim, group=self.group, grad=grad)

    def replicate(self, x: torch.Tensor) -> torch.Tensor:
        """A tensor that every rank has and uses; its gradient is the sum of what all ranks did with it."""
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
    """A region over the ranks of a mesh, around forward AND backward; several may be open at once.

    layout: who owns which of the region's tokens (`options.layout(...)` makes one); mask: what may see what, beside
    what each attention says of itself. kv_layout: of the keys, for cross attention to another sharded sequence.
    sequences: of the batch, as many as the mask tells apart unless given. mesh: 1-D; for `hybrid` (ring, all-to-all).

    Raises:
        ContextParallelError: a layout for another number of ranks; or, at the end, no attention ran in the region
            although modules of this process are parallelised over `mesh`.
    """
    options = options or ContextParallelOptions()
    mesh, groups = flat_mesh(mesh, options)
    for part in (layout, kv_layout or layout):
        if part.degree != mesh.size():
            raise ContextParallelError(
                f"a layout for {part.degree} ranks cannot be that of a region over {mesh.size()}; make it for them"
            )
    check_mask(mask, layout.length, (kv_layout or layout).length, sequences)
    live = LivePlan(mesh, layout, mask, options, kv_layout, groups)
    with opened(live, sequences) as handle:
        yield Region(handle, layout, mesh.get_group(), live)


def shard(
    x: torch.Tensor, layout: AxisLayout, dim: int, *, group: dist.ProcessGroup, grad: str = "partial"
) -> torch.Tensor:
    """This rank's rows of x, which every rank has whole: `layout.length` rows in `dim`.

    grad: placement of the gradient of x: `partial`, or `replicated` (a collective in the backward).

    Raises:
        ContextParallelError: another placement, or another number of rows.
    """
    _check(x, dim, layout.length, grad)
    if grad == "replicated":
        return _ShardReplicated.apply(x, layout, dim, group)
    return x.index_select(dim, _own_indices(x, layout, group))


def unshard(
    x: torch.Tensor, layout: AxisLayout, dim: int, *, group: dist.ProcessGroup, grad: str = "partial"
) -> torch.Tensor:
    """All rows, in their global order, of which x has this rank's; a collective.

    grad: placement of the gradient of the result: `partial` (each rank's is a part: added up in the backward, a
    collective), or `replicated` (each has the whole: this rank's rows are taken).

    Raises:
        ContextParallelError: another placement, or another number of rows.
    """
    _check(x, dim, layout.local_length(group.rank()), grad)
    if grad == "replicated":
        return _UnshardReplicated.apply(x, layout, dim, group)
    return _everything(x, layout, dim, group)


def replicate(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """x, whose gradient is the sum of the gradients of all ranks, on every rank; a collective in the backward."""
    return _Replicate.apply(x, group)


def borrow(x: torch.Tensor, layout: AxisLayout, *, group: dist.ProcessGroup, copies: int = 1) -> torch.Tensor:
    """Whole sequences of some samples -> this rank's rows of the samples of all ranks; a collective.

    x: (B, S, ...), the same on each `copies` consecutive ranks of the group (the context-parallel ranks of one
    data-parallel rank), others on others -> (G * B, rows, ...), G the number of such sets of ranks, samples in the
    order of ranks. The gradient of x is partial over its copies.

    Raises:
        ContextParallelError: sequences of another length than the layout's, or copies that do not divide the ranks.
    """
    samples, rank = _samples(x.shape[0], copies, group), group.rank()
    _check(x, 1, layout.length, "partial")
    # Each copy sends a part of the rows that it has in common with the others.
    cut = _sources(x.shape[0] * layout.length, copies, group)
    before = sum(cut.local_length(copy) for copy in range(rank // copies * copies, rank))
    mine = x.flatten(0, 1).narrow(0, before, cut.local_length(rank))
    rows = exchange(mine, cut, layout.repeated(samples).ranges, dim=0, group=group, outside="refuse")
    return rows.unflatten(0, (samples, layout.local_length(rank)))


def give_back(x: torch.Tensor, layout: AxisLayout, *, group: dist.ProcessGroup, copies: int = 1) -> torch.Tensor:
    """Undo `borrow`: this rank's rows of all samples (G * B, rows, ...) -> whole sequences (B, S, ...) of its own.

    Each of the copies gets them; the gradient of the result is partial over them.

    Raises:
        ContextParallelError: another number of rows than the layout's, or copies that do not divide the ranks.
    """
    sets = _samples(1, copies, group)
    _check(x, 1, layout.local_length(group.rank()), "partial")
    if x.shape[0] % sets:
        raise ContextParallelError(f"{x.shape[0]} samples cannot be given back to {sets} sets of ranks alike")
    each = x.shape[0] // sets * layout.length
    wanted: list[list[Range]] = [[(r // copies * each, (r // copies + 1) * each)] for r in range(group.size())]
    rows = exchange(x.flatten(0, 1), layout.repeated(x.shape[0]), wanted, dim=0, group=group, outside="refuse")
    return rows.unflatten(0, (x.shape[0] // sets, layout.length))


def _samples(of_each: int, copies: int, group: dist.ProcessGroup) -> int:
    if copies < 1 or group.size() % copies:
        raise ContextParallelError(f"{copies} copies do not divide the {group.size()} ranks of the region")
    return of_each * group.size() // copies


def _sources(rows: int, copies: int, group: dist.ProcessGroup) -> AxisLayout:
    """Who sends which rows of all samples, laid one after another; `rows` are those of one set of copies."""
    sets = group.size() // copies
    shards = tuple(((s * rows, (s + 1) * rows),) for s in range(sets))
    return AxisLayout("samples", rows * sets, shards).cut(copies)


def _everything(x: torch.Tensor, layout: AxisLayout, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    return exchange(x, layout, [[(0, layout.length)]] * layout.degree, dim=dim, group=group)


def _own_indices(x: torch.Tensor, layout: AxisLayout, group: dist.ProcessGroup) -> torch.Tensor:
    return torch.from_numpy(layout.indices(group.rank())).to(x.device)


def _check(x: torch.Tensor, dim: int, rows: int, grad: str) -> None:
    if grad not in PLACEMENTS:
        raise ContextParallelError(f"grad = {grad!r} is none of {', '.join(map(repr, PLACEMENTS))}")
    if x.shape[dim] != rows:
        raise ContextParallelError(
            f"a tensor with {x.shape[dim]} rows in dimension {dim} is at the border of a region whose layout has "
            f"{rows}; give the dimension of the sequence, or the region's layout"
        )


class _ShardReplicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, layout, dim, group):
        ctx.border = layout, dim, group
        return x.index_select(dim, _own_indices(x, layout, group))

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        return _everything(gradient, *ctx.border), None, None, None


class _UnshardReplicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, layout, dim, group):
        ctx.border = layout, dim, group
        return _everything(x, layout, dim, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        layout, dim, group = ctx.border
        return gradient.index_select(dim, _own_indices(gradient, layout, group)), None, None, None


class _Replicate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        total = gradient.to(torch.promote_types(gradient.dtype, torch.float32), copy=True).contiguous()
        return all_reduce(total, ctx.group).to(gradient.dtype), None
