"""Run the planted mistakes of tests/mutants on copies of the tree: every one must fail one of its quick tests.

    python scripts/mutants.py [--only WORD ...] [--jobs N]

Prints a line a mutant, survivors last; exit code 1 if there are any. First the tests run on a copy without a mistake:
a test that fails anyway shows nothing.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a clone

from tests.mutants import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[1]
_TIMEOUT_SECONDS = 900
_FAILED = 1  # pytest's exit code for tests that failed; others mean that they did not run
_IGNORED = shutil.ignore_patterns(".git", ".venv", "outputs", "__pycache__", ".pytest_cache", ".ruff_cache")


def copy_tree(folder: Path) -> Path:
    """Copy what tests need into `folder`."""
    tree = folder / "tree"
    shutil.copytree(ROOT, tree, ignore=_IGNORED, symlinks=True)
    return tree


def plant(mutant: Mutant, tree: Path) -> None:
    """Make the mistake in a copy.

    Raises:
        ValueError: the line is not there, or more than once.
    """
    path = tree / mutant.file
    text = path.read_text(encoding="utf-8")
    if text.count(mutant.old) != 1:
        raise ValueError(f"{mutant.name!r}: {mutant.old!r} stands {text.count(mutant.old)} times in {mutant.file}")
    path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")


def run_tests(
    tree: Path, tests: list[str], *more: str, seconds: int = _TIMEOUT_SECONDS
) -> subprocess.CompletedProcess | None:
    """The quick ones of some tests in a copy; None: they did not end in time."""
    quick = ["-m", "not slow and not wide", "-p", "no:cacheprovider"]
    command = [sys.executable, "-B", "-m", "pytest", "-q", *quick, *more, *tests]
    try:
        return subprocess.run(
            command,
            cwd=tree,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None


def outcome(mutant: Mutant) -> str:
    """`killed by TEST`, or why not."""
    with tempfile.TemporaryDirectory(prefix="mutant_") as folder:
        tree = copy_tree(Path(folder))
        plant(mutant, tree)
        result = run_tests(tree, mutant.tests.split(), "-x")
    if result is None:
        return "SURVIVED: its tests did not end in time"
    if result.returncode != _FAILED:
        last = (result.stdout.strip() or result.stderr.strip() or "nothing").splitlines()[-1]
        return f"SURVIVED: exit code {result.returncode}, {last}"
    failed = [line.split()[1] for line in result.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return f"killed by {failed[0] if failed else '?'}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD", help="mutants whose name or file has a word")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time (default: 1)")
    parser.add_argument("--no-baseline", action="store_true", help="do not run the tests without a mistake first")
    arguments = parser.parse_args()
    chosen = [m for m in MUTANTS if any(word in f"{m.name} {m.file} {m.tests}" for word in arguments.only)]
    started = time.monotonic()
    if not arguments.no_baseline:
        with tempfile.TemporaryDirectory(prefix="mutant_") as folder:
            tests = sorted({test for mutant in chosen for test in mutant.tests.split()})
            result = run_tests(copy_tree(Path(folder)), tests, "-n", "2", "--dist", "loadfile", seconds=3600)
        if result is None or result.returncode:
            print(result.stdout[-3000:] if result else "no end within an hour")
            print("error: the tests fail without any mistake", file=sys.stderr)
            return 2
    survivors = []
    with ThreadPoolExecutor(arguments.jobs) as workers:
        for mutant, how in zip(chosen, workers.map(outcome, chosen), strict=True):
            print(f"{mutant.name}: {how}", flush=True)
            survivors += [mutant.name] if how.startswith("SURVIVED") else []
    minutes = (time.monotonic() - started) / 60
    print(f"{len(chosen)} mutants, {len(survivors)} survived, {minutes:.1f} minutes: {survivors or 'none'}")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
