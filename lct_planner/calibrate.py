"""Measures a record of this machine's CPU: a few short runs of a job explain its times by quantities. Torch-free.

Each run is `lct train` on one rank. Its step time is a sum of (quantity of the traced step) x (seconds per unit). The
seconds are the non-negative ones with the least squares of relative errors, found by scipy (Lawson and Hanson, 1974).
"""

import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np

from lct_planner.profile import Profile
from lct_planner.worker import Worker
from trainer.config.errors import ConfigError
from trainer.config.loader import parse_command_line

_STEPS, _SKIPPED = 8, 2
QUANTITIES = ("products", "attention_forward", "attention_backward", "launches", "memory")


def calibrate(arguments: Sequence[str], path: Path, *, memory: int) -> str:
    """Return the result in words, after running the job at several lengths on one rank and writing the record.

    Args:
        arguments: Command line of the job.
        path: File of the record.
        memory: Memory of this machine in bytes.

    Raises:
        ConfigError: scipy is missing, a run failed, or the runs do not show how long matrix products take.
    """
    try:
        from scipy.optimize import nnls
    except ModuleNotFoundError:
        raise ConfigError(
            "--calibrate needs scipy: pip install '.[calibrate]' in the folder of this program, or scipy"
        ) from None
    length = parse_command_line(list(arguments)).config.training.seq_len
    full = "--activation_checkpoint.mode=full"
    one = "--training.global_batch_size=-1"
    runs = [
        [f"--training.seq_len={n}", one] for n in (length // 2, length, 2 * length, 4 * length)
    ]
    runs += [[f"--training.seq_len={n}", one, full] for n in (length, 2 * length)]
    # many launches, for little
    runs += [[f"--training.seq_len={length // 4}", "--training.global_batch_size=4"]]
    rows = []
    seconds = []
    with Worker(has_shim=False) as worker:
        for run in runs:
            job = [*arguments, *run, "--training.local_batch_size=1"]
            (profile,) = worker.ask(job, 1, None, whole=True)["profiles"].values()
            rows.append(quantities(Profile(**profile)))
            seconds.append(step_seconds(job))
    amounts = np.array(rows) / np.array(seconds)[:, None]
    costs = np.zeros(len(QUANTITIES))
    # which the length changes as it changes products: it is measured apart
    costs[-1] = 1 / bandwidth()
    costs[:-1], _ = nnls(amounts[:, :-1], 1 - amounts[:, -1] * costs[-1])
    if not costs[0]:
        raise ConfigError(
            f"--calibrate: the times of runs at {length // 2} to {4 * length} tokens "
            "do not depend on their matrix products; use a larger model or --training.seq_len, "
            "on a machine without other work"
        )
    path.write_text(record(memory, dict(zip(QUANTITIES, costs, strict=True))), encoding="utf-8")
    errors = np.abs(amounts @ costs - 1)
    return f"{path}: {len(runs)} runs, explained to {median(errors):.1%} (median), {errors.max():.1%} (largest)"


def quantities(profile: Profile) -> list[float]:
    """Return the amount of each quantity in a step, in the order of `QUANTITIES`.

    Args:
        profile: The profile of the step.
    """
    sums: Counter[str] = Counter()
    for amounts in profile.work.values():
        for key, amount in amounts.items():
            sums["memory" if key in ("moved", "optimizer") else key.partition(" ")[0]] += amount
    return [sums[key] for key in QUANTITIES]


def step_seconds(job: Sequence[str]) -> float:
    """Return the time of a step of a job on one rank of this machine, the median of a few steps.

    Args:
        job: A command line that begins with --job.config_file and, as a separate word, the file.

    Raises:
        ConfigError: The run failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        settings = [
            f"--training.steps={_STEPS}",
            "--metrics.log_freq=1",
            f"--job.dump_folder={folder}",
        ]
        command = [
            sys.executable,
            "-m",
            "trainer",
            "train",
            *job[1:],
            "--ngpu=1",
            *settings,
            "--checkpoint.no-enable",
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise ConfigError(
                f"a run to calibrate failed: {(done.stderr or done.stdout).strip().splitlines()[-1]}"
            )
        lines = Path(folder, "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    times = [
        metrics["seconds_per_step"]
        for metrics in map(json.loads, lines)
        if "seconds_per_step" in metrics
    ]
    return median(times[_SKIPPED:])


def bandwidth() -> float:
    """Return the bytes per second that one core reads and writes in memory."""
    source = np.ones(1 << 25)
    target = np.empty_like(source)
    times = []
    for _ in range(5):
        started = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - started)
    return 2 * source.nbytes / median(times)


def record(memory: int, costs: dict[str, float]) -> str:
    """Return the record as TOML.

    `flops` and `bandwidth` are measured rates. The rates of links are fixed fractions of `bandwidth`. The efficiency of
    attention is its rate divided by the rate of matrix products.

    Args:
        memory: Memory of this machine in bytes.
        costs: Name of each of `QUANTITIES` -> seconds per unit.
    """
    import tomli_w  # here: a machine without it can plan

    moved = 1 / costs["memory"]
    lines = {
        "name": "this machine",
        "type": "cpu",
        "memory": float(memory),
        "flops": 1 / costs["products"],
        "bandwidth": moved,
        "link": moved / 4,
        "network": moved / 4,
        "host": moved / 2,
        "launch": costs["launches"],
    }
    directions = ("attention_forward", "attention_backward")
    shares = {key: costs["products"] / (costs[key] or costs["products"]) for key in directions}
    return tomli_w.dumps({"this_machine": lines | {"efficiency": shares}})
