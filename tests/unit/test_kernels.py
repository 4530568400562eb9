"""Every kernel that runs here, against softmax written out: one tile alone, and tiles as parts of a whole."""

import pytest
import torch

from trainer.config.errors import ConfigError
from trainer.distributed.context_parallel.kernels import CpuFlash, Kernel, Math, choose_kernel

KERNELS = [CpuFlash(), Math()]


def inputs(heads: int, kv_heads: int, queries: int, keys: int, head_dim: int = 8) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(heads + queries)
    shapes = [(2, heads, queries, head_dim), (2, kv_heads, keys, head_dim), (2, kv_heads, keys, head_dim)]
    return [torch.randn(s, dtype=torch.float64, generator=generator) for s in (*shapes, shapes[0])]


def definition(q, k, v, causal: bool, scale: float):
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * scale
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: type(kernel).__name__)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "queries", "keys", "causal"),
    [(4, 4, 7, 7, True), (4, 2, 7, 7, True), (4, 1, 5, 9, False), (4, 2, 9, 3, False), (2, 2, 1, 1, True)],
)
def test_a_tile_alone(kernel: Kernel, heads: int, kv_heads: int, queries: int, keys: int, causal: bool):
    q, k, v, cotangent = inputs(heads, kv_heads, queries, keys)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    wanted, wanted_lse = definition(*leaves, causal, 0.3)
    wanted_grads = torch.autograd.grad(wanted, leaves, cotangent)
    out, lse = kernel.forward(q, k, v, causal=causal, scale=0.3)
    torch.testing.assert_close(out, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-12, atol=1e-12)
    grads = kernel.backward(cotangent, q, k, v, out, lse, causal=causal, scale=0.3)
    for got, grad in zip(grads, wanted_grads, strict=True):
        torch.testing.assert_close(got, grad, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: type(kernel).__name__)
def test_gradients_of_tiles_add_up(kernel: Kernel):
    """With the output and log-sum-exp of the whole, two halves of the keys give the gradients of all."""
    q, k, v, cotangent = inputs(4, 2, 6, 10)
    out, lse = kernel.forward(q, k, v, causal=False, scale=0.3)
    whole = kernel.backward(cotangent, q, k, v, out, lse, causal=False, scale=0.3)
    parts = [
        kernel.backward(cotangent, q, k[:, :, part], v[:, :, part], out, lse, causal=False, scale=0.3)
        for part in (slice(0, 4), slice(4, 10))
    ]
    torch.testing.assert_close(parts[0][0] + parts[1][0], whole[0], rtol=1e-12, atol=1e-12)
    for i in (1, 2):
        torch.testing.assert_close(torch.cat((parts[0][i], parts[1][i]), dim=2), whole[i], rtol=1e-12, atol=1e-12)


def test_the_choice():
    assert isinstance(choose_kernel("cpu", torch.float64), CpuFlash)
    assert isinstance(choose_kernel("cuda", torch.float32), Math)
    with pytest.raises(ConfigError, match="float16 has no kernel on a CPU"):
        choose_kernel("cpu", torch.float16)
