"""What CUDA code of PyTorch's attention refuses, and the packages FlashAttention-3 and -4 as PyTorch calls them.

PyTorch has the shapes of attention's operators ("meta" functions), not the checks of their CUDA code. Those stand here:
a tensor that a kernel would read wrongly, or refuse, fails.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.nn.attention import _fa3, _fa4

from tests.unit.kernel_stand_ins import aligned

_HALVES = (torch.bfloat16, torch.float16)


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


def _check_flash_backward(dout, q, k, v, out, lse, ends_q, ends_k, longest_q, longest_k, *others: Any) -> None:
    _check_flash_forward(q, k, v, ends_q, ends_k, longest_q, longest_k)
    aligned(dout, out)
    assert len({x.dtype for x in (dout, q, out)}) == 1
    assert dout.shape == q.shape == out.shape
    assert lse.dtype == torch.float32
    assert lse.is_contiguous()
    assert lse.shape == ((q.shape[0], q.shape[2], q.shape[1]) if ends_q is None else (q.shape[1], q.shape[0]))
    assert others[2].is_cuda  # the random state


CHECKS: dict[str, Callable[..., None]] = {
    "aten::_flash_attention_forward": _check_flash_forward,
    "aten::_flash_attention_backward": _check_flash_backward,
    "aten::_scaled_dot_product_cudnn_attention": lambda q, k, v, *_: aligned(q, k, v),
    "aten::_scaled_dot_product_cudnn_attention_backward": _check_cudnn_backward,
}
"""Qualified name of an operator -> what its CUDA code refuses."""


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


def _fa3_forward(q, k, v, *others: Any) -> tuple:
    """Take the arguments of `flash_attn_3::fwd`."""
    return *_results(q, others[4]), None, None


def _fa3_backward(dout, q, k, v, out, lse, dq, dk, dv, *others: Any) -> None:
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


def flash_bodies(flash: str) -> dict[str, Callable[..., Any]]:
    """Return the implementations of PyTorch's flash operators with FA3 or FA4: PyTorch's own bridge to that package."""
    return {
        f"aten::_flash_attention_{direction}": getattr(
            _BRIDGES[flash], f"_{flash.lower()}_flash_attention_{direction}_impl"
        )
        for direction in (("forward", "backward") if flash else ())
    }
