"""Context parallelism on a part of a model: a region, and the functions with which tensors enter and leave it.

Outside a region every rank of its group computes the same, on whole sequences; inside, each rank has its own rows.
Attention in the region has the style `ContextParallelAttention` and gets the region's plan. Other attention stays
local.

At the border of a region, a gradient on the outside has one of two placements, which the caller names:

    partial      The ranks' gradients add up to the whole gradient. Use it if gradients are summed over the ranks anyway
                 (FSDP over `dp_shard_cp`, as in the trainer) and each rank's loss is its part of the sum.
    replicated   Every rank has the whole gradient. Use it if nothing is summed afterwards.

                shard(x)                      unshard(y)                     replicate(w)
    forward     own rows                      all rows, on every rank        w
    partial     own rows' gradient,           own rows of the sum of all     (not needed)
                zeros elsewhere               ranks' gradients
    replicated  own rows' gradients of all    own rows of the gradient       sum of all ranks' gradients
                ranks, put together

Parameters that are used inside a region always have partial gradients: `replicate` them, or let FSDP sum them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

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


def shard(
    x: torch.Tensor, layout: AxisLayout, dim: int, *, group: dist.ProcessGroup, grad: str = "partial"
) -> torch.Tensor:
    """Return this rank's rows of x, which every rank has whole: `layout.length` rows in `dim`.

    grad: placement of the gradient of x: `partial`, or `replicated` (a collective in the backward).

    Raises:
        ContextParallelError: another placement, or another number of rows.
    """
    _check(x, dim, layout.length, grad)
    own_rows, all_rows = (partial(f, layout=layout, dim=dim, group=group) for f in (_own_rows, _all_rows))
    return own_rows(x) if grad == "partial" else _WithAdjoint.apply(x, own_rows, all_rows)


def unshard(
    x: torch.Tensor, layout: AxisLayout, dim: int, *, group: dist.ProcessGroup, grad: str = "partial"
) -> torch.Tensor:
    """Return all rows, in their global order, of which x has this rank's; a collective.

    grad: placement of the gradient of the result: `partial` (summed over the ranks in the backward, a collective), or
    `replicated` (the backward takes this rank's rows).

    Raises:
        ContextParallelError: another placement, or another number of rows.
    """
    _check(x, dim, layout.local_length(group.rank()), grad)
    own_rows, all_rows = (partial(f, layout=layout, dim=dim, group=group) for f in (_own_rows, _all_rows))
    return all_rows(x) if grad == "partial" else _WithAdjoint.apply(x, all_rows, own_rows)


def replicate(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return x, with the sum of all ranks' gradients as gradient on every rank; a collective in the backward."""

    def summed(gradient: torch.Tensor) -> torch.Tensor:
        total = gradient.to(torch.promote_types(gradient.dtype, torch.float32), copy=True).contiguous()
        return all_reduce(total, group).to(gradient.dtype)

    return _WithAdjoint.apply(x, lambda x: x.view_as(x), summed)


def borrow(x: torch.Tensor, layout: AxisLayout, *, group: dist.ProcessGroup, copies: int = 1) -> torch.Tensor:
    """Return this rank's rows of the samples of all ranks, from whole sequences of its own samples; a collective.

    x: (B, S, ...), the same on each `copies` consecutive ranks of the group (the context-parallel ranks of one
    data-parallel rank) -> (G * B, rows, ...), with G such sets of ranks, samples in the order of ranks. The gradient of
    x is partial over its copies.

    Raises:
        ContextParallelError: sequences of another length than the layout's, or copies that do not divide the ranks.
    """
    sets, rank, each = _sets(copies, group), group.rank(), x.shape[0] * layout.length
    _check(x, 1, layout.length, "partial")
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
        ContextParallelError: another number of rows than the layout's, or copies that do not divide the ranks.
    """
    sets = _sets(copies, group)
    _check(x, 1, layout.local_length(group.rank()), "partial")
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


def _all_rows(x: torch.Tensor, layout: AxisLayout, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    return exchange(x, layout, [[(0, layout.length)]] * layout.degree, dim=dim, group=group)


def _own_rows(x: torch.Tensor, layout: AxisLayout, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    return x.index_select(dim, torch.from_numpy(layout.indices(group.rank())).to(x.device))


def _check(x: torch.Tensor, dim: int, rows: int, grad: str) -> None:
    if grad not in PLACEMENTS:
        raise ContextParallelError(f"grad = {grad!r} is none of {', '.join(map(repr, PLACEMENTS))}")
    if x.shape[dim] != rows:
        raise ContextParallelError(
            f"a tensor with {x.shape[dim]} rows in dimension {dim} is at the border of a region whose layout has "
            f"{rows}; give the dimension of the sequence, or the region's layout"
        )


class _WithAdjoint(torch.autograd.Function):
    """Apply one function in the forward, and another one to the gradient in the backward."""

    @staticmethod
    def forward(ctx, x, function, adjoint):
        ctx.adjoint = adjoint
        return function(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        return ctx.adjoint(gradient), None, None
