"""Trace the rows of the table, and compare them with the committed counts or replace these.

python -m tests.fake_cuda                   # print what differs
python -m tests.fake_cuda --write           # and commit to it: expected.json
python -m tests.fake_cuda --only "ring 8"   # some rows, whole
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lct_planner import shim

EXPECTED = Path(__file__).with_name("expected.json")
Found = dict[str, dict[str, Any]]


def run(folder: Path, *arguments: str) -> Found:
    """Build the shim in a folder, and return the results of `rows.py` from two processes that load it.

    Raises:
        subprocess.CalledProcessError: The compiler or a process failed.
    """
    environment, root = shim.environment(shim.build(folder)), Path(__file__).resolve().parents[2]
    parts = min(os.cpu_count() or 1, 2)
    command = [sys.executable, "-m", "tests.fake_cuda.rows", *arguments]
    started = [
        subprocess.Popen([*command, "--shard", f"{part}/{parts}"], env=environment, cwd=root, stdout=subprocess.PIPE)
        for part in range(parts)
    ]
    results: Found = {}
    for process in started:
        output, _ = process.communicate()
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, process.args)
        results |= json.loads(output)
    return results


def expected() -> Found:
    """Return the committed counts."""
    return json.loads(EXPECTED.read_text(encoding="utf-8"))


def differences(results: Found, wanted: Found) -> list[str]:
    """Return a line for each row that has other counts, with the counts that changed."""
    lines = []
    for name in sorted({*results, *wanted}):
        old, new = _flat(wanted.get(name, {})), _flat(results.get(name, {}))
        changed = (
            f"{key}: {old.get(key)} -> {new.get(key)}" for key in sorted({*old, *new}) if old.get(key) != new.get(key)
        )
        if text := ", ".join(changed):
            lines.append(f"{name}: {text}")
    return lines


def _flat(counts: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in counts.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def main(argv: Sequence[str] | None = None) -> int:
    """Trace, compare, and write if asked to; 1 if something differs or failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="replace the committed counts")
    parser.add_argument("--only", help="a part of the names of some rows, whose counts are printed")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        results = run(Path(folder), *(() if args.only is None else ("--only", args.only)))
    if args.only is not None:
        print(json.dumps(results, indent=1))
        return 0
    lines = differences(results, expected() if EXPECTED.exists() else {})
    print("\n".join(lines) or "nothing differs")
    failed = any("error" in counts for counts in results.values())
    if args.write and not failed:
        rows = ",\n".join(f"{json.dumps(name)}: {json.dumps(results[name])}" for name in sorted(results))
        EXPECTED.write_text(f"{{\n{rows}\n}}\n", encoding="utf-8")
    return int(failed or bool(lines and not args.write))


if __name__ == "__main__":
    sys.exit(main())
