"""The context around forward and backward in which one sequence lies over many ranks."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh

from trainer.config.schema import Parallelism
from trainer.distributed.context_parallel.attention import (
    ContextParallelError,
    LivePlan,
    any_plan_open,
    close_plan,
    open_plan,
    parallelised_modules,
)
from trainer.distributed.context_parallel.plan import ring_plan
from trainer.distributed.layout import LAYOUTS, SequenceLayout

METHODS = ("ring",)


@dataclass(frozen=True)
class ContextParallelOptions:
    """How attention is spread over the ranks: `method` is `ring`, `load_balancer` `head_tail` or `contiguous`.

    multiple_of: what divides each rank's number of tokens (the tensor-parallel degree, for sequence parallelism).
    """

    method: str = "ring"
    load_balancer: str = "head_tail"
    multiple_of: int = 1

    def __post_init__(self) -> None:
        for name, value, choices in (("method", self.method, METHODS), ("load_balancer", self.load_balancer, LAYOUTS)):
            if value not in choices:
                raise ContextParallelError(f"{name} = {value!r} is none of {', '.join(map(repr, choices))}")

    @classmethod
    def from_config(cls, config: Parallelism) -> "ContextParallelOptions":
        return cls(
            method=config.context_parallel_method,
            load_balancer=config.context_parallel_load_balancer,
            multiple_of=config.tensor_parallel_degree,
        )


@dataclass(frozen=True)
class ContextParallel:
    """What the open context offers: the handle for the model's forward, the layout, and the attention calls so far."""

    attention_plan: torch.Tensor
    layout: SequenceLayout
    live: LivePlan

    @property
    def attention_calls(self) -> int:
        return self.live.calls


@contextmanager
def context_parallel(
    mesh: DeviceMesh,
    *,
    buffers: Sequence[torch.Tensor],
    buffer_seq_dims: Sequence[int],
    no_restore_buffers: Collection[torch.Tensor] = (),
    options: ContextParallelOptions | None = None,
) -> Iterator[ContextParallel]:
    """Cut `buffers` over the ranks of a 1-D mesh, in place, for forward AND backward; whole again afterwards.

    buffers: tensors that every rank holds alike, such as tokens, labels, rotary tables; the first one's length is that
    of the sequence. A longer one (a rotary table) gives its first rows. buffer_seq_dims: each one's sequence dimension.
    no_restore_buffers: those that nobody needs afterwards. The same tensor given twice is cut once.

    Attention whose module has the style `ContextParallelAttention` runs over all ranks; other attention stays local.

    Raises:
        ContextParallelError: nested; a buffer that is too short, or requires gradients; or, at the end, no attention
            ran although modules of this process are parallelised over `mesh`.
    """
    options = options or ContextParallelOptions()
    if any_plan_open(mesh):
        raise ContextParallelError("`context_parallel` is open already over this mesh; leave it before entering again")
    cuts = _distinct(buffers, buffer_seq_dims)
    seq_len = cuts[0][0].shape[cuts[0][1]]
    _check_buffers(cuts, seq_len)
    rank = mesh.get_local_rank()
    layout = LAYOUTS[options.load_balancer](seq_len, mesh.size(), multiple_of=options.multiple_of)
    live = LivePlan(ring_plan(layout, rank), mesh, layout.length(rank))
    rows = max((x.shape[0] for x, dim in cuts if dim == 1), default=1)
    number = open_plan(live)
    whole: list[tuple[torch.Tensor, torch.Tensor]] = []
    try:
        indices = torch.from_numpy(layout.indices(rank))
        for x, dim in cuts:
            # `set_` moves the tensor to new memory: what else looks at the old one still sees it whole.
            whole.append((x, x.detach()))
            x.set_(x.index_select(dim, indices.to(x.device)))
        yield ContextParallel(torch.full((rows,), number, dtype=torch.int64), layout, live)
        _check_attention_ran(live, mesh)
    finally:
        close_plan(number)
        dropped = {id(x) for x in no_restore_buffers}
        for x, original in whole:
            if id(x) not in dropped:
                x.set_(original)


def _distinct(buffers: Sequence[torch.Tensor], dims: Sequence[int]) -> list[tuple[torch.Tensor, int]]:
    """(buffer, non-negative dimension), each tensor once."""
    if not buffers or len(buffers) != len(dims):
        raise ContextParallelError(
            f"context_parallel got {len(buffers)} buffers and {len(dims)} sequence dimensions; give one dimension for "
            "each buffer, and at least one buffer"
        )
    cuts = {id(x): (x, dim % x.ndim) for x, dim in zip(buffers, dims, strict=True)}
    return list(cuts.values())


def _check_buffers(cuts: list[tuple[torch.Tensor, int]], seq_len: int) -> None:
    for number, (x, dim) in enumerate(cuts):
        if x.requires_grad:
            raise ContextParallelError(
                f"buffer {number} of context_parallel requires gradients and cannot be cut in place; cut it with an "
                "operation that autograd sees, or detach it"
            )
        if x.shape[dim] < seq_len:
            raise ContextParallelError(
                f"buffer {number} of context_parallel has {x.shape[dim]} rows in dimension {dim}, fewer than the "
                f"sequence's {seq_len}, which the first buffer has; give the right dimension, or a longer buffer"
            )


def _check_attention_ran(live: LivePlan, mesh: DeviceMesh) -> None:
    if live.calls == 0 and (modules := parallelised_modules(mesh)):
        raise ContextParallelError(
            f"the inputs were cut over {mesh.size()} ranks, but none of the {modules} context-parallel attention "
            "modules ran inside the context; run the model's forward and backward inside it"
        )
