"""Ranks: as threads on one GPU, and real ones where there are several GPUs."""

from itertools import product
from typing import Any

import torch

from scripts.gpu_blocks.block import Check, Skipped, largest
from scripts.gpu_blocks.training import train

_FEWEST_SECONDS = 25.0  # least time for a run of the program
_DRY_KERNELS = ("math float64", "cpu_flash float64")


def ranks(check: Check) -> None:
    """Compare methods, degrees, masks and kernels over ranks that are threads, each with a stream, with float64.

    What must hold: at most twice the error of one rank.

    The first rows hold every pair of two settings. Then all other combinations follow until the time is over.

    Args:
        check: The run of the block.
    """
    from tests.covering import covering_array
    from tests.thread_attention import allowed, axes, found_and_bounds

    settings = axes(check.device)
    if check.is_dry:
        settings |= {"kernel": _DRY_KERNELS, "degree": ("2",)}
    pairs = covering_array(settings, allowed)
    whole = [dict(zip(settings, values, strict=True)) for values in product(*settings.values())]
    rows = [*pairs, *([] if check.is_dry else (row for row in whole if allowed(row) and row not in pairs))]
    rows.sort(key=lambda row: row not in pairs)
    done = 0
    worst = 0.0
    for row in rows:
        if check.left() < 1:
            break
        name = ", ".join(f"{key} {value}" for key, value in row.items())
        check.note(running=name, done=done, worst_share=worst)
        try:
            errors, bounds = found_and_bounds(row, check.device)
        except Exception as error:
            check.expect(False, f"{name}: {type(error).__name__}: {error}")
            if "CUDA error" in str(error):
                raise
            continue
        done += 1
        worst = largest(worst, *(error / bound for error, bound in zip(errors, bounds, strict=True)))
        right = all(error <= bound for error, bound in zip(errors, bounds, strict=True))
        check.expect(right, f"{name}: errors {errors}, bounds {bounds}")
    counts = {"running": None, "done": done, "of": len(rows), "of_pairs": len(pairs), "worst_share": worst}
    check.note(**counts)
    check.expect(done > 0, "no row was computed")
    check.headline(f"{done} of {len(rows)} rows ({len(pairs)} hold all pairs); worst share of the bound {worst:.2f}")


# ---- several GPUs


def several(check: Check) -> None:
    """Check parity of each method on NCCL ranks, which may share a GPU; measure tokens per second of cp 1, 2, 4.

    With several GPUs, at 65,536 tokens. What must hold: outputs and gradients equal one process.

    Args:
        check: The run of the block.
    """
    gpus = 0 if check.is_dry else torch.cuda.device_count()
    if not gpus:
        raise Skipped("it needs a GPU, and this is a CPU")
    _parity(check, gpus)
    if gpus < 2:
        check.headline("parity of all methods on ranks that share a GPU; no speed, which needs at least 2 GPUs")
        return
    speeds: dict[str, Any] = {}
    for degree in (1, 2, 4):
        if degree <= gpus and check.left() > _FEWEST_SECONDS:
            speeds[f"cp{degree}"] = _speed(check, degree)
            check.note(tokens_per_second=speeds)
    check.headline(f"{gpus} GPUs, parity of all methods; tokens/s {speeds}")


def _parity(check: Check, gpus: int) -> None:
    from longshard.context.planning.options import ContextParallelOptions
    from tests.distributed.attention_cases import MASKS, METHODS, Case, assert_exact
    from tests.distributed.pool import WorkerPool

    degree = 4 if gpus >= 4 else 2  # all_to_all can divide the heads by both
    with WorkerPool("cuda") as pool:
        for method in METHODS:
            options = ContextParallelOptions(method)
            cases = [
                Case(seq_len, (8, 4), 64, dtype, options, **mask)
                for mask in MASKS
                for seq_len, dtype in ((37, torch.float64), (253, torch.float32), (253, torch.bfloat16))
            ]
            try:
                assert_exact(pool, degree, cases)
            except AssertionError as error:
                check.expect(False, f"{method} on {degree} NCCL ranks: {str(error)[:500]}")
            check.note(**{f"parity_{method}": f"{len(cases)} cases on {degree} ranks"})


def _speed(check: Check, degree: int) -> float | str:
    """Return the tokens per second of the last step of a model of 1 billion parameters, or why there are none."""
    steps = train(
        check,
        f"cp{degree}",
        [
            *("--model.flavor=1B", "--training.seq_len=65536", "--training.local_batch_size=1"),
            *("--training.global_batch_size=1", "--training.steps=3", "--activation_checkpoint.mode=full"),
            f"--parallelism.context_parallel_degree={degree}",
        ],
        ngpu=degree,
    )
    return steps if isinstance(steps, str) else round(steps[-1]["tokens_per_second"], 1)
