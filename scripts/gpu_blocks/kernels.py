"""Versions and back ends, and every kernel on tiles against attention written out in float64."""

import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from longshard.context.execution.kernels.base import BackwardInputs, Kernel, hidden_pairs
from longshard.context.execution.kernels.choose import KERNELS
from longshard.context.execution.kernels.flash import is_installed
from longshard.context.execution.stages import Merged, add_parts, attend, pack, unpack
from longshard.context.planning.capabilities import FLASH_PACKAGES
from longshard.context.planning.lowering import Call, Launch, batch_calls, split
from longshard.context.planning.mask import Relation
from longshard.context.planning.tiles import Tile
from scripts.gpu_blocks.block import Check, largest

_FULL, _CAUSAL, _BI, _INV = Relation.FULL, Relation.CAUSAL, Relation.BI_CAUSAL, Relation.INV_CAUSAL
_TILES = [(_FULL, 200, 333), (_FULL, 1, 77), (_CAUSAL, 333, 333), (_CAUSAL, 70, 333), (_BI, 100, 333), (_INV, 200, 300)]
_HEADS = [(4, 2, 64), (4, 1, 128), (4, 4, 80), (4, 2, 256), (4, 1, 20)]  # query heads, key/value heads, size
_NAMES = ("out", "lse", "dq", "dk", "dv")
_FLOOR = 1e-6  # error that merging in float32 may add
_LSE = 1e-3  # bound for the log-sum-exp; its error in written-out bfloat16 attention is larger


# ---- versions


def versions(check: Check) -> None:
    """Note versions, the GPU, the back ends of `scaled_dot_product_attention`, and implementations of flash attention.

    What must hold: the GPU has bfloat16.

    Args:
        check: The run of the block.
    """
    attention = torch.nn.attention
    listed = getattr(attention, "list_flash_attention_impls", list)
    check.note(
        torch=torch.__version__,
        python=platform.python_version(),
        cudnn=torch.backends.cudnn.version(),
        sdpa={_shape_text(*shape): _back_end(check.device, *shape) for shape in _SDPA_SHAPES},
        flash_registered=list(listed()),
        flash_importable=[package.module for package in FLASH_PACKAGES if is_installed(package.module)],
    )
    if check.is_dry:
        check.headline(f"torch {torch.__version__} on a CPU")
        return
    properties = torch.cuda.get_device_properties(0)
    memory = round(properties.total_memory / 2**30, 1)
    check.note(
        cuda=torch.version.cuda,
        nccl=".".join(map(str, torch.cuda.nccl.version())),
        gpus=torch.cuda.device_count(),
        gpu=properties.name,
        memory_gib=memory,
        capability=f"{properties.major}.{properties.minor}",
    )
    check.expect(torch.cuda.is_bf16_supported(), "this GPU has no bfloat16")
    check.headline(f"torch {torch.__version__}, {torch.cuda.device_count()} x {properties.name}, {memory} GiB")


# dtype, heads, key/value heads, queries, keys, size of a head
_SDPA_SHAPES = [
    ("bfloat16", 32, 8, 8192, 8192, 128),
    ("bfloat16", 32, 32, 8192, 8192, 128),
    ("bfloat16", 8, 4, 512, 512, 32),
    ("bfloat16", 32, 8, 1, 8192, 128),
    ("float32", 8, 4, 512, 512, 32),
]


def _shape_text(dtype: str, heads: int, kv_heads: int, n: int, m: int, size: int) -> str:
    return f"{dtype}, {heads}/{kv_heads} heads of {size}, {n} x {m}"


def _back_end(device: str, dtype: str, heads: int, kv_heads: int, n: int, m: int, size: int) -> str:
    q, k = (
        torch.empty(1, h, s, size, dtype=getattr(torch, dtype), device=device) for h, s in ((heads, n), (kv_heads, m))
    )
    try:  # a private name, for a report only
        chosen = torch._fused_sdp_choice(q, k, k, None, 0.0, n == m, enable_gqa=heads != kv_heads)
        return SDPBackend(chosen).name
    except (AttributeError, TypeError, RuntimeError, ValueError) as error:
        return f"unknown: {str(error).splitlines()[0]}"


# ---- tiles


def kernels(check: Check) -> None:
    """Compare every kernel on tiles, windows, single queries and strided keys. Check deterministic backwards.

    What must hold: at most twice the error of attention written out in the same type, on tiles of all relations,
    types and sizes of heads; the deterministic backward repeats its bits.

    On a GPU, also note whether cuDNN's operators take grouped heads.

    Args:
        check: The run of the block.
    """
    names = ["cpu_flash", "math"] if check.is_dry else ["cuda_flash", "efficient", "varlen", "cudnn", "math"]
    if check.is_dry:
        small = [(relation, -(-n // 16), -(-m // 16)) for relation, n, m in _TILES]
        _all_tiles(check, names, _HEADS[:1], small, ("bfloat16", "float32"))
    else:
        _all_tiles(check, names, _HEADS, _TILES)
    check.note(same_bits_twice={name: _answer(lambda n=name: _same_bits(n, check.device)) for name in names})
    for name in {"cuda_flash", "efficient", "varlen"}.intersection(names):
        repeated = check.facts["same_bits_twice"][name]
        check.expect(repeated is True, f"{name}: the deterministic backward gives the same bits twice: {repeated}")
    if not check.is_dry:
        check.note(cudnn_grouped_heads={way: _answer(lambda w=way: _cudnn_grouped(w)) for way in _WAYS})


def _all_tiles(
    check: Check,
    names: list[str],
    heads: list[tuple[int, int, int]],
    tiles: list[tuple[Relation, int, int]],
    dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32"),
) -> None:
    """Compare errors of all tiles with their bounds: twice the error of attention written out in the same type."""
    worst: dict[str, float] = {}
    done = refused = left_out = 0
    for name, dtype, shape, tile, is_strided in product(names, dtypes, heads, tiles, (False, True)):
        kernel = KERNELS[name]
        if kernel.capabilities.lacks(check.device, dtype, shape[2], bands=tile[0].lower, deterministic=False):
            refused += 1
            continue
        if not check.left():
            left_out += 1
            continue
        case = f"{name}, {dtype}, {shape}, {tile[0].value} {tile[1]} x {tile[2]}{', strided' * is_strided}"
        try:
            shares = _shares(kernel, getattr(torch, dtype), shape, tile, is_strided, check.device)
        except Exception as error:
            check.expect(False, f"{case}: {type(error).__name__}: {str(error).splitlines()[:1]}")
            if "CUDA error" in str(error):  # after it, no call works in this process
                raise
            continue
        done += 1
        worst[name] = largest(worst.get(name, 0.0), *shares.values())
        wrong = {part: round(share, 2) for part, share in shares.items() if not share <= 1}
        check.expect(not wrong, f"{case}: shares of the bound {wrong}")
        if done % 20 == 0:
            check.note(done=done, worst_share=worst)
    check.note(done=done, beyond_what_they_declare=refused, left_out_for_time=left_out, worst_share=worst)
    check.expect(done > 0, "no tile was computed")
    check.headline(f"{done} tiles, {left_out} left out; worst share of the bound {largest(*worst.values()):.2f}")


def _shares(
    kernel: Kernel,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    tile: tuple[Relation, int, int],
    is_strided: bool,
    device: str,
) -> dict[str, float]:
    """Return the errors of output, log-sum-exp and gradients of a tile, as shares of their bounds."""
    relation, n, m = tile
    scale = shape[2] ** -0.5
    q, k, v, dout = _inputs(shape, n, m, dtype, device)
    exact = _written_out(*(x.double() for x in (q, k, v, dout)), relation, scale)
    plain = _written_out(q, k, v, dout, relation, scale)
    if is_strided:  # rows of one buffer, as keys and values are sent
        k, v = unpack(pack(k, v, ((0, m),)))
    parts = split(Tile((0, n), (0, m), relation), kernel.capabilities)
    calls = [Call(part.q, part.kv, part.relation, fresh=False) for part in parts]
    groups = batch_calls(calls) if kernel.capabilities.many else [(call,) for call in calls]
    launches = tuple(map(Launch, groups))
    total = Merged(q)
    attend(total, (q, k, v), slice(0, q.shape[1]), launches, kernel, scale)
    precise = torch.promote_types(dtype, torch.float32)
    grads = tuple(torch.zeros_like(x, dtype=precise) for x in (q, k, v))
    backward_inputs = BackwardInputs(dout, q, k, v, exact[0].to(dtype), exact[1].to(precise))
    for launch in launches:
        add_parts(grads, kernel.backward_many(backward_inputs, launch, scale=scale), launch)
    errors = [_error(a, b) for a, b in zip((*total.result, *grads), exact, strict=True)]
    bounds = [2 * _error(a, b) + _FLOOR for a, b in zip(plain, exact, strict=True)]
    bounds[1] = _LSE
    return {name: error / bound for name, error, bound in zip(_NAMES, errors, bounds, strict=True)}


def _inputs(shape: tuple[int, int, int], n: int, m: int, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    """Return q, k, v and the gradient of the output, (B, heads, S, D)."""
    generator = torch.Generator(device).manual_seed(n + m)
    sizes = [(shape[0], n), (shape[1], m), (shape[1], m), (shape[0], n)]
    return [torch.randn(2, h, s, shape[2], device=device, generator=generator).to(dtype) for h, s in sizes]


def _written_out(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, relation: Relation, scale: float
) -> tuple[torch.Tensor, ...]:
    """Return output, log-sum-exp, dq, dk, dv, with every step in the type of q."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    keys, values = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in leaves[1:])
    scores = leaves[0] @ keys.transpose(-1, -2) * scale
    scores = scores.masked_fill(hidden_pairs(relation, q.shape[2], k.shape[2], q.device), -torch.inf)
    out = scores.softmax(-1) @ values
    return out.detach(), scores.detach().logsumexp(-1), *torch.autograd.grad(out, leaves, dout)


def _error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return ((got.double() - exact).norm() / exact.norm().clamp(min=1e-12)).item()


# ---- questions


def _answer(question: Callable[[], Any]) -> Any:
    """Return the answer, or the error as text: an operator may refuse."""
    try:
        return question()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _same_bits(name: str, device: str) -> bool:
    """Return whether two backwards in deterministic mode agree in every bit. The sums over queries are long."""
    length = 256 if device == "cpu" else 2048
    q, k, v, dout = _inputs((4, 2, 64), length, length, torch.bfloat16, device)
    options = {"relation": Relation.CAUSAL, "scale": 0.125}
    out, lse = KERNELS[name].forward(q, k, v, **options)
    with _deterministic():
        first, second = (KERNELS[name].backward(BackwardInputs(dout, q, k, v, out, lse), **options) for _ in range(2))
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@contextmanager
def _deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


_WAYS = ("forward", "backward")


def _cudnn_grouped(way: str) -> bool:
    """Return whether cuDNN's operators take fewer key/value heads than query heads, with the same results."""
    aten = torch.ops.aten
    q, k, v, dout = _inputs((8, 2, 64), 256, 256, torch.bfloat16, "cuda")
    results = []
    for keys, values in ((k, v), tuple(x.repeat_interleave(4, dim=1) for x in (k, v))):
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
            q, keys, values, None, True, 0.0, True, False, scale=0.125
        )
        if way == "forward":
            results.append((out,))
            continue
        seed, offset = (torch.zeros((), dtype=torch.int64, device="cuda") for _ in range(2))
        dq, dk, dv = aten._scaled_dot_product_cudnn_attention_backward(
            dout, q, keys, values, out.contiguous(), lse, seed, offset, None, None, None, 256, 256, 0.0, True,
            scale=0.125,
        )  # fmt: skip
        results.append((dq, *(x.float().unflatten(1, (2, -1)).sum(2) for x in (dk, dv))))
    shapes_differ = any(a.shape != b.shape for a, b in zip(*results, strict=True))
    return not shapes_differ and all(_error(a, b.double()) < 2e-2 for a, b in zip(*results, strict=True))
