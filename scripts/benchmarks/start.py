"""CPU seconds of `lct train` until its first step begins, of the launcher and all ranks together.

    python scripts/benchmarks/start.py --rounds 5 --json docs/measurements/start_cpu.json
    python scripts/benchmarks/start.py --against ../older-clone

Cold: no bytecode of this program, no token files. Warm: both exist. Each round starts every case once, in copies of the
trees, and alternates the trees. A start ends at the line "training starts". Then the benchmark reads the CPU time of
the job's processes from /proc, and kills the job.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # runs from a clone, installed or not

from scripts.provenance import made_with  # noqa: E402

CASES = ((1, "cold"), (1, "warm"), (2, "warm"))
"""Ranks, and the state of the caches, which the first case fills."""
_BEGINS = "training starts"
_TICKS = os.sysconf("SC_CLK_TCK")


def descendants(pid: int) -> Iterator[int]:
    """Yield a process and all its descendants.

    Args:
        pid: Number of the process.
    """
    yield pid
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield from descendants(int(child))


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process and of all its descendants, including descendants that have ended.

    Args:
        pid: Number of the process.
    """
    ticks = 0
    for process in descendants(pid):
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        ticks += sum(map(int, fields[11:15]))  # user and system time of the process and of its ended children
    return ticks / _TICKS


def start(tree: Path, ranks: int, environment: Mapping[str, str]) -> tuple[float, float]:
    """Start a job, wait until its first step begins, and kill it.

    Args:
        tree: Root of the program's code.
        ranks: Number of ranks.
        environment: Environment variables of the job.

    Returns:
        CPU seconds of the job, and seconds, until the first step begins.

    Raises:
        SystemExit: The job ended before its first step.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "trainer", "train", "debug_model", f"--ngpu={ranks}"]
        began = time.monotonic()
        job = subprocess.Popen(
            [*command, f"--job.dump_folder={folder}"],
            cwd=tree,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            lines = iter(job.stdout.readline, "")
            if not any(_BEGINS in line for line in lines):
                raise SystemExit(f"{' '.join(command)} in {tree} ended before its first step")
            return cpu_seconds(job.pid), time.monotonic() - began
        finally:
            for process in reversed(list(descendants(job.pid))):
                os.kill(process, signal.SIGKILL)
            job.communicate()


def measure(trees: Mapping[str, Path], rounds: int) -> list[dict[str, object]]:
    """Return a row for each tree, number of ranks, and state of the caches, with the medians of the rounds.

    Args:
        trees: Roots of code by name.
        rounds: Number of rounds.
    """
    times_of_cases: dict[tuple[str, int, str], list[tuple[float, float]]] = {}
    for _ in range(rounds):
        for name, tree in trees.items():
            with tempfile.TemporaryDirectory() as folder:
                copy = Path(folder, "tree")
                for part in ("longshard", "trainer", "lct_planner", "train_configs"):
                    shutil.copytree(tree / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
                own = {"XDG_CACHE_HOME": f"{folder}/cache", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(copy)}
                environment = os.environ | own
                environment.pop("PYTHONDONTWRITEBYTECODE", None)
                for ranks, caches in CASES:
                    times_of_cases.setdefault((name, ranks, caches), []).append(start(copy, ranks, environment))
    return [
        {
            "tree": name,
            "ranks": ranks,
            "caches": caches,
            "cpu_seconds": round(statistics.median(cpu for cpu, _ in times), 2),
            "seconds": round(statistics.median(seconds for _, seconds in times), 2),
        }
        for (name, ranks, caches), times in times_of_cases.items()
    ]


def main(argv: list[str] | None = None) -> int:
    """Measure, print a line for each row, and write the rows to `--json`.

    Args:
        argv: The command line. None: the process's own.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="starts of each case (default: 3)")
    parser.add_argument("--against", type=Path, help="another clone, measured in turns")
    parser.add_argument("--json", type=Path, help="file for the rows")
    arguments = parser.parse_args(argv)
    trees = {"this": ROOT} | ({"other": arguments.against.resolve()} if arguments.against else {})
    rows = measure(trees, arguments.rounds)
    for row in rows:
        print(
            f"{row['tree']:6}{row['ranks']} rank{'s' * (row['ranks'] > 1):2}{row['caches']:6}"
            f"{row['cpu_seconds']:6.2f} CPU s{row['seconds']:8.2f} s"
        )
    if arguments.json:
        head = made_with("scripts/benchmarks/start.py", sys.argv[1:], device="cpu")
        arguments.json.write_text(json.dumps(head | {"rows": rows}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
