"""Run the planted mistakes of tests/mutants on copies of the tree: every one must fail one of its quick tests.

    python scripts/mutants.py [--only WORD ...] [--jobs N]

Prints a line a mutant, survivors last; exit code 1 if there are any. First the tests run on a copy without a mistake:
a test that fails anyway shows nothing. Each job has one copy and one warm process (scripts/warm_pytest.py); it plants a
mistake, runs its tests until one fails, and takes the mistake out again.
"""

import argparse
import contextlib
import os
import queue
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a clone

from scripts.warm_pytest import WarmPytest
from tests.mutants import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[1]
_TIMEOUT_SECONDS = 900
_FAILED = 1  # exit code of pytest for failed tests; with other codes, the tests did not run
_IGNORED = (".git", ".venv", "outputs", "site", "__pycache__", ".pytest_cache", ".ruff_cache", ".hypothesis")
_QUICK = ["-q", "-m", "not slow and not wide", "-p", "no:cacheprovider", "--disable-warnings"]


class Bench:
    """A copy of the tree, and a warm process that runs tests there."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="mutants_")
        self.tree = Path(self._folder.name) / "tree"
        shutil.copytree(ROOT, self.tree, ignore=shutil.ignore_patterns(*_IGNORED), symlinks=True)
        self._pytest = WarmPytest(self.tree)
        self._planted = 0

    def run_tests(self, tests: list[str], *options: str, seconds: int = _TIMEOUT_SECONDS) -> tuple[int | None, str]:
        """Run the quick tests of some files.

        Args:
            tests: Files, or single tests.
            *options: Options of pytest.
            seconds: Time limit.

        Returns:
            The exit code of pytest, None if it did not end in time; and its output.
        """
        try:
            return self._pytest.run([*_QUICK, *options, *tests], seconds)
        finally:
            # Tests must find a later mistake without the saved example of an earlier one.
            shutil.rmtree(self.tree / ".hypothesis", ignore_errors=True)

    @contextlib.contextmanager
    def planted(self, mutant: Mutant) -> Iterator[None]:
        """Yield; the copy has the mistake inside this context.

        Args:
            mutant: The mistake.

        Raises:
            ValueError: The mistake's line is missing, or stands more than once.
        """
        path = self.tree / mutant.file
        text = path.read_text(encoding="utf-8")
        changed = mutant.planted_in(text)
        times = path.stat()
        # Python uses old bytecode if size and second of the file are the same, so each mistake gets another second.
        self._planted += 1
        second = times.st_mtime_ns + self._planted * 10**9
        try:
            path.write_text(changed, encoding="utf-8")
            os.utime(path, ns=(second, second))
            yield
        finally:
            path.write_text(text, encoding="utf-8")
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    def close(self) -> None:
        """End the warm process and remove the copy."""
        self._pytest.close()
        self._folder.cleanup()


def outcome(mutant: Mutant, bench: Bench) -> str:
    """Return `killed by TEST`, or why the mutant survived.

    Args:
        mutant: The mistake.
        bench: The copy in which the tests run.
    """
    unit_first = sorted(mutant.tests.split(), key=lambda test: not test.startswith("tests/unit/"))
    with bench.planted(mutant):
        code, printed = bench.run_tests(unit_first, "-x")
    if code is None:
        return "SURVIVED: its tests did not end in time"
    if code != _FAILED:
        return f"SURVIVED: exit code {code}, {(printed.strip() or 'nothing').splitlines()[-1]}"
    failed = [line.split()[1] for line in printed.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return f"killed by {failed[0] if failed else '?'}"


def run_table(mutants: list[Mutant], benches: list[Bench]) -> list[str]:
    """Try each mutant on the next free bench, and print the outcome.

    Args:
        mutants: The mistakes.
        benches: The copies.

    Returns:
        The names of the mutants that survived.
    """
    free: queue.SimpleQueue[Bench] = queue.SimpleQueue()
    for bench in benches:
        free.put(bench)

    def attempt(mutant: Mutant) -> tuple[str, float]:
        bench = free.get()
        started = time.monotonic()
        try:
            return outcome(mutant, bench), time.monotonic() - started
        finally:
            free.put(bench)

    survivors = []
    with ThreadPoolExecutor(len(benches)) as workers:
        for mutant, (how, seconds) in zip(mutants, workers.map(attempt, mutants), strict=True):
            print(f"{mutant.name}: {how} ({seconds:.1f} s)", flush=True)
            survivors += [mutant.name] if how.startswith("SURVIVED") else []
    return survivors


def main() -> int:
    """Run the mutants that the options choose, and print their outcomes.

    Returns:
        The exit code: 0 if every mutant is killed, 1 if one survives, 2 if tests fail without a mistake.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD", help="mutants whose name or file has a word")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time (default: 1)")
    parser.add_argument("--no-baseline", action="store_true", help="do not run the tests without a mistake first")
    arguments = parser.parse_args()
    chosen = [m for m in MUTANTS if any(word in f"{m.name} {m.file} {m.tests}" for word in arguments.only)]
    if not chosen:  # without a test, pytest would run all
        parser.error(f"--only {' '.join(arguments.only)}: no mutant matches, see tests/mutants")
    started = time.monotonic()
    benches = [Bench() for _ in range(arguments.jobs)]
    try:
        if not arguments.no_baseline:
            tests = sorted({test for mutant in chosen for test in mutant.tests.split()})
            code, printed = benches[0].run_tests(tests, "-n", "2", "--dist", "loadfile", seconds=3600)
            if code != 0:
                print(printed[-3000:] if code else "no end within an hour")
                print("error: the tests fail without any mistake", file=sys.stderr)
                return 2
        survivors = run_table(chosen, benches)
    finally:
        for bench in benches:
            bench.close()
    minutes = (time.monotonic() - started) / 60
    print(f"{len(chosen)} mutants, {len(survivors)} survived, {minutes:.1f} minutes: {survivors or 'none'}")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
