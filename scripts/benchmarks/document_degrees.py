"""Compare the time of a step for three ways to divide the same documents over ranks.

    fixed       a group of 8 ranks for each row of packed documents; every document is cut over all 8
    dynamic     each document gets a group of 1, 2, 4, ... ranks, and a rank works through its groups one after another
    balanced    one large group; the layout `balanced` leaves short documents whole, and cuts long ones where work asks

Times are the planner's: FLOPs and bytes of the plans, and the rates of a GPU of lct_planner/gpus.toml. Recomputation is
full, and messages of a ring run while attention is computed. FSDP, the optimizer and launches, which all ways have in
common, are left out. Dynamic groups are given an advantage: their ranks wait for each other at the end of the step
alone, as without FSDP, and the schedule is searched with all times known.

Lengths are log-normal. Trajectories have a median of 41,000 tokens, 95 % below 75,000, and at most 187,000. Web pages
have a median of 600; with books the median is 2,000, and a few documents have most of the work. Rows of `balanced` are
assigned as `training.balance` does.

    python scripts/benchmarks/document_degrees.py --json docs/measurements/document_degrees.json
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from a clone, installed or not

import numpy as np

from lct_planner.timing import Device, device
from longshard.context.planning.balance import build_layout
from longshard.context.planning.cost import AttentionShape
from longshard.context.planning.mask import causal, documents
from longshard.context.planning.methods import make_plan
from longshard.context.planning.plan import Message, RankPlan
from scripts.provenance import made_with
from trainer.families.decoder_args import LLAMA3
from trainer.job.training import BALANCE_GROWTH
from trainer.tasks.balanced_batches import assign, document_costs

MODEL = LLAMA3["8B"]
KERNEL = "flash3"
NODE = 8
IDEAL = "equal work, no message"
CALL_SECONDS = 10e-6
"""Time of a message apart from its bytes, as in the planner."""
_SEARCHES = 20


@dataclass(frozen=True)
class Lengths:
    """Lengths of documents: log-normal, cut at the longest.

    Attributes:
        median: Median, in tokens.
        sigma: Standard deviation of the logarithm.
        longest: Longest document, in tokens.
    """

    median: int
    sigma: float
    longest: int

    def draw(self, rng: np.random.Generator, tokens: int, row: int) -> np.ndarray:
        """Return lengths of documents that fill rows one after another, (n,) int64; a row's end cuts a document.

        Args:
            rng: Source of the lengths.
            tokens: Tokens of all documents.
            row: Tokens of a row.
        """
        drawn = rng.lognormal(np.log(self.median), self.sigma, size=100 + 4 * tokens // self.median)
        ends = np.cumsum(np.ceil(drawn.clip(1, self.longest)).astype(np.int64))
        ends = np.unique(np.concatenate([ends, np.arange(row, tokens + 1, row)]))
        return np.diff(ends[ends <= tokens], prepend=0)


TABLES = {
    "trajectories of agents": Lengths(median=41_000, sigma=0.37, longest=187_000),
    "web pages": Lengths(median=600, sigma=1.3, longest=131_072),
    "web pages and books": Lengths(median=2_000, sigma=1.9, longest=187_000),
}


class Bytes(NamedTuple):
    """Bytes that a rank sends or receives, and messages: the larger of both directions.

    Attributes:
        inside: Bytes within the node.
        outside: Bytes to or from other nodes.
        calls: Number of messages.
    """

    inside: float
    outside: float
    calls: int


@dataclass(frozen=True)
class Clock:
    """Times of parts of a step on one rank.

    Attributes:
        gpu: The record of the GPU.
    """

    gpu: Device
    shape = AttentionShape(1, MODEL.n_heads, MODEL.n_kv_heads, MODEL.head_dim, 2)
    linear = 2 * MODEL.flops_per_token(1)[0] - MODEL.flops_per_token(2)[0]
    """FLOPs of a token without attention."""

    @property
    def row_bytes(self) -> int:
        """Bytes of the key and value of a token in one layer."""
        return sum(self.shape.key_sizes) * self.shape.kv_heads * self.shape.itemsize

    def seconds(self, tokens: float, pairs: float, forward: Bytes, backward: Bytes) -> float:
        """Return the time of a rank's forward, recomputed forward and backward.

        Args:
            tokens: Tokens of the rank.
            pairs: Pairs of query and key that it computes, for each head.
            forward: What it exchanges in a forward of one layer.
            backward: What it exchanges in a backward of one layer.
        """
        # A recomputed forward adds a third to forward and backward.
        products = tokens * self.linear * 4 / 3 / self.gpu.rate("products")
        per_pair = 4 * self.shape.head_dim * self.shape.heads
        attention = pairs * per_pair / self.gpu.rate(f"attention_forward {KERNEL}")
        attention_backward = 2.5 * pairs * per_pair / self.gpu.rate(f"attention_backward {KERNEL}")
        ahead = max(attention, self._message_seconds(forward))
        back = max(attention_backward, self._message_seconds(backward))
        return products + MODEL.n_layers * (2 * ahead + back)

    def _message_seconds(self, moved: Bytes) -> float:
        wire = moved.inside / self.gpu.rate("link") + moved.outside / self.gpu.rate("network")
        return wire + moved.calls * CALL_SECONDS

    def planned(self, plan: RankPlan) -> float:
        """Return the time of a rank by its plan.

        Args:
            plan: The plan.
        """
        ahead = [message for stage in plan.forward for message in stage.messages]
        back = [message for stage in plan.backward for message in stage.messages]
        home = [message for stage in plan.backward for message in stage.home]
        gradients = 4 / self.shape.itemsize  # float32
        forward = self._moved(plan.rank, [(ahead, 1.0)])
        backward = self._moved(plan.rank, [(back, 1.0), (home, gradients)])
        return self.seconds(plan.q_layout.local_length(plan.rank), plan.pairs, forward, backward)

    def _moved(self, rank: int, kinds: Sequence[tuple[Sequence[Message], float]]) -> Bytes:
        """Return what a rank exchanges. kinds: messages, and bytes of a row relative to the row's key and value."""
        sums = np.zeros((2, 2))  # sent or received, inside or outside of the node
        calls = 0
        for messages, weight in kinds:
            for message in messages:
                other = message.target if message.source == rank else message.source
                is_outside = other // NODE != rank // NODE
                sums[int(message.target == rank), int(is_outside)] += message.rows * weight * self.row_bytes
                calls += message.target == rank
        return Bytes(*sums.max(axis=0), calls)

    def row(self, lengths: np.ndarray, degree: int) -> float:
        """Return the time of the slowest rank for a row of packed documents in the layout `balanced`.

        Args:
            lengths: Lengths of the documents, (n,).
            degree: Ranks that share the row.
        """
        packed = documents([int(length) for length in lengths])
        mask = causal(packed.q_len) & packed
        layout = build_layout("balanced", packed.q_len, degree, mask=mask)
        return max(self.planned(make_plan(layout, mask, "ring", rank)) for rank in range(degree))

    def cut_evenly(self, lengths: np.ndarray, degree: int) -> float:
        """Return the time of a group in which each document is cut over all ranks, with equal work for each.

        Args:
            lengths: Lengths of the documents, (n,).
            degree: Ranks of the group.
        """
        pairs = float((lengths * (lengths + 1.0)).sum() / 2 / degree)
        tokens = float(lengths.sum()) / degree
        received = tokens * (degree - 1) * self.row_bytes
        outside = max(degree - NODE, 0) / max(degree - 1, 1)
        calls = degree - 1

        def moved(weight: float, times: int) -> Bytes:
            return Bytes(received * weight * (1 - outside), received * weight * outside, times * calls)

        return self.seconds(tokens, pairs, moved(1.0, 1), moved(1.0 + 4 / self.shape.itemsize, 2))


# ---- three ways


def fixed(clock: Clock, lengths: np.ndarray, rows: np.ndarray) -> float:
    """Return the time of the slowest group of 8 ranks.

    Args:
        clock: The times.
        lengths: Lengths of the documents, (n,).
        rows: The row of each document, (n,).
    """
    return max(clock.cut_evenly(lengths[rows == row], NODE) for row in np.unique(rows))


def dynamic(clock: Clock, lengths: np.ndarray, ranks: int, most: int) -> float:
    """Return the time of a step with a group of a power of two for each document.

    A document gets the smallest group with which the schedule ends in time. No rank has more than `most` tokens of it.
    The shortest time is searched.

    Args:
        clock: The times.
        lengths: Lengths of the documents, (n,).
        ranks: Ranks of the job, a power of two.
        most: Most tokens of a rank and document.
    """
    ordered = np.sort(lengths)[::-1]
    choices = []
    for length in ordered:
        least = 1 << (int(-(-length // most)) - 1).bit_length()
        sizes = [least << step for step in range((ranks // least).bit_length())]
        choices.append([(size, clock.cut_evenly(np.array([length]), size)) for size in sizes])
    low = sum(options[0][0] * options[0][1] for options in choices) / ranks
    best = high = 4 * low + max(options[0][1] for options in choices)
    for _ in range(_SEARCHES):
        middle = (low + high) / 2
        end = scheduled(choices, ranks, middle)
        low, high = (middle, high) if end is None else (low, middle)
        best = best if end is None else min(best, end)
    return best


def scheduled(choices: Sequence[Sequence[tuple[int, float]]], ranks: int, limit: float) -> float | None:
    """Return the time at which a schedule ends, or None if it would end after the limit.

    Args:
        choices: The sizes of groups that each document may have, ascending, each with the document's time.
        ranks: Ranks of the job.
        limit: The limit, in the unit of the times.
    """
    loads = np.zeros(ranks)
    for options in choices:
        for size, seconds in options:
            starts = loads.reshape(-1, size).max(axis=1)
            group = int(starts.argmin())
            if (end := starts[group] + seconds) <= limit:
                loads[group * size : (group + 1) * size] = end
                break
        else:
            return None
    return float(loads.max())


def balanced(clock: Clock, lengths: np.ndarray, rows: np.ndarray, degree: int) -> float:
    """Return the time of the slowest rank with the layout `balanced`.

    Args:
        clock: The times.
        lengths: Lengths of the documents, (n,).
        rows: The row of each document, (n,).
        degree: Ranks that share a row.
    """
    return max(clock.row(lengths[rows == row], degree) for row in np.unique(rows))


def step(clock: Clock, table: Lengths, ranks: int, tokens: int, seed: int) -> dict[str, float]:
    """Return the time of a step by each way, for the same documents.

    Args:
        clock: The times.
        table: Lengths of documents.
        ranks: Ranks of the job.
        tokens: Tokens of a rank.
        seed: Seed of the lengths.
    """
    row = NODE * tokens
    lengths = table.draw(np.random.default_rng(seed), ranks * tokens, row)
    costs = document_costs(MODEL.flops_per_token, row)(lengths)

    def assigned(degree: int) -> np.ndarray:
        read = (np.cumsum(lengths) - 1) // (degree * tokens)
        most = int(BALANCE_GROWTH * degree * tokens)
        return assign(lengths, costs, read, micro_batches=1, ranks=ranks // degree, most=most).bins

    read = (np.cumsum(lengths) - 1) // row
    return {
        IDEAL: clock.cut_evenly(lengths, 1) / ranks,
        "fixed, as read": fixed(clock, lengths, read),
        "fixed, assigned by cost": fixed(clock, lengths, assigned(NODE)),
        "dynamic": dynamic(clock, lengths, ranks, tokens),
        **{f"balanced over {n}": balanced(clock, lengths, assigned(n), n) for n in (NODE, 2 * NODE, ranks)},
    }


# ---- command line


def table_of(rows: dict[str, dict[str, float]]) -> str:
    """Return the table of times as Markdown; times are relative to equal work without messages.

    Args:
        rows: Name of the lengths -> way -> seconds.
    """
    ways = [way for way in next(iter(rows.values())) if way != IDEAL]
    lines = [f"| | {' | '.join(ways)} |", "|---" * (len(ways) + 1) + "|"]
    for name, times in rows.items():
        lines.append(f"| {name} | {' | '.join(f'{times[way] / times[IDEAL]:.2f}' for way in ways)} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Compute all tables, print them, and write them to `--json`.

    Args:
        argv: The command line. None: the process's own.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--gpu", default="h100", help="GPU of lct_planner/gpus.toml (default: h100)")
    add("--ranks", type=int, default=64, help="GPUs, a power of two of at least 16 (default: 64)")
    add("--tokens", type=int, default=32768, help="tokens of a GPU and step (default: 32768)")
    add("--steps", type=int, default=20, help="steps with documents of their own (default: 20)")
    add("--json", type=Path, metavar="FILE", help="write the result there")
    args = parser.parse_args(argv)
    if args.ranks < 2 * NODE or args.ranks & (args.ranks - 1) or args.tokens * NODE < 187_000 or args.steps < 1:
        print("--ranks must be a power of two from 16; --tokens at least 23,375; --steps at least 1", file=sys.stderr)
        return 2
    clock = Clock(device(args.gpu))
    rows = {}
    for name, table in TABLES.items():
        steps = [step(clock, table, args.ranks, args.tokens, seed) for seed in range(args.steps)]
        rows[name] = {way: float(fmean(each[way] for each in steps)) for way in steps[0]}
        print(name, {way: round(seconds, 3) for way, seconds in rows[name].items()}, flush=True)
    print(f"\n{table_of(rows)}")
    if args.json:
        words = sys.argv[1:] if argv is None else argv
        head = made_with("scripts/benchmarks/document_degrees.py", words, device="cpu")
        args.json.write_text(json.dumps(head | {"rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
