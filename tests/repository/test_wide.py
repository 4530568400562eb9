"""The table of what `make test` leaves out fits the tests: each entry has a case, and so has all that it keeps."""

import os
import subprocess
import sys

import pytest

from tests.interpreted.process import ENVIRONMENT, ROOT, needs_triton
from tests.wide import WIDE, is_wide

INTERPRETED = "tests/interpreted/"


def cases(*paths: str, environment: dict[str, str]) -> list[str]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *paths]
    collected = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return [line for line in collected.stdout.splitlines() if "::" in line]


@pytest.mark.parametrize("interpreted", [False, pytest.param(True, marks=needs_triton)])
def test_every_entry_has_cases(interpreted: bool) -> None:
    names = [name for name in WIDE if name.startswith(INTERPRETED) is interpreted]
    files = sorted({name.partition("::")[0] for name in names})
    collected = cases(*files, environment=ENVIRONMENT if interpreted else dict(os.environ))
    for name in names:
        named = [case for case in collected if case.startswith(name)]
        kept = [case.partition("[")[2] for case in named if not is_wide(case)]
        assert len(named) > len(kept), name
        assert all(any(case.startswith(beginning) for case in kept) for beginning in WIDE[name]), (name, kept)
