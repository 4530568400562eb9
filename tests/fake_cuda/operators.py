"""Operators of GPUs as a CPU build lacks them: what they refuse is checked, and their results have no values.

PyTorch has the shapes of attention's operators ("meta" functions), not the checks of their CUDA code. Those stand here:
a tensor that a kernel would read wrongly, or refuse, fails.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.attention import _fa3, _fa4

from tests.unit.kernel_stand_ins import aligned

_aten = torch.ops.aten
_HALVES = (torch.bfloat16, torch.float16)

ATTENTION = frozenset(
    f"{name}_{direction}"
    for name in ("_flash_attention", "_efficient_attention")
    for direction in ("forward", "backward")
) | {
    f"_scaled_dot_product_{name}_attention{direction}" for name in ("cudnn", "flash") for direction in ("", "_backward")
}
"""Names of attention's kernels."""


def _check_cudnn_backward(dout, q, k, v, out, lse, *_: Any) -> None:
    aligned(dout, q, k, v, out)
    assert dout.stride() == out.stride(), "cuDNN reads the output and its gradient with the same strides"
    assert lse.shape == (*q.shape[:3], 1)
    assert lse.dtype == torch.float32


def _check_flash_forward(q, k, v, ends_q, ends_k, longest_q, longest_k, *_: Any) -> None:
    aligned(q, k, v)
    assert q.dtype == k.dtype == v.dtype
    assert q.dtype in _HALVES
    assert k.shape == v.shape
    assert q.shape[-2] % k.shape[-2] == 0
    assert isinstance(longest_q, int)
    assert isinstance(longest_k, int)
    if ends_q is None:
        assert q.ndim == 4
        assert (q.shape[1], k.shape[1]) == (longest_q, longest_k)
    else:
        assert q.ndim == 3
        for ends in (ends_q, ends_k):
            assert ends.dtype == torch.int32
            assert ends.is_cuda
            assert ends.is_contiguous()


def _check_flash_backward(dout, q, k, v, out, lse, ends_q, ends_k, longest_q, longest_k, *rest: Any) -> None:
    _check_flash_forward(q, k, v, ends_q, ends_k, longest_q, longest_k)
    aligned(dout, out)
    assert len({x.dtype for x in (dout, q, out)}) == 1
    assert dout.shape == q.shape == out.shape
    assert lse.dtype == torch.float32
    assert lse.is_contiguous()
    assert lse.shape == ((q.shape[0], q.shape[2], q.shape[1]) if ends_q is None else (q.shape[1], q.shape[0]))
    assert rest[2].is_cuda  # the random state


CHECKS: dict[str, Callable[..., None]] = {
    "aten::_flash_attention_forward": _check_flash_forward,
    "aten::_flash_attention_backward": _check_flash_backward,
    "aten::_scaled_dot_product_cudnn_attention": lambda q, k, v, *_: aligned(q, k, v),
    "aten::_scaled_dot_product_cudnn_attention_backward": _check_cudnn_backward,
}
"""Qualified name of an operator -> what its CUDA code refuses."""


def stand_ins(flash: str = "") -> dict[str, Callable[..., Any]]:
    """Return what runs in place of PyTorch's operators, by qualified name.

    flash: FA3 or FA4: PyTorch's own bridge to that package runs, over `flash_package`.
    """
    bodies: dict[str, Callable[..., Any]] = {
        "aten::_efficient_attention_backward": _efficient_backward,
    }
    if flash:
        for direction in ("forward", "backward"):
            body = getattr(_BRIDGES[flash], f"_{flash.lower()}_flash_attention_{direction}_impl")
            bodies[f"aten::_flash_attention_{direction}"] = body
    return bodies


def _efficient_backward(_dout, q, k, v, _bias, *_: Any, **__: Any) -> tuple:
    """Return gradients as the operator does; PyTorch's own function of shapes cannot be called (torch 2.13)."""
    return *map(torch.empty_like, (q, k, v)), None


# ---- FlashAttention-3 and -4: what PyTorch calls in their packages

_BRIDGES = {"FA3": _fa3, "FA4": _fa4}


def flash_package(flash: str) -> list[Any]:
    """Return patches that give PyTorch's bridge the functions of such a package, with their arguments."""
    if flash == "FA3":
        functions = {"_FA3_CUDA_FWD": _fa3_forward, "_FA3_CUDA_BWD": _fa3_backward}
        return [mock.patch.object(_fa3, name, function) for name, function in functions.items()]
    if flash == "FA4":
        package = SimpleNamespace(_flash_attn_fwd=_fa4_forward, _flash_attn_bwd=_fa4_backward)
        patches = [mock.patch.object(_fa4, "_FA4_MODULE_PATH", "flash_attn.cute.interface")]
        return [*patches, mock.patch.object(_fa4, "_fa4_import_module", return_value=package)]
    return []


def _results(q: torch.Tensor, ends: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (q.shape[1], q.shape[0]) if ends is not None else (q.shape[0], q.shape[2], q.shape[1])
    return torch.empty_like(q), q.new_empty(shape, dtype=torch.float32)


def _fa3_forward(q, k, v, *more: Any) -> tuple:
    """Take the arguments of `flash_attn_3::fwd`."""
    return *_results(q, more[4]), None, None


def _fa3_backward(dout, q, k, v, out, lse, dq, dk, dv, *more: Any) -> None:
    """Take the arguments of `flash_attn_3::bwd`, which writes dq, dk and dv."""


def _fa4_forward(
    q, k, v, *, softmax_scale, causal, window_size_left, window_size_right, return_lse, cu_seqlens_q, cu_seqlens_k,
    max_seqlen_q, max_seqlen_k, seqused_k, page_table, num_splits, out,
) -> tuple:  # fmt: skip
    assert not (causal and window_size_right), "a causal window has nothing to its right"
    return _results(q, cu_seqlens_q)


def _fa4_backward(
    q, k, v, out, dout, lse, *, softmax_scale, causal, window_size_left, window_size_right, cu_seqlens_q, cu_seqlens_k,
    deterministic,
) -> tuple:  # fmt: skip
    return tuple(map(torch.empty_like, (q, k, v)))


# ---- kernels of Triton, and those that a CPU build takes apart


class _RmsNorm(torch.autograd.Function):
    """One kernel forward, and two backward: the gradients of the input and of the weight."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight, x.new_empty(*x.shape[:-1], 1, dtype=torch.float32))
        return x.mul(weight)

    @staticmethod
    def backward(ctx, dout):
        _, weight, _ = ctx.saved_tensors
        return dout.mul(weight), dout.flatten(0, -2).sum(0, dtype=weight.dtype)


def rms_norm(x, shape, weight=None, eps=None, real=F.rms_norm) -> torch.Tensor:
    """Stand in for F.rms_norm of a CUDA tensor, which a CPU build takes apart."""
    plain = weight is not None and not isinstance(x, DTensor) and not isinstance(weight, DTensor) and x.is_cuda
    return _RmsNorm.apply(x, weight) if plain else real(x, shape, weight, eps)


def merge(total_out: torch.Tensor, total_lse: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Stand in for the Triton kernel that merges partial results: its checks, and one launch."""
    assert total_out.shape == out.shape
    assert total_lse.shape == lse.shape == out.shape[:3]
    assert total_out.stride(-1) == out.stride(-1) == 1
    assert total_out.dtype == total_lse.dtype == lse.dtype == torch.float32
    b, h, rows, _ = out.shape
    assert b * h * -(-rows // 32) < 2**31
    total_out.mul_(1.0)


class _Attention(torch.autograd.Function):
    """Causal attention of one rank by cuDNN, as F.scaled_dot_product_attention has it on a Hopper."""

    @staticmethod
    def forward(ctx, q, k, v, scale):
        arguments = (None, True, 0.0, True, False)
        out, lse, _, _, n, m, seed, offset, _ = _aten._scaled_dot_product_cudnn_attention(
            q, k, v, *arguments, scale=scale
        )
        ctx.save_for_backward(q, k, v, out, lse, seed, offset)
        ctx.sizes, ctx.scale = (n, m), scale
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse, seed, offset = ctx.saved_tensors
        grads = _aten._scaled_dot_product_cudnn_attention_backward(
            dout, q, k, v, out, lse, seed, offset, None, None, None, *ctx.sizes, 0.0, True, scale=ctx.scale
        )
        return *grads, None


def attention_of_one_rank(q, k, v, attn_mask=None, real=F.scaled_dot_product_attention, **options) -> torch.Tensor:
    """Stand in for F.scaled_dot_product_attention: a CPU build dispatches it to no CUDA kernel."""
    if attn_mask is not None:
        return real(q, k, v, attn_mask=attn_mask, **options)
    scale, grouped = options.get("scale"), options.get("enable_gqa", False)
    assert options.get("is_causal", False)
    assert grouped == (q.shape[1] != k.shape[1])
    return _Attention.apply(q, k, v, q.shape[-1] ** -0.5 if scale is None else scale)
