"""Peak memory and time of real runs on one GPU, feature by feature, and the predictions of `lct estimate`.

    python scripts/benchmarks/memory_runs.py run --json runs.json      # on a machine with a GPU
    python scripts/benchmarks/memory_runs.py predict --json runs.json  # adds predictions, without a GPU

The model has the layers and the vocabulary of Llama 3.1 8B, random weights and causal attention over the whole
sequence. The text is Python's own files. Each row is `lct train` in a process of its own. `run` keeps the rows of
earlier calls and writes the file after each row. Time is the time of the last step.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from a clone, installed or not

from scripts.benchmarks.planner import config_json
from scripts.provenance import made_with

ROOT = Path(__file__).resolve().parents[2]

_A = "--activation_checkpoint."
_LONGEST = 1e6  # seconds
_SIZES = {"dim": 4096, "ffn": 14336, "heads": 32, "kv_heads": 8, "vocab": 128_256}
_FULL = (f"{_A}mode=full",)
_LOSS = ("--training.loss_chunk_tokens=2048",)
_TILES = (f"{_A}mlp_chunk_tokens=8192",)
_INPUTS = (f"{_A}offload=inputs",)
_HOST = ("--training.enable_cpu_offload", "--training.dtype=bfloat16")
ROWS: dict[str, tuple[int, int, tuple[str, ...]]] = {
    "selective": (4, 16384, (f"{_A}mode=selective", f"{_A}selective_ac_option=op", *_LOSS)),
    "all logits at once": (4, 32768, (*_FULL, "--training.loss_chunk_tokens=0")),
    "loss in chunks": (4, 65536, _FULL + _LOSS),
    "feed-forward in parts": (4, 65536, _FULL + _LOSS + _TILES),
    "inputs on the host": (4, 65536, _FULL + _LOSS + _TILES + _INPUTS),
    "8B, parameters on the host": (32, 131072, _FULL + _LOSS + _TILES + _INPUTS + _HOST),
}
"""Layers, tokens, and settings of each row."""


def arguments(name: str, folder: Path) -> list[str]:
    """Return the command line of a row; write the model's sizes into a folder.

    Args:
        name: A key of `ROWS`.
        folder: Folder for the model's `config.json`.
    """
    layers, tokens, options = ROWS[name]
    shape = folder / f"llama_{layers}"
    shape.mkdir(exist_ok=True)
    (shape / "config.json").write_text(json.dumps(config_json(_SIZES | {"layers": layers})))
    return [
        f"--model.flavor={shape}",
        f"--training.seq_len={tokens}",
        "--training.local_batch_size=1",
        "--training.global_batch_size=-1",
        "--training.dataset=python_stdlib",
        "--training.mixed_precision_param=bfloat16",
        "--optimizer.implementation=fused",
        "--metrics.log_freq=1",
        "--metrics.no-enable_tensorboard",
        *options,
    ]


def run(name: str, steps: int, limit: float) -> dict[str, Any]:
    """Train a few steps.

    Args:
        name: A key of `ROWS`.
        steps: Number of steps.
        limit: Seconds after which the run is killed.

    Returns:
        The metrics of the last step, and an error if the run failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        words = [*arguments(name, Path(folder)), f"--training.steps={steps}", f"--job.dump_folder={folder}/run"]
        command = [sys.executable, "-m", "trainer", "train", "--ngpu", "1", *words]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.getenv("PYTHONPATH")]))}
        started = time.monotonic()
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        process = subprocess.Popen(command, env=environment, **streams)
        try:
            output, _ = process.communicate(timeout=min(limit, _LONGEST))
        except subprocess.TimeoutExpired:
            process.kill()  # its ranks end too
            output, _ = process.communicate()
        metrics = Path(folder, "run", "metrics.jsonl")
        done = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    row: dict[str, Any] = {"wall_seconds": round(time.monotonic() - started, 1), "steps": len(done)}
    if not done or process.returncode:
        row["error"] = " | ".join(output.splitlines()[-6:])
    if done:
        last = done[-1]
        row |= {key: round(last[key], 4) for key in ("memory_gib", "seconds_per_step", "tokens_per_second", "loss")}
        row |= {"finite": all(math.isfinite(step["loss"]) and math.isfinite(step["grad_norm"]) for step in done)}
        row |= {key: last[key] for key in ("mfu", "mfu_causal", "memory_predicted_gib") if last.get(key) is not None}
    return row


def predict(rows: dict[str, dict[str, Any]], gpu: str) -> None:
    """Add the planner's memory and time to each row.

    Args:
        rows: Rows by name.
        gpu: The planner's name of the GPU.
    """
    from lct_planner.estimate import estimate
    from lct_planner.timing import device
    from lct_planner.worker import Worker

    with tempfile.TemporaryDirectory() as folder, Worker(has_shim=True) as worker:
        for name, row in rows.items():
            answer = estimate(worker, arguments(name, Path(folder)), ranks=1, device=device(gpu))
            row["predicted_gib"] = round(answer.profile.peak / 2**30, 3)
            row["predicted_seconds"] = round(answer.time.seconds, 3)
            print(name, row, file=sys.stderr, flush=True)


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Return the table of the rows.

    Args:
        rows: Rows by name.
    """
    lines = [
        "| | layers | tokens | peak, GiB | predicted | s a step | predicted | tokens/s | MFU |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        layers, tokens, _ = ROWS[name]
        cells = [name, layers, f"{tokens:,}"]
        for key in ("memory_gib", "predicted_gib", "seconds_per_step", "predicted_seconds"):
            cells.append(f"{row[key]:.1f}" if key in row else "")
        cells += [f"{row['tokens_per_second']:,.0f}" if "tokens_per_second" in row else row.get("error", "")]
        cells += [f"{row['mfu']:.0%}" if "mfu" in row else ""]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Run, predict, or only print the table.

    Args:
        argv: The command line. None: the process's own.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("run", "predict", "table"))
    parser.add_argument("--json", type=Path, required=True, help="rows that are there are kept")
    parser.add_argument("--only", nargs="+", default=[*ROWS], choices=[*ROWS], metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="limit of all rows together; a row is killed then"
    )
    parser.add_argument("--gpu", default="h100", help="GPU of the predictions")
    args = parser.parse_args(argv)
    content = json.loads(args.json.read_text()) if args.json.exists() else {}
    rows = content.get("rows", {})
    if args.action == "run":
        import torch

        name = torch.cuda.get_device_name()
        content |= made_with("scripts/benchmarks/memory_runs.py", sys.argv[1:] if argv is None else argv, device=name)
        end = time.monotonic() + args.seconds
        for name in args.only:
            if (left := end - time.monotonic()) > 0:
                rows[name] = run(name, args.steps, left)
                print(name, rows[name], flush=True)
                args.json.write_text(json.dumps(content | {"rows": rows}, indent=1) + "\n")
    elif args.action == "predict":
        predict(rows, args.gpu)
        args.json.write_text(json.dumps(content | {"rows": rows}, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
