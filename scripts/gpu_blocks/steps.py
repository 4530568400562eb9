"""Training steps of a few layers of 8B's width, with Llama 3's vocabulary: speed, memory, float8, optimizers."""

import time
from itertools import pairwise
from typing import Any
from unittest import mock

import torch

from longshard.context.execution.kernels.flash import is_installed
from scripts.benchmarks import train as benchmark
from scripts.benchmarks.train_loops import Block, Work, free, train, with_layers
from scripts.gpu_blocks.block import Check, Skipped, largest
from scripts.gpu_blocks.layer import memory_found, reset_memory
from scripts.gpu_blocks.mfu import DRY_VOCABULARY, VOCABULARY
from trainer.config.loader import parse_command_line
from trainer.families.decoder_args import LLAMA3 as FLAVORS
from trainer.job import language

_STEPS = 4  # the first steps compile and fill caches
_FLOAT8_STEPS = 20
_FLOAT8_NEAR = 0.03  # relative difference of a loss in float8 from the loss in bfloat16
_COMPILED = ["--compile.enable"]
_ON_HOST = "--training.enable_cpu_offload"
_LONG = ["--activation_checkpoint.mode=full", "--training.attention_mask=document"]


def vocabulary(check: Check) -> None:
    """Measure MFU of the compiled trainer with the real vocabulary, at 8,192 and 32,768 tokens.

    Four layers as wide as 8B's, with Llama 3's vocabulary. What must hold: they run.

    Args:
        check: The run of the block.
    """
    compiled = [] if check.is_dry else _COMPILED
    rows = []
    for tokens, options in ((8192, compiled), (32_768, [*compiled, *_LONG])):
        rows.append(_row(check, tokens, 4, options))
        check.note(rows=rows)
    shown = {row["tokens"]: row.get("mfu") for row in rows}
    check.headline(f"vocabulary {rows[0]['vocabulary']:,}, MFU by tokens {shown}")


def optimizers(check: Check) -> None:
    """Measure speed and memory of a step of two layers by optimizer, and with weights on the host.

    AdamW, states in bfloat16, Muon, weights on the host, updates during the backward. What must hold: they run.

    Args:
        check: The run of the block.
    """
    rows = []
    variants = {
        "AdamW": [],
        "AdamW, bfloat16 states": ["--optimizer.state_dtype=bfloat16"],
        "Muon": ["--optimizer.name=Muon"],
        "AdamW on the host": [_ON_HOST],
        "AdamW on the host, updates during the backward": [
            *(_ON_HOST, "--training.early_update", "--training.max_norm=inf")
        ],
    }
    for name, options in variants.items():
        if not check.left():
            check.note(left_out_for_time=name)
            break
        rows.append({"name": name} | _row(check, 8192, 2, options))
        check.note(rows=rows)
    shown = {row["name"]: (row.get("ms_per_step"), row["memory"].get("allocated_gib")) for row in rows}
    check.headline(f"ms and GiB of a step: {shown}")


def float8(check: Check) -> None:
    """Compare losses and speed of rowwise float8 with bfloat16, both compiled.

    20 steps with float8 by rows. What must hold: losses within 3 % of each other.

    Args:
        check: The run of the block.

    Raises:
        Skipped: torchao is not installed.
    """
    if not is_installed("torchao"):
        raise Skipped("torchao is not installed")
    recipe = ["--float8.enable", "--float8.recipe_name=rowwise"]
    if check.is_dry:
        recipe.append("--float8.emulate")
    compiled = [] if check.is_dry else _COMPILED
    rows = {}
    for name, options in (("bfloat16", []), ("float8", recipe)):
        rows[name] = _row(check, 8192, 2, [*compiled, *options], _FLOAT8_STEPS)
        check.note(rows=rows)
    if any("error" in row for row in rows.values()):
        return  # the problem is noted
    pairs = zip(rows["float8"]["losses"], rows["bfloat16"]["losses"], strict=True)
    difference = largest(*(abs(a - b) / b for a, b in pairs))
    check.note(largest_relative_difference=difference)
    check.expect(difference <= _FLOAT8_NEAR, f"losses in float8 differ from bfloat16 by {difference:.2%}")
    ratio = rows["bfloat16"]["ms_per_step"] / rows["float8"]["ms_per_step"]
    check.headline(f"float8 is {ratio:.2f} times as fast as bfloat16; losses differ by {difference:.1e}")


@mock.patch.dict(FLAVORS)  # the flavor with fewer layers exists in this run only
def _row(check: Check, tokens: int, layers: int, options: list[str], steps: int = _STEPS) -> dict[str, Any]:
    """Train on one sequence; return speed, memory and losses, or the error."""
    flavor, layers, tokens = ("debugmodel", 1, 64) if check.is_dry else ("8B", layers, tokens)
    words = [f"--model.flavor={with_layers(flavor, layers)}", f"--training.seq_len={tokens}"]
    words += ["--training.local_batch_size=1", "--training.global_batch_size=1", "--training.data_streams=4"]
    words += ["--metrics.log_freq=1", "--optimizer.lr=1e-4", *options]
    size = DRY_VOCABULARY if check.is_dry else VOCABULARY
    device = torch.device(check.device, 0) if check.device == "cuda" else torch.device("cpu")
    work = Work(parse_command_line(words).config, device, steps=1, rounds=1)
    times: list[float] = []

    def pace(_: int) -> None:
        if check.device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter())

    row: dict[str, Any] = {"tokens": tokens, "layers": layers, "vocabulary": size, "options": options}
    reset_memory(check.device)
    known = language.vocab_size_of
    try:
        with mock.patch.object(language, "vocab_size_of", lambda path: size or known(path)):
            lines = train(work.config, device, steps + 1, pace)
            fastest = min(after - before for before, after in pairwise(times[2:]))
            row |= benchmark.speed(work, [Block(fastest, 0.0)])
        row["losses"] = [line["loss"] for line in lines if "loss" in line][:steps]
    except Exception as error:  # it does not stop the other rows
        row["error"] = f"{type(error).__name__}: {str(error)[:200]}"
        check.expect(False, f"{tokens:,} tokens, {options}: {row['error']}")
    row["memory"] = memory_found(check.device)
    free(device)
    return row
