"""Speed of parts: attention kernels, merging, gradient norms, optimizers, packing of heads, tiles of every rank."""

import argparse
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from longshard.context.execution import stages, ulysses
from longshard.context.execution.kernels.base import Terms
from longshard.context.planning.mask import causal
from longshard.context.planning.methods import make_plan
from longshard.sharding.layout import head_tail
from scripts.benchmarks import attention_kernels
from scripts.benchmarks.context_parallel_tiles import tile_rows
from scripts.gpu_blocks.block import Check, largest
from trainer.models.chunked_loss import Chunks, chunked_token_losses
from trainer.runtime.host_memory import page_locked_like

_REPEATS = 5
_LOSS_ERROR = 1e-2  # largest relative error of gradients in bfloat16
_DEGREE = 8  # ranks of the exchange whose copies are timed


def speed(check: Check) -> None:
    """Time each part and its variants, in milliseconds.

    Attention at 8,192 and 32,768 tokens, the loss in chunks, merging, gradient norm, optimizer, copies of the exchange
    of heads and of a save. What must hold: gradients of the loss in bfloat16 within 1 % of float64.

    Args:
        check: The run of the block.
    """
    _attention(check)
    parts = {
        "loss": _losses,
        "norm": _norms,
        "optimizer": _optimizers,
        "head_packing": _packing,
        "saved_copy": _saved_copies,
        "merge": _merging,
    }  # the last part compiles
    for name, part in parts.items():
        try:
            check.note(**{f"{name}_ms": part(check)})
        except Exception as error:
            check.expect(False, f"{name}: {type(error).__name__}: {error}")
        _free(check)


def _milliseconds(check: Check, work: Callable[[], object]) -> float:
    seconds = attention_kernels.seconds(work, 1 if check.is_dry else _REPEATS, torch.device(check.device))
    return round(1e3 * seconds, 4)


def _free(check: Check) -> None:
    if not check.is_dry:
        torch.cuda.empty_cache()


# ---- attention


def _attention(check: Check) -> None:
    """Time a causal call of each kernel at each length. A kernel that fails gets a note."""
    names = ["cpu_flash"] if check.is_dry else ["cuda_flash", "cudnn", "efficient", "varlen"]
    settings = {"device": check.device, "dtype": "bfloat16", "relations": ["causal"], "batch": 1, "math_gib": 1.0}
    settings["merging"] = False
    settings |= {"heads": 32, "kv_heads": 8, "head_dim": 128, "repeats": 1 if check.is_dry else _REPEATS}
    rows: list[dict[str, object]] = []
    for length in (64,) if check.is_dry else (8192, 32768):
        for name in names:
            if not check.left():
                rows.append({"kernel": name, "length": length, "note": "left out for time"})
            else:
                args = argparse.Namespace(kernels=[name], lengths=[length], **settings)
                rows += attention_kernels.rows(args)
                check.note(attention=rows)
    best = max(rows, key=lambda row: row.get("forward_tflops", 0), default={})
    if "forward_tflops" not in best:
        check.expect(False, "no kernel was timed")
        return
    speeds = f"{best['forward_tflops']} forward, {best['backward_tflops']} backward"
    check.headline(f"best attention: {best['kernel']} at {best['length']}, TFLOP/s {speeds}")


# ---- parts


def _merging(check: Check) -> dict[str, object]:
    """Time merging a result into a running output of 32 heads, in each way of the benchmark."""
    heads, length, head_dim = (4, 64, 32) if check.is_dry else (32, 16384, 128)
    args = argparse.Namespace(device=check.device, dtype="bfloat16", batch=1, heads=heads, head_dim=head_dim)
    args.repeats = 1 if check.is_dry else _REPEATS
    rows = {name: attention_kernels.measure_merging(name, length, args) for name in attention_kernels.MERGES}
    return {name: row.get("forward_ms", row.get("note")) for name, row in rows.items()}


def _tensors(check: Check) -> list[torch.Tensor]:
    """Return tensors like the weights of a layer of 8B's width: 268 million elements."""
    count, side = (2, 8) if check.is_dry else (16, 4096)
    return [torch.randn(side, side, device=check.device) for _ in range(count)]


def _losses(check: Check) -> dict[str, float]:
    """Time forward and backward of the loss in chunks of 8,192 tokens. Check gradients of small tensors in float64."""
    tokens, dim, vocabulary = (16, 8, 64) if check.is_dry else (8192, 4096, 128_256)

    def gradients(tensors: list[torch.Tensor], labels: torch.Tensor, chunks: Chunks) -> tuple[torch.Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in tensors]
        # A sum, as in training: only for a sum are gradients known in the forward.
        return torch.autograd.grad(chunked_token_losses(*leaves, labels, chunks).sum() / labels.numel(), leaves)

    def problem(tokens: int, dim: int, vocabulary: int) -> tuple[list[torch.Tensor], torch.Tensor]:
        like = {"device": check.device, "dtype": torch.bfloat16}
        tensors = [torch.randn(1, tokens, dim, **like), torch.randn(vocabulary, dim, **like) / dim]
        return tensors, torch.randint(vocabulary, (1, tokens), device=check.device)

    milliseconds = {}
    small, labels = problem(256, 64, 128)
    exact = gradients([x.double() for x in small], labels, Chunks(256))
    large, targets = problem(tokens, dim, vocabulary)
    for name, in_forward in (("gradients in the forward", True), ("logits twice", False)):
        got = gradients(small, labels, Chunks(16, in_forward=in_forward))
        errors = [((a.double() - b).norm() / b.norm()).item() for a, b in zip(got, exact, strict=True)]
        check.expect(largest(*errors) < _LOSS_ERROR, f"loss, {name}: relative errors of hidden and weight {errors}")
        chunks = Chunks(max(tokens // 4, 1), in_forward=in_forward)
        milliseconds[name] = _milliseconds(check, lambda chunks=chunks: gradients(large, targets, chunks))
    _free(check)
    return milliseconds | _large_vocabulary(check, problem, gradients)


def _large_vocabulary(check: Check, problem: Callable[..., Any], gradients: Callable[..., Any]) -> dict[str, float]:
    """Time a chunk of 256 tokens of width 2,048 with a vocabulary of 248,320, forward and backward.

    This is the shape of TRL's pull request 6863. The time of one chunk is subtracted from the time of nine chunks, so
    that work of a whole step does not count.
    """
    tokens, dim, vocabulary = (4, 8, 64) if check.is_dry else (256, 2048, 248_320)
    milliseconds = {}
    for name, in_forward in (("gradients in the forward", True), ("logits twice", False)):
        times = []
        for number in (1, 9):
            tensors, labels = problem(number * tokens, dim, vocabulary)
            chunks = Chunks(tokens, in_forward=in_forward)
            times.append(_milliseconds(check, lambda x=tensors, y=labels, c=chunks: gradients(x, y, c)))
        milliseconds[f"a chunk with a large vocabulary, {name}"] = round((times[1] - times[0]) / 8, 4)
    return milliseconds


def _norms(check: Check) -> dict[str, float]:
    """Time the gradient norm; the trainer uses `foreach float64`."""
    x = _tensors(check)
    variants = {
        "foreach float64": lambda: torch.stack(torch._foreach_norm(x, 2, dtype=torch.float64)),
        "foreach float32": lambda: torch.stack(torch._foreach_norm(x, 2)),
        "loop float64": lambda: torch.stack([torch.linalg.vector_norm(each, dtype=torch.float64) for each in x]),
    }
    return {name: _milliseconds(check, work) for name, work in variants.items()}


def _optimizers(check: Check) -> dict[str, float]:
    milliseconds = {}
    for name in ("foreach", "fused"):
        parameters = _tensors(check)
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        milliseconds[name] = _milliseconds(check, torch.optim.AdamW(parameters, lr=1e-3, **{name: True}).step)
        del parameters
        _free(check)
    return milliseconds


def _packing(check: Check) -> dict[str, float]:
    """Time the copies of the exchange of heads on rank 0 of 8: the exchange runs without transfers and attention."""
    rows = 8 if check.is_dry else 8192
    layout = head_tail(_DEGREE * rows, _DEGREE)
    size = (1, 32, rows, 128)
    plan = make_plan(layout, causal(_DEGREE * rows), "all_to_all", 0)
    q = torch.randn(size, dtype=torch.bfloat16, device=check.device)
    k = torch.randn(1, 8, rows, 128, dtype=torch.bfloat16, device=check.device)
    out, lse = torch.randn_like(q), torch.randn(size[:3], device=check.device)

    def nothing_sent(x: torch.Tensor, _: object, sizes: list[int], *__: object, **___: object) -> tuple:
        return x.new_empty(sum(sizes)), SimpleNamespace(wait=lambda: None)

    inner = SimpleNamespace(
        forward=lambda q, k, v, terms: (q, lse.new_zeros(q.shape[:3])),
        backward=lambda inputs, terms, kv_dtype: (inputs.q, inputs.k, inputs.v),
    )
    run = ulysses.HeadExchange(plan, SimpleNamespace(rank=lambda: 0), inner)
    inputs = stages.BackwardInputs(out, q, k, k, out, lse)
    terms = Terms(1.0)
    with mock.patch.object(ulysses, "all_to_all", nothing_sent):
        return {
            "forward": _milliseconds(check, lambda: run.forward(q, k, k, terms=terms)),
            "backward": _milliseconds(check, lambda: run.backward(inputs, terms)),
        }


def _saved_copies(check: Check) -> dict[str, float]:
    """Time copies of a shard of 311 MiB to the host, as in a save, to pages that the system or PyTorch has locked."""
    x = torch.zeros(8 if check.is_dry else 311 * 2**18, device=check.device)
    if check.is_dry:
        return {"pageable": _milliseconds(check, lambda: x.to("cpu", copy=True))}
    started = time.perf_counter()
    locked = page_locked_like(x, "this check", "run it without")
    milliseconds = {"locking": round(1e3 * (time.perf_counter() - started), 1)}
    ways = {"system": locked, "PyTorch": torch.empty_like(x, device="cpu", pin_memory=True)}
    return milliseconds | {
        name: _milliseconds(check, partial(y.copy_, x, non_blocking=True)) for name, y in ways.items()
    }


# ---- tiles


def tiles(check: Check) -> None:
    """Time the tiles of every rank's plan at 65,536 tokens on one device, against one call: degrees 2, 4, 8.

    What must hold: they run.

    Args:
        check: The run of the block.
    """
    shape: dict[str, Any] = {"batch": 1, "heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": "bfloat16"}
    if check.is_dry:
        shape |= {"heads": 4, "kv_heads": 2, "head_dim": 16, "dtype": "float32"}
    rows: list[dict[str, object]] = []
    for degree in (2,) if check.is_dry else (8, 4, 2):
        if not check.left():
            check.note(left_out_for_time=f"degree {degree} and what follows")
            break
        args = argparse.Namespace(
            **shape,
            device=check.device,
            threads=1,
            degrees=[degree],
            seq_len=[64 if check.is_dry else 65536],
            kernels=["cpu_flash" if check.is_dry else "cuda_flash"],
            methods=["ring", "all_gather", "all_to_all"],
            load_balancer="head_tail",
            repeats=1,
        )
        rows += tile_rows(args)
        check.note(tiles=rows)
        _free(check)
    check.expect(bool(rows), "no tile was timed")
    ratios = {f"{row['method']} {row['degree']}": row["ratio"] for row in rows}
    check.headline(f"time of the slowest rank x degree / time of one call: {ratios}")
