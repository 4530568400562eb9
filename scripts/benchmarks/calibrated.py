"""Measured and predicted times of runs on this machine's CPU; the planner's record comes from other runs.

python scripts/benchmarks/calibrated.py --json docs/measurements/calibrated.json       # ten minutes, on a quiet machine

`lct estimate debug_model --calibrate` makes the record from seven runs of the debug model. The predicted runs have
other lengths, batches, families and modes of recomputation. Each run is `lct train` on one rank.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from a clone, installed or not

from lct_planner.calibrate import calibrate, step_seconds
from lct_planner.estimate import estimate
from lct_planner.timing import device
from lct_planner.worker import Worker
from scripts.provenance import made_with
from trainer.runtime.devices import this_machine

BASE = ("--job.config_file", "debug_model", "--training.global_batch_size=-1")
_AC = "--activation_checkpoint.mode="
RUNS = {
    "768 tokens": ("--training.seq_len=768", "--training.local_batch_size=1"),
    "3 x 512": ("--training.seq_len=512", "--training.local_batch_size=3"),
    "3,072 tokens": ("--training.seq_len=3072", "--training.local_batch_size=1"),
    "6,144 tokens": ("--training.seq_len=6144", "--training.local_batch_size=1"),
    "3,072 tokens, recomputed": ("--training.seq_len=3072", "--training.local_batch_size=1", f"{_AC}full"),
    "2 x 1,536, recomputed by operator": (
        "--training.seq_len=1536",
        "--training.local_batch_size=2",
        f"{_AC}selective",
    ),
    "4 micro-batches of 512": (
        "--training.seq_len=512",
        "--training.local_batch_size=1",
        "--training.global_batch_size=4",
    ),
    "Qwen3, 2,048 tokens": ("--model.name=qwen3", "--training.seq_len=2048", "--training.local_batch_size=1"),
    "Mistral, 2,048 tokens, a window of 512": (
        "--model.name=mistral",
        "--model.sliding_window=512",
        "--training.seq_len=2048",
        "--training.local_batch_size=1",
    ),
}


def main() -> None:
    """Run and predict each of `RUNS`; print the table and write it to `--json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--record", type=Path, help="a record that is there already")
    parser.add_argument("--only", default="", help="a part of the names of runs")
    args = parser.parse_args()
    runs = []
    with tempfile.TemporaryDirectory() as folder, Worker(has_shim=False) as worker:
        path = args.record or Path(folder, "cpu.toml")
        if args.record is None:
            print(calibrate(BASE, path, memory=this_machine().memory("cpu")), file=sys.stderr, flush=True)
        on = device(str(path))
        for name, options in RUNS.items():
            if args.only not in name:
                continue
            job = [*BASE, *options]
            predicted = estimate(worker, job, 1, on, whole=True).time.seconds
            measured = median(step_seconds(job) for _ in range(3))
            runs.append({"run": name, "measured": measured, "predicted": predicted})
            print(runs[-1], file=sys.stderr, flush=True)
        record = path.read_text(encoding="utf-8")
    if args.json:
        head = made_with("scripts/benchmarks/calibrated.py", sys.argv[1:], device="cpu")
        args.json.write_text(json.dumps(head | {"record": record, "runs": runs}, indent=1) + "\n")
    print("| run | measured, ms a step | predicted |  |\n|---|---|---|---|")
    for run in runs:
        error = run["predicted"] / run["measured"] - 1
        print(f"| {run['run']} | {run['measured'] * 1e3:,.0f} | {run['predicted'] * 1e3:,.0f} | {error:+.0%} |")
    errors = [abs(run["predicted"] / run["measured"] - 1) for run in runs]
    print(f"\nmedian error {median(errors):.1%}, largest {max(errors):.1%}")


if __name__ == "__main__":
    main()
