"""Memory of forward and backward of one layer, for sequences that double."""

import time
from dataclasses import replace
from typing import Any

import torch

from scripts.gpu_blocks.block import Check
from trainer.components.out_of_memory import is_out_of_memory
from trainer.families.decoder_args import LLAMA3 as FLAVORS
from trainer.models.block import TransformerBlock
from trainer.models.rotary import precompute_freqs_cis

_FIRST, _LAST = 8192, 2**20  # tokens
_DRY = 64, 128
_GROWTH = 4.5  # largest growth of the time for twice the tokens; attention grows by 4


def layer(check: Check) -> None:
    """Measure a layer of 8B's width, bfloat16, causal: KiB per token, for doubled lengths until memory or time ends.

    The lengths begin at 8,192. What must hold: the first length fits.

    Args:
        check: The run of the block.
    """
    args = FLAVORS["debugmodel" if check.is_dry else "8B"]
    first, last = _DRY if check.is_dry else (_FIRST, _LAST)
    rows: list[dict[str, Any]] = []
    tokens = first
    seconds = 0.0
    while tokens <= last and check.left() > _GROWTH * seconds:
        started = time.monotonic()
        row = measured(replace(args, max_seq_len=tokens), tokens, check.device)
        seconds = time.monotonic() - started
        if rows and "allocated_gib" in row:
            growth = row["allocated_gib"] - rows[-1]["allocated_gib"]
            row["kib_a_token"] = round(growth * 2**20 / (tokens - rows[-1]["tokens"]), 1)
        rows.append(row)
        check.note(rows=rows)
        if "error" in row:
            break
        tokens *= 2
    done = [row for row in rows if "error" not in row]
    check.expect(bool(done), f"{first:,} tokens do not fit")
    if done:
        slope = done[-1].get("kib_a_token")
        check.headline(f"one layer: {slope} KiB a token; longest {done[-1]['tokens']:,} tokens in {done[-1]['ms']} ms")


def measured(args: Any, tokens: int, device: str) -> dict[str, Any]:
    """Run forward and backward of a layer twice, and time the second run.

    Args:
        args: The arguments of the model.
        tokens: Tokens of the sequence.
        device: "cuda" or "cpu".

    Returns:
        Time and memory. Memory does not count the weights and the input of the layer, but the gradients of both.
    """
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    with torch.device(device):
        block = TransformerBlock(args, 0).to(dtype)
        x = torch.randn(1, tokens, args.dim, dtype=dtype, requires_grad=True)
    table = precompute_freqs_cis(args.max_seq_len, args.head_dim, args.rope_theta, args.rope_scaling, torch.float32)
    table = table.to(device)
    row: dict[str, Any] = {"tokens": tokens}
    reset_memory(device)
    before = torch.cuda.memory_allocated() / 2**30 if device == "cuda" else 0.0
    try:
        for _ in range(2):
            block.zero_grad()
            x.grad = None
            start = time.perf_counter()
            block(x, table).sum().backward()
            if device == "cuda":
                torch.cuda.synchronize()
            row["ms"] = round(1e3 * (time.perf_counter() - start), 1)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        row["error"] = "out of memory"
    row |= memory_found(device)
    if "allocated_gib" in row:
        row["allocated_gib"] = round(row["allocated_gib"] - before, 3)
    return row


def reset_memory(device: str) -> None:
    """Begin a new peak of memory, with an empty cache of the allocator.

    Args:
        device: "cuda" or "cpu".
    """
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.reset_accumulated_memory_stats()


def memory_found(device: str) -> dict[str, Any]:
    """Return the peaks of memory since the last reset, in GiB, and the retries and failures of the allocator.

    `allocated` counts tensors; `reserved` also counts memory that the allocator could not use for tensors.

    Args:
        device: "cuda"; "cpu" gives an empty dictionary.
    """
    if device != "cuda":
        return {}
    counts = torch.cuda.memory_stats()
    return {
        "allocated_gib": round(torch.cuda.max_memory_allocated() / 2**30, 3),
        "reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 3),
        "alloc_retries": counts.get("num_alloc_retries"),
        "ooms": counts.get("num_ooms"),
    }
