"""Context-parallel attention as one operator, and the style that puts it in the place of a model's attention.

The operator finds what to do by a handle, a small int64 tensor (rows,) that goes through the model's forward as an
argument: its numbers name an entry of the table of live plans, which the `context_parallel` context keeps. (A Python
object or a context variable would break or recompile a compiled graph; as a tensor it is also cut with a micro-batch.)

It is a `torch.library` operator, so that `torch.compile(fullgraph=True)` does not break on it and selective activation
checkpointing can keep its output and log-sum-exp instead of communicating again.
"""

import itertools
from dataclasses import dataclass
from weakref import WeakSet

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from trainer.distributed.context_parallel.kernels import choose_kernel
from trainer.distributed.context_parallel.plan import RankPlan
from trainer.distributed.context_parallel.ring import RingContext, ring_backward, ring_forward


class ContextParallelError(RuntimeError):
    """Context parallelism is not in force where it should be, or used in a way that cannot be right."""


@dataclass(eq=False)
class LivePlan:
    """A plan of a context that is open, and how often the operator ran under it."""

    plan: RankPlan
    mesh: DeviceMesh
    rows: int
    """Rows of the sequence on this rank."""
    calls: int = 0


# The one process-wide state of the project, beside the registration of the operators themselves.
_live: dict[int, LivePlan] = {}
_parallelised: WeakSet[nn.Module] = WeakSet()
_numbers = itertools.count(1)


def open_plan(live: LivePlan) -> int:
    """Enter a plan into the table; its number."""
    number = next(_numbers)
    _live[number] = live
    return number


def close_plan(number: int) -> None:
    """Take a plan out of the table."""
    del _live[number]


def any_plan_open(mesh: DeviceMesh) -> bool:
    """Whether a context over this mesh is open."""
    return any(live.mesh.get_group() is mesh.get_group() for live in _live.values())


def parallelised_modules(mesh: DeviceMesh) -> int:
    """How many modules of this process run their attention over `mesh`."""
    # By group: a mesh that is sliced again is another object, and one of an earlier job may look the same.
    return sum(module.context_parallel_group is mesh.get_group() for module in _parallelised)


def _resolve(handle: torch.Tensor, rows: int) -> LivePlan:
    """The live plan that a handle names.

    Raises:
        ContextParallelError: outside the context, or on inputs that were not cut by it.
    """
    if not _live:
        raise ContextParallelError(
            "context-parallel attention was called outside its context; enter `context_parallel(...)` around the "
            "forward and the backward"
        )
    # Reading the number of a handle on a GPU would wait for it; with a single plan there is nothing to choose.
    number = next(iter(_live)) if handle.is_cuda and len(_live) == 1 else int(handle[0])
    live = _live.get(number)
    if live is None:
        raise ContextParallelError(
            f"the plan {number} of this context-parallel attention belongs to a context that is closed; pass "
            "`attention_plan` of the open context to the model"
        )
    if rows != live.rows:
        raise ContextParallelError(
            f"context-parallel attention got {rows} rows of the sequence and its plan has {live.rows} for this rank; "
            "cut the inputs by naming them in `context_parallel(buffers=...)`"
        )
    return live


def _ring(live: LivePlan, q: torch.Tensor) -> RingContext:
    kernel = choose_kernel(q.device.type, q.dtype)
    return RingContext(live.plan, live.mesh.get_local_rank(), live.mesh.get_group(), kernel)


@torch.library.custom_op("trainer::context_parallel_attention", mutates_args=())
def context_parallel_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of this rank's queries over the whole sequence; a collective over the plan's mesh.

    q: (B, H, S, D); k, v: (B, K, S, D), K divides H, S this rank's rows; plan: handle, (rows,) int64
    -> output as q, log-sum-exp (B, H, S) in float32 at least.

    Raises:
        ContextParallelError: no context is open, or the inputs were not cut by it.
    """
    live = _resolve(plan, q.shape[2])
    live.calls += 1
    return ring_forward(q, k, v, _ring(live, q), scale)


@torch.library.custom_op("trainer::context_parallel_attention_backward", mutates_args=())
def _context_parallel_attention_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    plan: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    live = _resolve(plan, q.shape[2])
    return ring_backward(dout, q, k, v, out, lse, _ring(live, q), scale)


@context_parallel_attention.register_fake
def _(q, k, v, plan, scale):
    b, h, s, d = q.shape
    out = q.new_empty(b, s, h, d).transpose(1, 2)
    return out, q.new_empty(b, h, s, dtype=torch.promote_types(q.dtype, torch.float32))


@_context_parallel_attention_backward.register_fake
def _(dout, q, k, v, out, lse, plan, scale):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save(ctx, inputs, output) -> None:
    q, k, v, plan, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output, plan)


def _differentiate(ctx, dout: torch.Tensor, _dlse: torch.Tensor):
    q, k, v, out, lse, plan = ctx.saved_tensors
    dq, dk, dv = _context_parallel_attention_backward(dout, q, k, v, out, lse, plan, ctx.scale)
    return dq, dk, dv, None, None


context_parallel_attention.register_autograd(_differentiate, setup_context=_save)


class ContextParallelAttention(ParallelStyle):
    """Style for an attention module whose forward is `(q, k, v, *, scale=None, plan=None)`, with q (B, H, S, D) and
    unrepeated k, v (B, K, S, D): it then attends over the sequence of all ranks of the mesh, causally.

    Inside `context_parallel(...)`, the model passes the context's `attention_plan` on as `plan`.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def forward(
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            *,
            scale: float | None = None,
            plan: torch.Tensor | None = None,
        ) -> torch.Tensor:
            if plan is None:
                raise ContextParallelError(
                    "this attention is context parallel and got no plan; run the model inside `context_parallel(...)` "
                    "and pass that context's `attention_plan` to its forward"
                )
            return context_parallel_attention(q, k, v, plan, q.shape[-1] ** -0.5 if scale is None else scale)[0]

        module.forward = forward
        module.context_parallel_group = device_mesh.get_group()
        _parallelised.add(module)
        return module
