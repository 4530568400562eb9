"""Operators of GPUs that a CPU build lacks. Their results have no values."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch.distributed.tensor import DTensor, Partial
from torch.nn import functional as F

from longshard.context.planning.capabilities import FLASH_KERNELS, FlashPackage

_aten = torch.ops.aten

ATTENTION = (
    frozenset(
        f"{name}_{direction}"
        for name in ("_flash_attention", "_efficient_attention")
        for direction in ("forward", "backward")
    )
    | {
        f"_scaled_dot_product_{name}_attention{direction}"
        for name in ("cudnn", "flash")
        for direction in ("", "_backward")
    }
    | {
        f"_scaled_dot_product_flash_attention_for_cpu{direction}"
        for direction in ("", "_backward")
    }
)
"""Names of attention's kernels."""


def kernel_of(name: str, package: FlashPackage | None) -> str:
    """Return the kernel of planned attention: its name, or for PyTorch's flash operators their version.

    Args:
        name: Name of the kernel.
        package: The package of the flash operators. None for FlashAttention-2.
    """
    if name not in FLASH_KERNELS:
        return name
    return "flash2" if package is None else f"flash{package.implementation.removeprefix('FA')}"


def kernel_of_one_rank(operator: str, package: FlashPackage | None) -> str:
    """Return the kernel of attention that is not planned (`trainer.models.attention`).

    Args:
        operator: Its operator in a trace.
        package: The package of the flash operators. None for FlashAttention-2.
    """
    if operator.removesuffix("_backward").endswith("for_cpu"):
        return "cpu_flash"
    return "cudnn" if package is None else kernel_of("cuda_flash", package)


def stand_ins() -> dict[str, Callable[..., Any]]:
    """Return the functions that a trace calls in place of PyTorch's operators, by name, such as `aten::addmm`."""
    replacements = {"aten::_efficient_attention_backward": _efficient_backward}
    # PyTorch up to 2.11 takes the type of a product's result for a number.
    if decomposition_table[_aten.addmm.dtype_out] is decomposition_table[_aten.addmm.default]:
        replacements["aten::addmm"] = _addmm
    return replacements


def _addmm(
    x: Tensor,
    a: Tensor,
    b: Tensor,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> Any:
    out = options.get("out")
    return (
        torch.empty(a.shape[0], b.shape[1], dtype=dtype or x.dtype, device=x.device)
        if out is None
        else out
    )


def _efficient_backward(_dout, q, k, v, _bias, *_: Any, **__: Any) -> tuple:
    """Return gradients as the operator does; PyTorch's own function of shapes cannot be called (torch 2.13)."""
    return *map(torch.empty_like, (q, k, v)), None


# ---- kernels of Triton, and those that a CPU build takes apart


@cache
def kernels_of_cuda() -> torch.library.Library:
    """Let a CPU build call operators of CUDA that it would decompose before the mode sees them. They are not run.

    Returns:
        The library that registers them.
    """
    library = torch.library.Library("aten", "IMPL")
    for name in ("silu_backward", "mish_backward"):
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA"):
            library.impl(name, lambda *_: NotImplemented, "CUDA")
    return library


class _RmsNorm(torch.autograd.Function):
    """One kernel forward, and two backward, for the gradients of input and weight, which read input and gradient."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight, x.new_empty(*x.shape[:-1], 1, dtype=torch.float32))
        return x.mul(weight)

    @staticmethod
    def backward(ctx, dout):
        x, weight, _ = ctx.saved_tensors
        return torch.addcmul(dout, dout, x), dout.flatten(0, -2).sum(0, dtype=weight.dtype)


def rms_norm(x, shape, weight=None, eps=None, real=F.rms_norm) -> Tensor:
    """Stand in for F.rms_norm of a CUDA tensor, which a CPU build decomposes; a DTensor has whole rows.

    Without a weight, and for a tensor of a CPU, the real function runs.

    Args:
        x: The input, any shape.
        shape: As in F.rms_norm.
        weight: As in F.rms_norm.
        eps: As in F.rms_norm.
        real: F.rms_norm.

    Returns:
        The output, with the shape of x.
    """
    if weight is None or not x.is_cuda:
        return real(x, shape, weight, eps)
    if not isinstance(x, DTensor):
        return _RmsNorm.apply(x, weight)
    rows = _RmsNorm.apply(
        x.to_local(), weight.to_local(grad_placements=[Partial()] * x.device_mesh.ndim)
    )
    return DTensor.from_local(
        rows, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride()
    )


def merge(total_out: Tensor, total_lse: Tensor, out: Tensor, lse: Tensor) -> None:
    """Stand in for the Triton kernel that merges partial results: its checks, and one launch.

    Args:
        total_out: (B, H, S, D).
        total_lse: (B, H, S).
        out: (B, H, S, D).
        lse: (B, H, S).
    """
    assert total_out.shape == out.shape
    assert total_lse.shape == lse.shape == out.shape[:3]
    assert total_out.stride(-1) == out.stride(-1) == 1
    assert total_out.dtype == total_lse.dtype == lse.dtype == torch.float32
    b, h, rows, _ = out.shape
    assert b * h * -(-rows // 32) < 2**31
    total_out.mul_(1.0)


class _Attention(torch.autograd.Function):
    """Causal attention of one rank by cuDNN, as F.scaled_dot_product_attention computes it on a Hopper GPU."""

    @staticmethod
    def forward(ctx, q, k, v, scale):
        arguments = (None, True, 0.0, True, False)
        out, lse, _, _, n, m, seed, offset, _ = _aten._scaled_dot_product_cudnn_attention(
            q, k, v, *arguments, scale=scale
        )
        ctx.save_for_backward(q, k, v, out, lse, seed, offset)
        ctx.sizes = (n, m)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse, seed, offset = ctx.saved_tensors
        grads = _aten._scaled_dot_product_cudnn_attention_backward(
            dout,
            q,
            k,
            v,
            out,
            lse,
            seed,
            offset,
            None,
            None,
            None,
            *ctx.sizes,
            0.0,
            True,
            scale=ctx.scale,
        )
        return *grads, None


def attention_of_one_rank(
    q, k, v, attn_mask=None, real=F.scaled_dot_product_attention, **options
) -> Tensor:
    """Stand in for F.scaled_dot_product_attention, which reaches no CUDA kernel in a CPU build of PyTorch.

    Causal attention without a mask runs cuDNN's operators, as on a Hopper GPU. Other attention runs the real function.

    Args:
        q: (B, H, S, D).
        k: (B, K, S, D).
        v: (B, K, S, D).
        attn_mask: As in the real function.
        real: The real function.
        **options: Its other arguments.

    Returns:
        (B, H, S, D).
    """
    if attn_mask is not None or not options.get("is_causal", False):
        return real(q, k, v, attn_mask=attn_mask, **options)
    scale = options.get("scale")
    grouped = options.get("enable_gqa", False)
    assert grouped == (q.shape[1] != k.shape[1])
    return _Attention.apply(q, k, v, q.shape[-1] ** -0.5 if scale is None else scale)
