"""Law: the library needs nothing of the program. It alone trains a transformers model as one process does."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.library_alone import NoProgram


def test_a_transformers_model_trains_by_the_library_alone(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "tests.library_alone", str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("name", ["trainer", "trainer.job", "trainer.config.errors", "trainer.parallel"])
def test_the_program_is_refused_there(name: str) -> None:
    with pytest.raises(ImportError, match="a part of the program"):
        NoProgram().find_spec(name)


@pytest.mark.parametrize("name", ["longshard", "longshard.lazy", "longshard.sharding.ranges", "trainers", "torch"])
def test_the_library_and_others_are_not(name: str) -> None:
    assert NoProgram().find_spec(name) is None
