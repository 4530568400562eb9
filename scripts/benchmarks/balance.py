"""How evenly the documents of steps lie on dp x cp ranks: in the order of reading, and as `training.balance` assigns.

Documents have log-normal lengths and are cut at the ends of sequences. The time of a step is the sum, over its
micro-batches, of the FLOPs of the costliest rank, divided by the FLOPs of the mean rank. `bound` is the best time that
whole documents allow. `plan_ms` is the time of the assignment, `layout_ms` the time of the layout `balanced` of one row
over cp ranks, both in milliseconds. `flops_per_token` gives the FLOPs: there is no model, and no process group.

python scripts/benchmarks/balance.py --flavor 8B --seq-len 131072 --dp 8 --cp 8 --micro-batches 1 4
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from a clone, installed or not

import numpy as np

from longshard.context.planning.mask import documents_of
from longshard.context.planning.options import ContextParallelOptions
from scripts.provenance import made_with
from trainer.families.decoder_args import LLAMA3 as FLAVORS
from trainer.job.training import BALANCE_GROWTH
from trainer.tasks.balanced_batches import assign, document_costs


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--flavor", choices=FLAVORS, default="8B")
    p.add_argument("--seq-len", type=int, default=131072)
    p.add_argument("--dp", type=int, default=8)
    p.add_argument("--cp", type=int, default=8)
    p.add_argument("--micro-batches", type=int, nargs="+", default=[1, 4])
    p.add_argument("--mean", type=int, nargs="+", default=[4096, 16384, 65536], help="mean lengths of documents")
    p.add_argument("--sigma", type=float, default=1.2, help="standard deviation of the logarithm of lengths")
    p.add_argument("--steps", type=int, default=5)
    p.add_argument("--output", type=Path, help="JSON file")
    return p


def documents_of_step(rng: np.random.Generator, rows: int, seq_len: int, mean: float, sigma: float) -> np.ndarray:
    """Return the lengths in tokens of random documents that fill `rows` sequences, 1-D int64.

    Args:
        rng: Source of the random lengths.
        rows: Number of sequences.
        seq_len: Tokens of a sequence.
        mean: Mean length of a document in tokens.
        sigma: Standard deviation of the logarithm of the lengths.
    """
    number = 100 + 4 * int(rows * seq_len / mean)
    drawn = np.ceil(rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, size=number))
    ends = np.unique(np.concatenate([np.cumsum(drawn), np.arange(1, rows + 1) * seq_len]))
    return np.diff(ends[ends <= rows * seq_len], prepend=0).astype(np.int64)


def rank_costs(
    lengths: np.ndarray, flops: tuple[float, float], cp: int, load_balancer: str
) -> tuple[list[float], float]:
    """Compute the cost of each context-parallel rank for one row of documents.

    Args:
        lengths: Lengths of the row's documents in tokens, 1-D.
        flops: FLOPs of a token without attention, and FLOPs of one key that a query sees.
        cp: Context-parallel degree.
        load_balancer: Name of the layout.

    Returns:
        The FLOPs of each rank, and the milliseconds that building the layout took.
    """
    ids = np.repeat(np.arange(len(lengths)), lengths)
    keys = np.concatenate([np.arange(1, length + 1) for length in lengths])
    options = ContextParallelOptions(load_balancer=load_balancer)
    documents = documents_of(ids)
    started = time.perf_counter()
    layout = options.layout(len(ids), cp, documents)
    took = 1e3 * (time.perf_counter() - started)
    shards = [layout.indices(rank) for rank in range(cp)]
    return [len(shard) * flops[0] + keys[shard].sum() * flops[1] for shard in shards], took


def measure(s: argparse.Namespace, mean: int, micro_batches: int) -> dict[str, object]:
    """Measure several steps with one mean length and one number of micro-batches.

    Args:
        s: The command line.
        mean: Mean length of a document in tokens.
        micro_batches: Micro-batches of a step.

    Returns:
        The row of the result, with medians over the steps.
    """
    flops_per_token = FLAVORS[s.flavor].flops_per_token
    costs_of = document_costs(flops_per_token, s.seq_len)
    linear = 2 * flops_per_token(1)[0] - flops_per_token(2)[0]
    flops = linear, flops_per_token(1)[1] - linear
    step_times: dict[str, list[float]] = {"read": [], "assigned": [], "assigned, and over cp by cost": []}
    planned = []
    laid_out = []
    numbers = []
    leasts = []
    for seed in range(s.steps):
        rows = s.dp * micro_batches
        lengths = documents_of_step(np.random.default_rng(seed), rows, s.seq_len, mean, s.sigma)
        read = (np.cumsum(lengths) - 1) // s.seq_len
        costs = costs_of(lengths)
        sizes = {"micro_batches": micro_batches, "ranks": s.dp, "most": int(BALANCE_GROWTH * s.seq_len)}
        started = time.perf_counter()
        assigned = assign(lengths, costs, read, **sizes)
        planned.append(1e3 * (time.perf_counter() - started))
        for name, bins, load_balancer in (
            ("read", read, "head_tail"),
            ("assigned", assigned.bins, "head_tail"),
            ("assigned, and over cp by cost", assigned.bins, "balanced"),
        ):
            costs_of_rows, took = zip(
                *(rank_costs(lengths[bins == i], flops, s.cp, load_balancer) for i in range(rows)), strict=True
            )
            laid_out += took * (load_balancer == "balanced")
            work = np.array(costs_of_rows).reshape(micro_batches, -1)
            step_times[name].append(work.max(axis=1).mean() / work.mean())
        numbers.append(len(lengths))
        leasts.append(assigned.least)
    return {
        "mean_length": mean,
        "micro_batches": micro_batches,
        "documents_of_a_step": round(statistics.median(numbers)),
        "bound": round(statistics.median(leasts), 3),
        "time": {name: round(statistics.median(values), 3) for name, values in step_times.items()},
        "plan_ms": round(statistics.median(planned), 3),
        "layout_ms": round(statistics.median(laid_out), 3),
    }


def main() -> None:
    """Measure every number of micro-batches and mean length; print the result and write it to `--output`."""
    s = parser().parse_args()
    rows = [measure(s, mean, micro_batches) for micro_batches in s.micro_batches for mean in s.mean]
    result = made_with("scripts/benchmarks/balance.py", sys.argv[1:], device="cpu") | {"steps": rows}
    text = json.dumps(result, indent=2)
    if s.output:
        s.output.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
