"""docs/context_parallelism.md shows what `lct plan` prints and draws now."""

import re
from pathlib import Path

import matplotlib
import pytest

from lct_tools.plan import main

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "context_parallelism.md").read_text()
BLOCKS = re.findall(r"^    \$ lct plan (.*)\n((?:    .*\n|\n(?=    ))*)", PAGE, re.MULTILINE)
PICTURES = re.findall(r"^    lct plan (.*) --output (docs/images/\S+)$", re.sub(r"\\\n +", "", PAGE), re.MULTILINE)
# Another version of matplotlib writes the same picture in other words.
DREW = re.findall(r"^matplotlib==([\d.]+)", (ROOT / "requirements-dev.txt").read_text(), re.MULTILINE)[0]


@pytest.mark.parametrize(("arguments", "shown"), BLOCKS, ids=[arguments for arguments, _ in BLOCKS])
def test_the_page_shows_what_is_printed(capsys: pytest.CaptureFixture[str], arguments: str, shown: str):
    assert main(arguments.split()) == 0
    assert capsys.readouterr().out.rstrip() == re.sub(r"^    ", "", shown, flags=re.MULTILINE).rstrip()


@pytest.mark.skipif(matplotlib.__version__ != DREW, reason=f"the pictures were drawn by matplotlib {DREW}")
@pytest.mark.parametrize(("arguments", "picture"), PICTURES, ids=[picture for _, picture in PICTURES])
def test_a_picture_of_the_page_is_what_is_drawn(tmp_path: Path, arguments: str, picture: str):
    assert main([*arguments.split(), "--output", str(tmp_path / "plan.svg")]) == 0
    assert (tmp_path / "plan.svg").read_bytes() == (ROOT / picture).read_bytes()


def test_the_page_has_examples_and_all_pictures():
    assert len(BLOCKS) >= 1
    drawn = sorted(picture for _, picture in PICTURES)
    assert drawn == sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs" / "images").glob("plan_*.svg"))
