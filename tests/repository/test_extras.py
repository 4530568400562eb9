"""Law: README.md says what each extra adds to an installation, in megabytes."""

import re
from pathlib import Path

import pytest

from scripts.extras import PROJECT, sizes

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()


def documented() -> dict[str, int]:
    """Return the megabytes of each extra, by the table of README.md."""
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| ([\d, ]+) \|", README, flags=re.MULTILINE)
    pairs = [zip(re.findall(r"\w+", names), re.findall(r"\d+", sizes), strict=True) for names, sizes in rows]
    return {name: int(size) for row in pairs for name, size in row}


def test_every_extra_is_documented() -> None:
    assert documented().keys() == PROJECT["optional-dependencies"].keys() - {"dev"}


def test_the_sizes_are_near_this_installation() -> None:
    """Within a third: other versions and machines have other sizes."""
    measured = sizes()
    assert {"qlora", "hub", "serve"} <= measured.keys()
    for extra, size in measured.items():
        if extra != "linear":  # a machine may have the kernels without Triton
            assert documented()[extra] == pytest.approx(size, rel=0.34, abs=1)
