"""The plan's picture against the plan, and its texts and colours."""

import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from lct_tools.plan import MOST_RANKS, main
from lct_tools.plan_picture import areas_of, draw, picture, rank_color
from longshard.context.planning.balance import LOAD_BALANCERS
from longshard.context.planning.methods import METHODS
from tests.masks import dense
from tests.repository.test_show_plan import SMALL, case_of, with_degree
from tests.slow import slow

pytestmark = pytest.mark.about("lct_tools/plan_case.py", "lct_tools/plan_summary.py")

MASKS = [["--mask", m] for m in ("causal", "full", "window:7")] + [["--mask", "document", "--documents", "20,1,27"]]


@pytest.mark.parametrize("mask", MASKS, ids=lambda m: m[1])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("load_balancer", LOAD_BALANCERS)
def test_the_square_shows_each_visible_pair_once(mask: list[str], method: str, load_balancer: str):
    for direction in ("forward", "backward"):
        case = case_of(*mask, *with_degree(method), "--load-balancer", load_balancer, "--direction", direction)
        each = {"all_to_all": 4, "hybrid": 2}.get(method, 1)  # that many ranks compute the same, for other heads
        seen = np.zeros((48, 48), dtype=int)
        for rank in range(4):
            for stage in case.stages(rank):
                for tile, field in zip(stage.tiles, areas_of(case, rank, stage, np.arange(48)), strict=True):
                    seen[field] += 1
                    assert len(field[0]) == tile.pairs
        assert (seen == each * dense(case.mask)[0]).all()


@pytest.mark.parametrize(("ending", "start"), [("svg", b"<?xml"), ("png", b"\x89PNG")])
@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["--method", "all_to_all", "--mask", "document"],
        ["--load-balancer", "balanced", "--direction", "backward"],
        ["--degree", "11", "--mask", "window:1"],
    ],
    ids=lambda argv: " ".join(argv) or "default",
)
def test_a_picture_is_written_and_is_the_same_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: list[str], ending: str, start: bytes
):
    pictures = [tmp_path / f"{name}.{ending}" for name in ("a", "b")]
    for output in pictures:
        assert main([*SMALL, *argv, "--output", str(output)]) == 0
        assert capsys.readouterr().out.endswith(f"\n{output}\n")
    first, second = (output.read_bytes() for output in pictures)
    assert first == second
    assert first.startswith(start)
    assert len(first) > 10_000
    assert b"<dc:date>" not in first


def outside(figure: Figure) -> list[str]:
    """Texts that leave the figure, or meet another text, in matplotlib's own renderer."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    texts = [t for t in figure.findobj(Text) if t.get_visible() and t.get_text()]
    boxes = [(t.get_text(), t.get_window_extent(renderer)) for t in texts]
    whole = figure.bbox
    places = [
        text for text, box in boxes if box.x0 < whole.x0 or box.y0 < whole.y0 or box.x1 > whole.x1 or box.y1 > whole.y1
    ]
    meet = [f"{a} | {b}" for i, (a, x) in enumerate(boxes) for b, y in boxes[:i] if x.overlaps(y)]
    return places + meet


@pytest.mark.parametrize("degree", [1, 2, 9, 17, *slow(4, 8, 16, MOST_RANKS)])
@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["--direction", "backward", "--mask", "document", "--load-balancer", "contiguous"],
        ["--method", "all_gather", "--mask", "window:65536"],
    ],
    ids=lambda argv: " ".join(argv) or "default",
)
def test_no_text_of_a_picture_is_clipped_or_covered(degree: int, argv: list[str]):
    assert outside(picture(case_of("--seq-len", "1048576", "--degree", str(degree), *argv))) == []


@pytest.mark.parametrize("degree", [8, MOST_RANKS])
def test_no_text_of_a_hybrid_picture_is_clipped(degree: int):
    argv = ["--seq-len", "1048576", "--degree", str(degree), "--method", "hybrid", "--head-degree", "4"]
    assert outside(picture(case_of(*argv, "--direction", "backward"))) == []


def test_the_test_sees_a_clipped_text():
    figure = picture(case_of())
    figure.text(0.95, 0.5, "a text that is too long for its place")
    assert any("too long" in text for text in outside(figure))


@pytest.mark.parametrize(
    ("layout", "mask"),
    [
        pytest.param("head_tail", "causal", marks=pytest.mark.slow),
        ("contiguous", "document"),
        pytest.param("balanced", "document", marks=pytest.mark.slow),
    ],
)
def test_a_picture_of_64_ranks_is_small_and_neighbours_differ(tmp_path: Path, layout: str, mask: str):
    argv = ["--seq-len", "16384", "--degree", "64", "--load-balancer", layout, "--mask", mask]
    case, output = case_of(*argv), tmp_path / "plan.svg"
    draw(case, output)
    assert output.stat().st_size < 1_000_000
    colors = [np.array(rank_color(case, rank)) for rank in range(64)]
    assert min(abs(a - b).max() for a, b in pairwise(colors)) > 0.15
    assert min(abs(a - b).max() for i, a in enumerate(colors) for b in colors[:i]) > 0.02


def test_a_picture_has_a_background_of_its_own(tmp_path: Path):
    """So that it can be read on a dark page."""
    draw(case_of(), tmp_path / "plan.svg")
    first = re.search(r'<g id="patch_1">\s*<path d="([^"]*)" style="([^"]*)"', (tmp_path / "plan.svg").read_text())
    assert first is not None
    assert "fill: #ffffff" in first[2]
    assert "opacity" not in first[2]


def test_other_plans_make_other_pictures(tmp_path: Path):
    pictures = set()
    for number, method in enumerate(METHODS):
        main([*SMALL, *with_degree(method), "--output", str(tmp_path / f"{number}.svg")])
        pictures.add((tmp_path / f"{number}.svg").read_text())
    assert len(pictures) == len(METHODS)
    assert any("#e69f00" in text for text in pictures)
