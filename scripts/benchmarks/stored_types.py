"""Loss curves of weights and moments stored in float32 and in bfloat16, rounded stochastically or to nearest.

    python scripts/benchmarks/stored_types.py --seeds 0 1 2 --json result.json

Each run is the default job (debug model, Python's own sources) on the CPU with small batches. The model computes in
float32, so that runs with the same seed differ by the stored types alone. The table has means of the loss over
`--window` steps.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from a clone, installed or not

from scripts.provenance import made_with

ROOT = Path(__file__).resolve().parents[2]

_NEAREST = "--optimizer.rounding=nearest"
_MOMENTS = "--optimizer.state_dtype=bfloat16"
_WEIGHTS = "--training.dtype="
STORED = {
    "float32": [],
    "moments in bfloat16": [_MOMENTS],
    "moments in bfloat16, to nearest": [_MOMENTS, _NEAREST],
    "weights and moments in bfloat16": [f"{_WEIGHTS}bfloat16"],
    "weights and moments in bfloat16, to nearest": [f"{_WEIGHTS}bfloat16", _NEAREST],
    "weights in bfloat16, moments in float32": [f"{_WEIGHTS}bfloat16", "--optimizer.state_dtype=float32"],
}


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--steps", type=int, default=100)
    p.add_argument("--window", type=int, default=20, help="steps of a mean")
    p.add_argument("--seeds", type=int, nargs="+", default=[0])
    p.add_argument("--jobs", type=int, default=1, help="runs at once")
    p.add_argument("--stored", nargs="+", default=list(STORED), choices=list(STORED))
    p.add_argument("--arguments", default="", help="more arguments of the job, in one string")
    p.add_argument("--json", type=Path)
    return p


def losses_of(s: argparse.Namespace, stored: str, seed: int) -> list[float]:
    """Return the loss of each step of a run.

    Args:
        s: The command line.
        stored: A key of `STORED`.
        seed: Seed of the run.
    """
    settings = [f"--training.steps={s.steps}", f"--training.seed={seed}", "--metrics.log_freq=1", "--job.device=cpu"]
    settings += ["--training.local_batch_size=4", "--training.seq_len=256", "--lr_scheduler.warmup_steps=10"]
    settings += ["--optimizer.name=AdamW", "--training.mixed_precision_param=float32", *STORED[stored]]
    settings += s.arguments.split()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "train.py", f"--job.dump_folder={folder}", *settings]
        environment = {"OMP_NUM_THREADS": "1"} | os.environ | {"PYTHONPATH": str(ROOT)}
        subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
        return [json.loads(line)["loss"] for line in Path(folder, "metrics.jsonl").read_text().splitlines()]


def main() -> None:
    """Run every seed and stored type, print the table, and write the losses to `--json`."""
    s = parser().parse_args()
    made = made_with("scripts/benchmarks/stored_types.py", sys.argv[1:], device="cpu")
    curves: dict[str, list[list[float]]] = {stored: [] for stored in s.stored}
    ends = range(s.window, s.steps + 1, s.window)
    runs = [(seed, stored) for seed in s.seeds for stored in s.stored]
    with ThreadPoolExecutor(s.jobs) as jobs:
        for (seed, stored), losses in zip(runs, jobs.map(lambda run: losses_of(s, run[1], run[0]), runs), strict=True):
            curves[stored].append(losses)
            means = [statistics.fmean(losses[end - s.window : end]) for end in ends]
            print(f"seed {seed}  {stored:45}" + "".join(f"  {mean:7.4f}" for mean in means), flush=True)
    print(f"\n{'losses; last: difference to the first row':45}" + "".join(f"  {f'-{end}':>7}" for end in ends))
    rows = {}
    for stored, runs in curves.items():
        means = [statistics.fmean(x for run in runs for x in run[end - s.window : end]) for end in ends]
        pairs = zip(runs, curves[s.stored[0]], strict=True)
        apart = [statistics.fmean(run[-s.window :]) - statistics.fmean(first[-s.window :]) for run, first in pairs]
        rows[stored] = {"means": means, "difference": apart, "losses": runs}
        print(f"{stored:45}" + "".join(f"  {mean:7.4f}" for mean in means) + f"  {statistics.fmean(apart):+.4f}")
    if s.json:
        s.json.write_text(json.dumps(made | {"seeds": s.seeds, "window": s.window, "stored": rows}) + "\n")


if __name__ == "__main__":
    main()
