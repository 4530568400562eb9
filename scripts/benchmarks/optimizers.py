"""Loss curves of the default run with AdamW and with Muon: after equal steps, and after equal time.

    python scripts/benchmarks/optimizers.py --seeds 0 1 2 --json result.json

Each run is the default job (debug model, Python's own sources, 2 ranks) on the CPU, one after another. A seed sets the
weights and the order of data. The table has the loss, a mean of ten steps, and seconds a step.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from a clone, installed or not

from scripts.provenance import made_with

ROOT = Path(__file__).resolve().parents[2]
OPTIMIZERS = "AdamW", "Muon"
_WINDOW = 10


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--steps", type=int, default=100)
    p.add_argument("--seeds", type=int, nargs="+", default=[0])
    p.add_argument("--optimizers", nargs="+", default=OPTIMIZERS, choices=OPTIMIZERS)
    p.add_argument("--arguments", default="", help="more arguments of the job, in one string")
    p.add_argument("--json", type=Path)
    return p


def curve(s: argparse.Namespace, optimizer: str, seed: int) -> list[dict[str, float]]:
    """Return loss and seconds of each step of a run.

    Args:
        s: The command line.
        optimizer: Name of the optimizer.
        seed: Seed of the run.
    """
    settings = [f"--training.steps={s.steps}", f"--training.seed={seed}", "--metrics.log_freq=1", "--job.device=cpu"]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "trainer", "train", "--ngpu", "2", f"--job.dump_folder={folder}", *settings]
        command += [f"--optimizer.name={optimizer}", *s.arguments.split()]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        steps = map(json.loads, Path(folder, "metrics.jsonl").read_text().splitlines())
        return [{"loss": step["loss"], "seconds": step["seconds_per_step"]} for step in steps]


def table(rows: dict[str, list[list[dict[str, float]]]]) -> str:
    """Return the table: losses every ten steps, seconds a step, and the loss after equal time.

    Equal time is the time that the first optimizer took.

    Args:
        rows: Steps of each run, by optimizer.
    """
    ends = range(_WINDOW, len(next(iter(rows.values()))[0]) + 1, _WINDOW)
    lines = []
    lines.append("| optimizer | " + " | ".join(f"-{end}" for end in ends) + " | s a step | after equal time |")
    lines.append("|---" * (len(ends) + 3) + "|")
    budget = None
    for optimizer, runs in rows.items():
        means = [statistics.fmean(x["loss"] for run in runs for x in run[end - _WINDOW : end]) for end in ends]
        seconds = statistics.median(x["seconds"] for run in runs for x in run)
        budget = seconds * len(runs[0]) if budget is None else budget
        last = min(int(budget / seconds), len(runs[0]))
        timed = statistics.fmean(x["loss"] for run in runs for x in run[max(last - _WINDOW, 0) : last])
        cells = [optimizer, *(f"{mean:.3f}" for mean in means), f"{seconds:.2f}", f"{timed:.3f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Run every seed and optimizer, print the table, and write the curves to `--json`."""
    s = parser().parse_args()
    made = made_with("scripts/benchmarks/optimizers.py", sys.argv[1:], device="cpu")
    rows: dict[str, list[list[dict[str, float]]]] = {optimizer: [] for optimizer in s.optimizers}
    for seed in s.seeds:
        for optimizer in s.optimizers:
            rows[optimizer].append(curve(s, optimizer, seed))
            print(f"seed {seed}  {optimizer:8} {rows[optimizer][-1][-1]['loss']:.3f}", flush=True)
    print(table(rows))
    if s.json:
        s.json.write_text(json.dumps(made | {"seeds": s.seeds, "runs": rows}) + "\n")


if __name__ == "__main__":
    main()
