"""The context around forward and backward in which one sequence lies over many ranks, and regions of a model.

Outside a region every rank of its group computes the same, on whole sequences; inside, each rank has its own rows.
Attention with the style `ContextParallelAttention` runs over all ranks, and so does intercepted attention. Other
attention is an error, unless `local_attention=True` says that it may see only the rows of one rank. PyTorch's function
`context_parallel` intercepts by itself.

At the border, a gradient on the outside is `partial` or `replicated`: see `sharding/placement.py`. Parameters that are
used inside have partial gradients: `replicate` them, or let FSDP sum them.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed import DeviceMesh, ProcessGroup

from longshard.context.execution.chunks import ChunkRows, KeptTensor
from longshard.context.hooks import NO_HOOKS, AttentionHooks
from longshard.context.live import LivePlan, any_plan_open, flat_mesh, opened
from longshard.context.local_attention import RefusedLocalAttention
from longshard.context.planning.mask import Mask
from longshard.context.planning.options import ContextParallelError, ContextParallelOptions
from longshard.sharding.exchange import all_gather
from longshard.sharding.layout import AxisLayout
from longshard.sharding.placement import replicate, rows_on, shard, unshard
from longshard.sharding.tensors import content_hash

Intercept = Callable[[Tensor, LivePlan], AbstractContextManager[None]]
"""Makes, from a handle and its plan, a context in which calls of attention run by the plan."""


@dataclass(frozen=True)
class Region:
    """An open context or region.

    Attributes:
        attention_plan: The handle, (sequences,) int64: the `plan` of attention with the style
            `ContextParallelAttention`.
        layout: Which rank owns which rows.
        group: The group of the ranks.
        live: The plan, which counts calls.
    """

    attention_plan: Tensor
    layout: AxisLayout
    group: ProcessGroup
    live: LivePlan

    def shard(self, x: Tensor, dim: int, *, grad: str = "partial") -> Tensor:
        """Return this rank's rows of a tensor that every rank has whole.

        Args:
            x: The whole tensor, any shape.
            dim: The dimension to shard.
            grad: The placement of the gradient of x, see `sharding/placement.py`.
        """
        return shard(x, self.layout, dim, group=self.group, grad=grad)

    def unshard(self, x: Tensor, dim: int, *, grad: str = "partial") -> Tensor:
        """Return all rows; a collective.

        Args:
            x: This rank's rows, any shape.
            dim: The sharded dimension.
            grad: The placement of the gradient of the result, see `sharding/placement.py`.
        """
        return unshard(x, self.layout, dim, group=self.group, grad=grad)

    def replicate(self, x: Tensor) -> Tensor:
        """Return a tensor that every rank uses in the region; its gradient is the sum of all ranks' gradients.

        Args:
            x: The tensor, any shape.
        """
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
    local_attention: bool = False,
    hooks: AttentionHooks = NO_HOOKS,
) -> Iterator[Region]:
    """Yield a region over the ranks of a mesh, open around forward AND backward; several may be open at once.

    Args:
        mesh: 1-D; for `hybrid` 2-D, (ring, head group).
        layout: Which rank owns which tokens of the region; `options.layout(...)` makes one.
        mask: Is intersected with the mask of each attention; None if absent.
        options: How attention is spread; None means the defaults.
        kv_layout: The layout of the keys, for cross attention to another sharded sequence; None means `layout`.
        sequences: Number of sequences of the batch; None means the number of sequences of the mask.
        local_attention: Allow attention calls that do not use the plan, and a region without attention.
        hooks: What this process adds to each call of attention inside.

    Raises:
        ContextParallelError: Layout or mask do not fit, attention was called without the plan, or none ran over it.
    """
    options = options or ContextParallelOptions()
    mesh, groups = flat_mesh(mesh, options)
    for part in (layout, kv_layout or layout):
        if part.degree != mesh.size():
            raise ContextParallelError(
                f"a layout for {part.degree} ranks does not fit a region over {mesh.size()} ranks; make it for them"
            )
    q_len = layout.length
    kv_len = (kv_layout or layout).length
    if mask is not None and (
        (mask.q_len, mask.kv_len) != (q_len, kv_len)
        or mask.sequences not in (1, sequences or mask.sequences)
    ):
        raise ContextParallelError(
            f"the mask is for {mask.sequences} x {mask.q_len} queries and {mask.kv_len} keys, and there are "
            f"{sequences or 'any number of'} sequences of {q_len} queries and {kv_len} keys. Make it for them, or "
            "one for all sequences"
        )
    live = LivePlan(mesh, layout, mask, options, kv_layout, groups, hooks=hooks)
    watched = nullcontext() if local_attention else RefusedLocalAttention(mesh.size())
    with opened(live, sequences, local_attention=local_attention) as handle, watched:
        yield Region(handle, layout, mesh.get_group(), live)


@contextmanager
def context_parallel(
    mesh: DeviceMesh,
    *,
    buffers: Sequence[Tensor],
    buffer_seq_dims: Sequence[int],
    no_restore_buffers: Collection[Tensor] | None = None,
    mask: Mask | None = None,
    load_balancer: str | AxisLayout | None = None,
    method: str | None = None,
    options: ContextParallelOptions | None = None,
    sequences: int | None = None,
    check_consistency: bool = False,
    intercept: Intercept | None = None,
    local_attention: bool = False,
    hooks: AttentionHooks = NO_HOOKS,
) -> Iterator[Region]:
    """Yield the context in which `buffers` are cut over the ranks, in place, for forward AND backward; restore them.

    Args:
        mesh: 1-D; for `hybrid` 2-D, (ring, head group).
        buffers: Tensors of any shape without gradients, the same on all ranks. The first has the sequence length.
        buffer_seq_dims: The sequence dimension of each buffer. The first rows of a longer buffer are cut.
        no_restore_buffers: Buffers that stay cut; None if absent.
        mask: Is intersected with the mask of each attention; None if absent.
        load_balancer: Replaces the load balancer of `options`, by name, or its layout; None if absent.
        method: Replaces the method of `options`; None if absent.
        options: How attention is spread; None means the defaults.
        sequences: Number of sequences of the batch; None means the number of sequences of the mask.
        check_consistency: Compare plan and buffers of all ranks first, by a hash.
        intercept: Returns a context to enter, such as `longshard.intercept_sdpa(model)`; None if absent.
        local_attention: As for `region`.
        hooks: What this process adds to each call of attention inside.

    Raises:
        ContextParallelError: Inputs do not fit, ranks differ, a context is open, or attention did not use the plan.
    """
    named = ("method", method), ("load_balancer", load_balancer)
    names = {key: name for key, name in named if not isinstance(name, AxisLayout | None)}
    options = replace(options or ContextParallelOptions(), **names)
    cuts, layout, rank = _cut_rows(
        buffers, buffer_seq_dims, load_balancer, options, mask, mesh, check_consistency
    )
    unwatched = local_attention or intercept is not None  # an interception watches on its own
    how = {"sequences": sequences, "local_attention": unwatched, "hooks": hooks}
    with (
        region(mesh, layout, mask, options, **how) as cp,
        _cut(cuts, layout, rank, no_restore_buffers or ()),
        nullcontext() if intercept is None else intercept(cp.attention_plan, cp.live),
    ):
        yield cp


def _cut_rows(
    buffers: Sequence[Tensor],
    dims: Sequence[int],
    load_balancer: str | AxisLayout | None,
    options: ContextParallelOptions,
    mask: Mask | None,
    mesh: DeviceMesh,
    check_consistency: bool,
) -> tuple[list[tuple[Tensor, int]], AxisLayout, int]:
    """Return the buffers with their dimensions, the layout, and this rank; check them, and cut nothing.

    The layout is `load_balancer`, or the options choose it. With `check_consistency` it is a collective.

    Raises:
        ContextParallelError: The buffers or the layout do not fit, ranks differ, or a context is open over the mesh.
    """
    mesh, _ = flat_mesh(mesh, options)
    if check_consistency:  # before checks that might fail on one rank only
        _check_ranks_agree(mesh, (options, mask, load_balancer, *dims), buffers)
    cuts, seq_len = _cuts(buffers, dims)
    if any_plan_open(mesh):
        raise ContextParallelError(
            "a context or region is open already over this mesh; leave it before entering `context_parallel`"
        )
    degree = mesh.size()
    layout = (
        load_balancer
        if isinstance(load_balancer, AxisLayout)
        else options.layout(seq_len, degree, mask)
    )
    if (layout.length, layout.degree) != (seq_len, degree):
        raise ContextParallelError(
            f"the layout given to context_parallel is for {layout.length} tokens on {layout.degree} ranks, and there "
            f"are {seq_len} on {degree}; make it for them, or name a load balancer"
        )
    return cuts, layout, mesh.get_local_rank()


@contextmanager
def sequence_chunks(
    mesh: DeviceMesh,
    layout: AxisLayout,
    mask: Mask | None,
    options: ContextParallelOptions,
    *,
    sequences: int,
    keep: Callable[[Tensor], KeptTensor],
    hooks: AttentionHooks = NO_HOOKS,
) -> Iterator[tuple[Tensor, ...]]:
    """Yield the handle of each chunk, (sequences,) int64, for the forward AND the backward.

    Inside, rows wait for later chunks. The model gives each layer its own handle, `with_layer(...)`.

    Args:
        mesh: A mesh of one rank.
        layout: The contiguous layout of all chunks.
        mask: Is intersected with the mask of each attention; None if absent.
        options: How attention is spread.
        sequences: Number of sequences of the batch.
        keep: Makes keys and values, of any shape, wait.
        hooks: What this process adds to each call of attention.
    """
    rows = ChunkRows(keep)
    with ExitStack() as stack:
        plans = (
            LivePlan(mesh, layout, mask, options, chunk=(number, rows), hooks=hooks)
            for number in range(layout.degree)
        )
        yield tuple(stack.enter_context(opened(plan, sequences)) for plan in plans)


@contextmanager
def _cut(
    cuts: Sequence[tuple[Tensor, int]],
    layout: AxisLayout,
    rank: int,
    not_restored: Collection[Tensor],
) -> Iterator[None]:
    """Cut each buffer to the rank's rows of its dimension; restore it at the end."""
    dropped = {id(x) for x in not_restored}
    if dropped - {id(x) for x, _ in cuts}:
        raise ContextParallelError(
            "no_restore_buffers of context_parallel names a tensor that is none of its buffers; name it in both"
        )
    whole = []
    try:
        for x, dim in cuts:
            # `set_` gives the tensor new memory; views of the old memory still see the whole tensor.
            whole.append((x, x.detach()))
            x.set_(x.index_select(dim, rows_on(layout, rank, x.device)))
        yield
    finally:
        for x, original in whole:
            if id(x) not in dropped:
                x.set_(original)


def _cuts(
    buffers: Sequence[Tensor], dims: Sequence[int]
) -> tuple[list[tuple[Tensor, int]], int]:
    """Check the buffers; return (buffer, non-negative dimension) for each tensor, once, and the sequence length."""
    if not buffers or len(buffers) != len(dims):
        raise ContextParallelError(
            f"context_parallel got {len(buffers)} buffers and {len(dims)} sequence dimensions; give one dimension for "
            "each buffer, and at least one buffer"
        )
    cuts = {}
    for number, (x, dim) in enumerate(zip(buffers, dims, strict=True)):
        if not -x.ndim <= dim < x.ndim or cuts.get(id(x), (x, dim % x.ndim))[1] != dim % x.ndim:
            raise ContextParallelError(
                f"buffer {number} of context_parallel, of shape {tuple(x.shape)}, cannot be cut in dimension {dim}; "
                "give its sequence dimension, the same one wherever it is named"
            )
        cuts[id(x)] = x, dim % x.ndim
    seq_len = buffers[0].shape[dims[0]]
    for number, (x, dim) in enumerate(cuts.values()):
        if x.requires_grad:
            raise ContextParallelError(
                f"buffer {number} of context_parallel requires gradients and cannot be cut in place; cut it with an "
                "operation that autograd sees, or detach it"
            )
        if x.is_inference():
            raise ContextParallelError(
                f"buffer {number} of context_parallel was made under `torch.inference_mode()` and cannot be cut in "
                "place; give its clone(), made outside, or use `torch.no_grad()`"
            )
        if x.shape[dim] < seq_len:
            raise ContextParallelError(
                f"buffer {number} of context_parallel has {x.shape[dim]} rows in dimension {dim}, fewer than the "
                f"sequence's {seq_len}, which the first buffer has; give the right dimension, or a longer buffer"
            )
    return list(cuts.values()), seq_len


def _check_ranks_agree(mesh: DeviceMesh, plan: object, buffers: Sequence[Tensor]) -> None:
    """Raise on all ranks if some ranks have another plan or other data than most ranks; a collective."""
    plan_bytes = torch.frombuffer(bytearray(repr(plan).encode()), dtype=torch.uint8)
    hashes_here = (
        content_hash({"plan": plan_bytes}),
        content_hash({str(i): x for i, x in enumerate(buffers)}),
    )
    pair = torch.tensor(hashes_here, dtype=torch.int64, device=mesh.device_type)
    table = [tuple(row) for row in all_gather(pair, mesh).tolist()]
    for column, subject in enumerate(("plan (layout, mask, method)", "batch (buffers)")):
        hashes = [row[column] for row in table]
        usual = max(hashes, key=lambda value: (hashes.count(value), -hashes.index(value)))
        others = [rank for rank, value in enumerate(hashes) if value != usual]
        if others:
            raise ContextParallelError(
                f"context-parallel ranks must have the same {subject}, and rank(s) {others} of the group differ from "
                f"the others (hashes {[f'{value & 0xFFFFFFFF:08x}' for value in hashes]}). Give every rank the same "
                "data and settings"
            )
