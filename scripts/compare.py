"""Run two configurations, or two commits, from one seed and compare loss and gradient norm step by step.

    python scripts/compare.py A.toml B.toml --ngpu 1 8 -- --parallelism.context_parallel_degree 2
    python scripts/compare.py main~1:train_configs/debug_model.toml train_configs/debug_model.toml

REV:FILE is the configuration and the program of that commit, from a worktree of its own. Arguments after `--` go to
both runs; --a and --b give an override to one run. Exit code: 0 the runs agree, 1 they differ, 2 a run failed or an
argument is wrong. Compare the first ten steps: later, rounding alone grows to 1e-4 of the loss.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


class CompareError(Exception):
    """A comparison that cannot be made; the message is one sentence."""


@dataclass(frozen=True)
class Run:
    """One side of the comparison.

    Attributes:
        name: "A" or "B".
        config: The configuration file.
        revision: The commit of program and configuration; None for the working tree.
        ranks: Number of ranks.
        overrides: Settings, as words of a command line.
    """

    name: str
    config: str
    revision: str | None
    ranks: int
    overrides: list[str]


@dataclass(frozen=True)
class Step:
    """Loss and gradient norm of one step, in run a and in run b."""

    step: int
    loss: tuple[float, float]
    grad_norm: tuple[float, float]

    def differences(self) -> tuple[float, float]:
        """Return the relative differences of b from a, (loss, gradient norm); infinite if either is not finite."""
        return tuple(_relative(*pair) for pair in (self.loss, self.grad_norm))


def _relative(a: float, b: float) -> float:
    if a == b:
        return 0.0
    return abs(b - a) / abs(a) if math.isfinite(a) and math.isfinite(b) and a else math.inf


def compare(a: list[dict], b: list[dict]) -> list[Step]:
    """Return the steps of two runs side by side.

    Args:
        a: The lines of `metrics.jsonl` of run a.
        b: The lines of `metrics.jsonl` of run b.

    Raises:
        CompareError: The runs logged different steps, or none.
    """
    steps = [[row["step"] for row in rows] for rows in (a, b)]
    if steps[0] != steps[1] or not steps[0]:
        raise CompareError(
            f"the runs logged the steps {_span(steps[0])} and {_span(steps[1])}; give both the same training.steps and "
            "metrics.log_freq"
        )
    return [
        Step(x["step"], (x["loss"], y["loss"]), (x["grad_norm"], y["grad_norm"])) for x, y in zip(a, b, strict=True)
    ]


def table(steps: list[Step]) -> str:
    """Return a table as text: a line for each step, with both losses and the differences.

    Args:
        steps: The steps.
    """
    lines = [f"{'step':>6}  {'loss a':>14}  {'loss b':>14}  {'difference':>10}  {'norm':>10}"]
    for step in steps:
        loss, norm = step.differences()
        lines.append(f"{step.step:>6}  {step.loss[0]:>14.9f}  {step.loss[1]:>14.9f}  {loss:>10.1e}  {norm:>10.1e}")
    return "\n".join(lines)


def execute(run: Run, steps: int, seed: int) -> list[dict]:
    """Train one side in a temporary folder.

    Args:
        run: The run.
        steps: Number of steps.
        seed: The seed.

    Returns:
        The lines of its `metrics.jsonl`.

    Raises:
        CompareError: The configuration does not exist, or the run failed.
    """
    with tempfile.TemporaryDirectory() as folder, _program(run.revision) as root:
        config = root / run.config if run.revision else Path(run.config)
        if not config.is_file():
            raise CompareError(f"{run.name} = {config} is no file; give a configuration such as {_EXAMPLE}")
        settings = {"job.dump_folder": folder, "training.seed": seed, "training.steps": steps, "metrics.log_freq": 1}
        arguments = [*(f"--{key}={value}" for key, value in settings.items()), *run.overrides]
        variables = {"NGPU": str(run.ranks), "CONFIG_FILE": str(config.resolve()), "PYTHON": sys.executable}
        inherited = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        result = subprocess.run(
            [str(root / "run_llama_train.sh"), *arguments],
            env=inherited | variables,
            capture_output=True,
            text=True,
            check=False,
        )
        if result.returncode:
            last = (result.stderr.strip() or result.stdout.strip() or "it said nothing").splitlines()[-1]
            raise CompareError(f"run {run.name} ended with exit code {result.returncode}: {last}")
        return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


@contextmanager
def _program(revision: str | None) -> Iterator[Path]:
    """Yield the folder of the program: this one, or a worktree of a commit."""
    if revision is None:
        yield ROOT
        return
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        added = _git("worktree", "add", "--detach", str(tree), revision)
        if added.returncode:
            raise CompareError(f"commit {revision!r} cannot be checked out: {added.stderr.strip().splitlines()[-1]}")
        try:
            yield tree
        finally:
            _git("worktree", "remove", "--force", str(tree))


def _git(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)


def _span(steps: list[int]) -> str:
    return f"{steps[0]} to {steps[-1]} ({len(steps)})" if steps else "none"


_EXAMPLE = "train_configs/debug_model.toml"


def _parse(argv: list[str]) -> tuple[argparse.Namespace, list[Run]]:
    cut = argv.index("--") if "--" in argv else len(argv)
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="compare.py", description=__doc__, formatter_class=layout)
    parser.add_argument("first", metavar="A", help=f"[REV:]FILE, such as {_EXAMPLE}")
    parser.add_argument("second", metavar="B", help="[REV:]FILE")
    parser.add_argument("--ngpu", type=int, nargs="+", default=[2], help="ranks of both runs, or of each (default: 2)")
    parser.add_argument("--steps", type=int, default=10, help="steps to compare (default: 10)")
    parser.add_argument("--seed", type=int, default=0, help="seed of both runs (default: 0)")
    parser.add_argument("--tolerance", type=float, default=1e-5, help="largest relative difference (default: 1e-5)")
    parser.add_argument("--a", action="append", default=[], metavar="--KEY=VALUE", help="override for A alone")
    parser.add_argument("--b", action="append", default=[], metavar="--KEY=VALUE", help="override for B alone")
    # `--a --x=y` reads as two options to argparse; joined, it is one with its value.
    words = iter(argv[:cut])
    joined = []
    for word in words:
        joined.append(f"{word}={next(words, '')}" if word in ("--a", "--b") else word)
    arguments = parser.parse_args(joined)
    if len(arguments.ngpu) > 2 or min(*arguments.ngpu, arguments.steps) < 1:
        parser.error("--ngpu takes one or two numbers of ranks, these and --steps must be at least 1, as in --ngpu 1 8")
    both = argv[cut + 1 :]
    runs = []
    for name, argument, ranks, own in (
        ("A", arguments.first, arguments.ngpu[0], arguments.a),
        ("B", arguments.second, arguments.ngpu[-1], arguments.b),
    ):
        revision, _, config = argument.rpartition(":")
        runs.append(Run(name, config, revision or None, ranks, [*both, *own]))
    return arguments, runs


def main(argv: list[str] | None = None) -> int:
    """Compare two runs, and print a table.

    Args:
        argv: The words of the command line; None for the words of this process.

    Returns:
        The exit code.
    """
    arguments, runs = _parse(sys.argv[1:] if argv is None else argv)
    try:
        steps = compare(*(execute(run, arguments.steps, arguments.seed) for run in runs))
    except CompareError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(table(steps))
    worst = [max(column) for column in zip(*(step.differences() for step in steps), strict=True)]
    agree = max(worst) <= arguments.tolerance
    print(
        f"{'the same' if agree else 'DIFFERENT'}: largest relative difference of the loss {worst[0]:.1e}, "
        f"of the gradient norm {worst[1]:.1e} (tolerance {arguments.tolerance:.0e})"
    )
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
