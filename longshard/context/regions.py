"""The context around forward and backward in which one sequence lies over many ranks, and regions of a model.

Outside a region every rank of its group computes the same, on whole sequences; inside, each rank has its own rows.
Attention in it has the style `ContextParallelAttention` and gets its plan; other attention is an error, unless
`local_attention=True` says that it shall see the rows of one rank alone.

At the border, a gradient on the outside is `partial` or `replicated`: see `sharding/placement.py`. Parameters that are
used inside have partial gradients: `replicate` them, or let FSDP sum them.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from longshard.context.execution.chunks import ChunkRows, KeptTensor
from longshard.context.execution.kernels.choose import GPU_KERNELS, GpuKernels
from longshard.context.live import LivePlan, Scores, any_plan_open, flat_mesh, opened
from longshard.context.local_attention import RefusedLocalAttention
from longshard.context.planning.mask import Mask
from longshard.context.planning.options import ContextParallelError, ContextParallelOptions
from longshard.sharding.exchange import all_gather
from longshard.sharding.layout import AxisLayout
from longshard.sharding.placement import replicate, rows_on, shard, unshard
from longshard.sharding.tensors import content_hash

Intercept = Callable[[torch.Tensor, LivePlan], AbstractContextManager[None]]
"""What runs calls of attention by a plan: (its handle, the plan) -> a context."""


@dataclass(frozen=True)
class Region:
    """An open context or region: the handle for its attention, its layout, group, and plan, which counts calls.

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
    local_attention: bool = False,
    scores: Scores | None = None,
    gpu: GpuKernels = GPU_KERNELS,
) -> Iterator[Region]:
    """Open a region over the ranks of a mesh, around forward AND backward; several may be open at once.

    mesh: 1-D; for `hybrid` 2-D, (ring, head group). layout: who owns which tokens of the region (`options.layout(...)`
    makes one); mask: intersected with the mask of each attention; kv_layout: the layout of the keys, for cross
    attention to another sharded sequence; sequences: of the batch, by default as many as the mask has;
    local_attention: allow attention calls inside that do not use the plan, and a region without attention;
    scores: who takes the scores of attention inside; gpu: kernels of this process.

    Raises:
        ContextParallelError: a layout for another number of ranks; attention was called without the plan; or, at the
            end, no attention ran over the plan.
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
            f"{sequences or 'any number of'} sequences of {q_len} queries and {kv_len} keys; make it for them, or "
            "one for all sequences"
        )
    live = LivePlan(mesh, layout, mask, options, kv_layout, groups, scores=scores, gpu=gpu)
    watched = nullcontext() if local_attention else RefusedLocalAttention(mesh.size())
    with opened(live, sequences, local_attention=local_attention) as handle, watched:
        yield Region(handle, layout, mesh.get_group(), live)


@contextmanager
def context_parallel(
    mesh: DeviceMesh,
    *,
    buffers: Sequence[torch.Tensor],
    buffer_seq_dims: Sequence[int],
    no_restore_buffers: Collection[torch.Tensor] | None = None,
    mask: Mask | None = None,
    load_balancer: str | AxisLayout | None = None,
    method: str | None = None,
    options: ContextParallelOptions | None = None,
    sequences: int | None = None,
    check_consistency: bool = False,
    intercept: Intercept | None = None,
    local_attention: bool = False,
    scores: Scores | None = None,
    gpu: GpuKernels = GPU_KERNELS,
) -> Iterator[Region]:
    """Cut `buffers` over the ranks of a mesh, in place, for forward AND backward; restore them afterwards.

    buffers: tensors that are the same on all ranks, such as tokens, labels and rotary tables. The first one has the
    global sequence length; of a longer one, the first rows are cut. buffer_seq_dims: the sequence dimension of each.
    no_restore_buffers: buffers that stay cut. options: how attention is spread; `method` and `load_balancer` (a name,
    or a layout) replace its fields. check_consistency: compare plan and buffers of all ranks first, by a hash.
    intercept: `longshard.intercept_sdpa(model)`, which runs calls of F.scaled_dot_product_attention over all ranks
    too; or any function that returns a context to enter with the plan. The other arguments are as of `region`.

    Attention whose module has the style `ContextParallelAttention` runs over all ranks, and so does intercepted
    attention. Other attention is refused, unless local_attention. PyTorch's function of this name intercepts by itself.

    Raises:
        ContextParallelError: a context is open already; buffers, mask or layout do not fit; ranks differ; attention was
            called without the plan; or, at the end, no attention ran over the plan.
    """
    options = _with_names(options or ContextParallelOptions(), method, load_balancer)
    flat, _ = flat_mesh(mesh, options)
    if check_consistency:  # before checks that might fail on one rank alone
        settings = options, mask, load_balancer, tuple(buffer_seq_dims)
        _check_ranks_agree(flat, settings, buffers)
    cuts, seq_len = _cuts(buffers, buffer_seq_dims)
    _refuse_open(flat)
    layout = _layout(load_balancer, options, mask, seq_len, flat.size())
    unwatched = local_attention or intercept is not None  # an interception watches on its own
    how = {"sequences": sequences, "local_attention": unwatched, "scores": scores, "gpu": gpu}
    with (
        region(mesh, layout, mask, options, **how) as cp,
        _cut(cuts, layout, flat.get_local_rank(), no_restore_buffers or ()),
        nullcontext() if intercept is None else intercept(cp.attention_plan, cp.live),
    ):
        yield cp


def _with_names(
    options: ContextParallelOptions, method: str | None, load_balancer: str | AxisLayout | None
) -> ContextParallelOptions:
    """Return the options with the method and the load balancer that are named."""
    if method is not None:
        options = replace(options, method=method)
    if isinstance(load_balancer, str):
        options = replace(options, load_balancer=load_balancer)
    return options


def _refuse_open(mesh: DeviceMesh) -> None:
    if any_plan_open(mesh):
        raise ContextParallelError(
            "a context or region is open already over this mesh; leave it before entering `context_parallel`"
        )


def _layout(
    load_balancer: str | AxisLayout | None,
    options: ContextParallelOptions,
    mask: Mask | None,
    seq_len: int,
    degree: int,
) -> AxisLayout:
    """Return the layout that is given in place of a load balancer, if it fits; else the layout of the options."""
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
    return layout


@contextmanager
def sequence_chunks(
    mesh: DeviceMesh,
    layout: AxisLayout,
    mask: Mask | None,
    options: ContextParallelOptions,
    *,
    sequences: int,
    keep: Callable[[torch.Tensor], KeptTensor],
    scores: Scores | None = None,
    gpu: GpuKernels = GPU_KERNELS,
) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield the handle of each chunk, for the forward AND the backward; inside, rows wait for later chunks.

    mesh: of one rank; layout: contiguous, of all chunks; mask: intersected with the mask of each attention; sequences:
    of the batch; keep: makes keys and values wait; scores, gpu: of `LivePlan`. The model gives each layer its own
    handle, `of_layer(...)`.
    """
    rows = ChunkRows(keep)
    with ExitStack() as stack:
        plans = (
            LivePlan(mesh, layout, mask, options, chunk=(number, rows), scores=scores, gpu=gpu)
            for number in range(layout.degree)
        )
        yield tuple(stack.enter_context(opened(plan, sequences)) for plan in plans)


@contextmanager
def _cut(
    cuts: Sequence[tuple[torch.Tensor, int]],
    layout: AxisLayout,
    rank: int,
    not_restored: Collection[torch.Tensor],
) -> Iterator[None]:
    """Cut each buffer to the rank's rows of its dimension; restore it at the end."""
    dropped = {id(x) for x in not_restored}
    if dropped - {id(x) for x, _ in cuts}:
        raise ContextParallelError(
            "no_restore_buffers of context_parallel names a tensor that is none of its buffers; name it in both"
        )
    whole: list[tuple[torch.Tensor, torch.Tensor]] = []
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
    buffers: Sequence[torch.Tensor], dims: Sequence[int]
) -> tuple[list[tuple[torch.Tensor, int]], int]:
    """Check the buffers; return (buffer, non-negative dimension) for each tensor, once, and the sequence length."""
    if not buffers or len(buffers) != len(dims):
        raise ContextParallelError(
            f"context_parallel got {len(buffers)} buffers and {len(dims)} sequence dimensions; give one dimension for "
            "each buffer, and at least one buffer"
        )
    cuts: dict[int, tuple[torch.Tensor, int]] = {}
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


def _check_ranks_agree(mesh: DeviceMesh, plan: object, buffers: Sequence[torch.Tensor]) -> None:
    """Raise on all ranks if some ranks have another plan or other data than most ranks; a collective."""
    of_plan = torch.frombuffer(bytearray(repr(plan).encode()), dtype=torch.uint8)
    hashes_here = (
        content_hash({"plan": of_plan}),
        content_hash({str(i): x for i, x in enumerate(buffers)}),
    )
    pair = torch.tensor(hashes_here, dtype=torch.int64, device=mesh.device_type)
    table = [tuple(row) for row in all_gather(pair, mesh).tolist()]
    for column, what in enumerate(("plan (layout, mask, method)", "batch (buffers)")):
        hashes = [row[column] for row in table]
        usual = max(hashes, key=lambda value: (hashes.count(value), -hashes.index(value)))
        others = [rank for rank, value in enumerate(hashes) if value != usual]
        if others:
            raise ContextParallelError(
                f"context-parallel ranks must have the same {what}, and rank(s) {others} of the group differ from the "
                f"others (hashes {[f'{value & 0xFFFFFFFF:08x}' for value in hashes]}); give every rank the same data "
                "and settings"
            )
