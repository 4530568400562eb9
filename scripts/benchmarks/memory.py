"""Tokens of one sequence that fit, with each feature added in turn, as `lct estimate --max-seq-len` finds them.

python scripts/benchmarks/memory.py --json docs/measurements/memory.json       # a quarter of an hour on two cores
python scripts/benchmarks/memory.py --only "8 H100"

Llama 3 8B, causal attention over the whole sequence, full checkpointing. Nothing runs on a GPU.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from a clone, installed or not

from lct_planner.estimate import estimate
from lct_planner.search import longest_sequence
from lct_planner.timing import device
from lct_planner.worker import Worker
from scripts.provenance import made_with
from trainer.config.errors import ConfigError

_A = "--activation_checkpoint."
_P = "--parallelism."
BASE = (
    "--job.config_file=llama3_8b",
    "--training.local_batch_size=1",
    "--training.global_batch_size=-1",
    "--training.loss_chunk_tokens=0",
    "--compile.no-enable",
    f"{_A}mode=full",
)
LOSS = ("loss in chunks", ("--training.loss_chunk_tokens=2048",))
OFFLOAD = ("inputs of layers on the host", (f"{_A}offload=inputs",))
TILES = ("feed-forward in parts", (f"{_A}mlp_chunk_tokens=8192",))
HOST = ("parameters and optimizer on the host", ("--training.enable_cpu_offload",))
SETUPS: dict[str, tuple[str, int, list[tuple[str, tuple[str, ...]]]]] = {
    "1 H200": (
        "h200",
        1,
        [
            ("full checkpointing", ()),
            LOSS,
            HOST,
            TILES,
            OFFLOAD,
        ],
    ),
    "8 H100": (
        "h100",
        8,
        [
            ("full checkpointing", ()),
            ("all_to_all over 8", (f"{_P}context_parallel_degree=8", f"{_P}context_parallel_method=all_to_all")),
            LOSS,
            OFFLOAD,
            TILES,
            ("one query head at a time", (f"{_P}context_parallel_query_heads_per_pass=1",)),
            HOST,
        ],
    ),
}


def rows(only: str) -> list[dict]:
    """Return the longest sequence that fits with each feature, a row for each.

    Args:
        only: Part of the names of the setups to measure.
    """
    results = []
    with Worker(has_shim=True) as worker:
        for setup, (gpu, ranks, features) in SETUPS.items():
            if only not in setup:
                continue
            arguments: list[str] = list(BASE)
            estimate_of = partial(estimate, worker, ranks=ranks, device=device(gpu))
            begin = 32768
            for name, options in features:
                arguments = [*arguments, *options]
                try:
                    longest, beyond = longest_sequence(estimate_of, arguments, begin, 1024 * ranks)
                except ConfigError as error:
                    results.append({"setup": setup, "feature": name, "error": str(error)})
                else:
                    row = {"setup": setup, "feature": name, "beyond": next(iter(beyond.by_purpose))}
                    if longest is not None:
                        begin = longest.job.positions
                        row |= {"tokens": begin, "total": longest.total, "host": longest.profile.totals["host"]}
                        row |= {"tokens_per_second": longest.tokens_per_second, "mfu": longest.mfu[0]}
                    results.append(row)
                print(results[-1], file=sys.stderr, flush=True)
    return results


def main(argv: Sequence[str] | None = None) -> None:
    """Search, print the table, and write the rows to `--json`.

    Args:
        argv: The command line. None: the process's own.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a part of the names of the setups")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    results = rows(args.only)
    if args.json:
        head = made_with("scripts/benchmarks/memory.py", sys.argv[1:] if argv is None else argv, device="none")
        args.json.write_text(json.dumps(head | {"rows": results}, indent=1) + "\n")
    print("| GPUs | with | tokens | host memory a GPU | tok/s a GPU | largest part beyond |\n|---|---|---|---|---|---|")
    for row in results:
        size = f"{row['tokens']:,}" if "tokens" in row else row.get("error", "none")
        host = f"{row['host'] / 2**30:.0f} GiB" if row.get("host") else ""
        speed = f"{row['tokens_per_second']:,.0f}" if "tokens" in row else ""
        print(f"| {row['setup']} | {row['feature']} | {size} | {host} | {speed} | {row.get('beyond', '')} |")


if __name__ == "__main__":
    main()
