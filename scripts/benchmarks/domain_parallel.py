"""Models of fields on domains against one process that computes the whole fields with as many threads.

    python scripts/benchmarks/domain_parallel.py --sides 64 128 256 --degrees 1 2 --json rows.json

N ranks with `--threads` threads each, and one process with N times `--threads` threads, run a model forward and
backward in turn. Processes that do not measure sleep on a pipe. The ranks share the rows of every field, and sum the
gradients of weights. The one process runs the same model on whole tensors. A round is one process, then the ranks. The
ratio is the median over the rounds of (time of the ranks) / (time of the one process). Memory is counted in a step that
is not timed.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from a clone, installed or not

from scripts.benchmarks.domain_parallel_ranks import FLAVORS, Problem, Share, Whole
from scripts.benchmarks.teams import Row, Team, Times, compared
from scripts.provenance import made_with
from trainer.config.errors import ConfigError


def rows(args: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for every degree, model and side.

    Args:
        args: The command line.
    """
    for degree in args.degrees:
        with Team(degree, Whole, Share) as team:
            for model in args.models:
                for side in args.sides:
                    problem = Problem(model, side, degree, args.flavor, args.batch, args.channels)
                    team.whole("prepare", problem, degree * args.threads)
                    team.ranks("prepare", problem, args.threads)
                    yield measure(problem, args.repeats, team)


def measure(problem: Problem, repeats: int, team: Team) -> Row:
    """Measure the one process and the ranks in turn, after one call of each that is not timed.

    Args:
        problem: The model and its fields.
        repeats: Number of rounds.
        team: The processes.

    Returns:
        The row of the problem. `peak_bytes` is the largest peak of a rank, counting the tensors that a step creates,
        gradients included.
    """
    whole_account = team.whole("account")
    accounts = team.ranks("account")
    whole: list[Times] = []
    shares: list[list[Times]] = []
    for _ in range(repeats):
        whole.append(team.whole("run"))
        shares.append(team.ranks("run"))
    peak = max(one["peak_bytes"] for one in accounts)
    return {
        "model": problem.model,
        "degree": problem.degree,
        "side": problem.side,
        **compared(whole, shares),
        "peak_bytes": peak,
        "whole_peak_bytes": whole_account["peak_bytes"],
        "memory_ratio": round(peak / whole_account["peak_bytes"], 4),
        "bytes_sent": sum(one["bytes_sent"] for one in accounts),
        "calls": max(one["calls"] for one in accounts),
    }


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{message}; see --help\n")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    described = _Parser(description=__doc__.splitlines()[0])
    add = described.add_argument
    add("--models", nargs="+", choices=[*FLAVORS], default=[*FLAVORS])
    add("--flavor", default="debugmodel", help="flavor of every model")
    add("--sides", nargs="+", type=int, default=[64, 128, 256], help="points of a field along each of its two axes")
    add("--degrees", nargs="+", type=int, default=[1, 2], help="numbers of ranks that share a field")
    add("--batch", type=int, default=1)
    add("--channels", type=int, default=3)
    add("--repeats", type=int, default=7, help="measured rounds, after a warm-up round")
    add("--threads", type=int, default=1, help="threads of each rank")
    add("--json", type=Path, metavar="FILE", help="file for the rows and their origin")
    return described


def check(args: argparse.Namespace) -> None:
    """Check the command line.

    Args:
        args: The command line.

    Raises:
        ConfigError: These values cannot be measured.
    """
    for name in ("sides", "degrees", "batch", "channels", "repeats", "threads"):
        values = getattr(args, name)
        for value in values if isinstance(values, list) else [values]:
            if value < 1:
                raise ConfigError(f"--{name} {value} must be at least 1")
    for model in args.models:
        if args.flavor not in FLAVORS[model]:
            names = ", ".join(FLAVORS[model])
            raise ConfigError(f"--flavor {args.flavor} is no flavor of {model}; use one of {names}")
        for side in args.sides:
            FLAVORS[model][args.flavor].for_fields(args.channels, side, side)
    if args.json is not None and not args.json.absolute().parent.is_dir():
        raise ConfigError(f"--json {args.json}: its folder does not exist")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, and write the rows to `--json`.

    Args:
        argv: The command line. None: the process's own.

    Returns:
        The exit code.
    """
    arguments = sys.argv[1:] if argv is None else argv
    args = parser().parse_args(arguments)
    try:
        check(args)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    settings = {name: getattr(args, name) for name in ("flavor", "batch", "channels", "threads", "repeats")}
    columns = ["model", "degree", "side", "ratio", "ms", "whole_ms", "memory_ratio"]
    print(" ".join(f"{column:>12}" for column in columns), " ratio from .. to")
    results: list[Row] = []
    result = made_with("scripts/benchmarks/domain_parallel.py", arguments, device="cpu") | {"results": results}
    for row in rows(args):
        results.append(row | settings)
        low, high = row["ratio_range"]
        print(" ".join(f"{row[column]:>12}" for column in columns), f" {low} .. {high}", flush=True)
        if args.json is not None:  # after every row, so that an interrupted run keeps its rows
            args.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
