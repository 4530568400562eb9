"""The plan's table and picture against the plan."""

import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from tests.masks import dense
from trainer.commands.plan import build, main, parse_documents, parser
from trainer.commands.plan_picture import polygon
from trainer.commands.plan_tables import Case
from trainer.distributed.context_parallel.planning.mask import causal
from trainer.distributed.context_parallel.planning.methods import METHODS, make_plan
from trainer.distributed.sharding.layout import LOAD_BALANCERS, head_tail

SMALL = ["--seq-len", "48", "--degree", "4"]


def case_of(*argv: str) -> Case:
    return build(parser().parse_args([*SMALL, *argv]))


def with_degree(method: str) -> list[str]:
    return ["--method", method, *(["--head-degree", "2"] if method == "hybrid" else [])]


def tables(text: str) -> dict[str, list[list[str]]]:
    """Title -> rows of cells, the first one the columns."""
    parts = (part.split("\n") for part in text.strip().split("\n\n"))
    return {part[0]: [re.split(r" {2,}", line.strip()) for line in part[1:]] for part in parts if len(part) > 1}


def shown(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, list[list[str]]]:
    assert main([*SMALL, *argv]) == 0
    return tables(capsys.readouterr().out)


# ---- the table


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_stages_are_those_of_the_plan(capsys: pytest.CaptureFixture[str], direction: str):
    columns, *rows = shown(capsys, "--direction", direction)["Stages"]
    assert columns[:6] == ["rank", "stage", "keys of", "rows held", "tiles", "pairs"]
    wanted = []
    for rank in range(4):
        for number, stage in enumerate(getattr(make_plan(head_tail(48, 4), causal(48), "ring", rank), direction)):
            owner = (rank + (number if direction == "forward" else -number)) % 4
            into = [f"{m.source}: {m.rows}" for m in stage.messages if m.target == rank]
            out = [f"{m.target}: {m.rows}" for m in stage.messages if m.source == rank]
            home = [f"{m.target}: {m.rows}" for m in stage.home if m.source == rank]
            travels = [", ".join(x) or "-" for x in ((into, out) if direction == "forward" else (into, out, home))]
            numbers = (rank, number, owner, stage.rows, len(stage.tiles), stage.pairs)
            wanted.append([*map(str, numbers), *travels])
    assert rows == wanted


def test_the_stages_of_a_hybrid_are_those_of_a_ring_of_groups(capsys: pytest.CaptureFixture[str]):
    (stages,) = (rows for title, rows in shown(capsys, *with_degree("hybrid")).items() if title.startswith("Stages"))
    by_place = [[row for row in stages[1:] if int(row[0]) % 2 == place] for place in (0, 1)]
    ring = [make_plan(head_tail(48, 2), causal(48), "ring", group) for group in (0, 1)]
    wanted = [str(stage.pairs) for plan in ring for stage in plan.forward]
    assert [[row[5].replace(",", "") for row in rows] for rows in by_place] == [wanted, wanted]
    # Rank 0 meets rank 2, rank 1 meets rank 3.
    assert [row[6:] for row in stages[1:] if row[1] == "1"] == [
        ["2: 24", "2: 12"], ["3: 24", "3: 12"], ["0: 12", "0: 24"], ["1: 12", "1: 24"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--method", "hybrid"], "--method hybrid needs --head-degree"),
        (["--method", "hybrid", "--head-degree", "3"], "--head-degree 3 must divide --degree 4; use one of 1, 2, 4"),
        (
            ["--method", "hybrid", "--head-degree", "2", "--heads", "3", "--kv-heads", "3"],
            "--head-degree 2 does not go",
        ),
    ],
)
def test_a_hybrid_needs_a_head_degree_that_fits(capsys: pytest.CaptureFixture[str], argv: list[str], sentence: str):
    assert main([*SMALL, *argv]) == 2
    assert sentence in capsys.readouterr().err


def test_the_owners_are_those_of_the_layout(capsys: pytest.CaptureFixture[str]):
    rows = shown(capsys)["Who owns what"][1:]
    assert rows[0] == ["0", "12", "[0, 6) [42, 48)"]
    assert rows[3] == ["3", "12", "[18, 30)"]


def test_the_costs_are_those_of_the_plan_with_their_sums(capsys: pytest.CaptureFixture[str]):
    argv = ("--heads", "4", "--kv-heads", "2", "--head-dim", "64")
    case = case_of(*argv)
    columns, *rows = shown(capsys, *argv)["Cost of one layer's attention"]
    assert columns == ["rank", "kFLOP", "kv sent KiB", "calls", "buffers KiB"]
    assert [row[0] for row in rows] == ["0", "1", "2", "3", "total", "maximum", "max/mean"]
    units = (1e3, 1024, 1, 1024)
    exact = [(c.flops, c.bytes_sent["kv"], c.calls["kv"], c.workspace) for c in case.costs]
    exact += [tuple(map(sum, zip(*exact, strict=True))), tuple(map(max, zip(*exact, strict=True)))]
    for row, values in zip(rows, exact, strict=False):
        assert [float(cell.replace(",", "")) for cell in row[1:]] == pytest.approx(
            [value / unit for value, unit in zip(values, units, strict=True)], abs=6e-4
        )
    assert sum(c.bytes_sent["kv"] for c in case.costs) == 0.75 * 48 * 3 * (2 * 2 * 64 * 2)
    assert rows[-1][1:] == [f"{4 * most / total:.3f}" for total, most in zip(*exact[-2:], strict=True)]


def test_one_rank_alone_is_shown_whole(capsys: pytest.CaptureFixture[str]):
    argv = ("--load-balancer", "balanced", "--mask", "document", "--documents", "7,30,11")
    some, whole = shown(capsys, *argv), shown(capsys, *argv, "--rank", "2")
    (tiles,) = (title for title in some if title.startswith("Tiles"))
    assert any("more (--rank 2)" in cell for row in some[tiles] for cell in row)
    assert {row[0] for row in whole[tiles][1:]} == {"2"}
    stages = case_of(*argv).stages(2)
    assert [row[-1] for row in whole[tiles][1:]] == [str(tile.pairs) for stage in stages for tile in stage.tiles]
    # What is left out of the short list is counted in it.
    short = [int(row[-1]) for row in some[tiles][1:] if row[0] == "2"]
    assert sum(short) == sum(stage.pairs for stage in stages)


@pytest.mark.parametrize(("seq_len", "text"), [(100, "random:3"), (7, "random:0"), (10, "3,0,7")])
def test_documents_fill_the_sequence(seq_len: int, text: str):
    lengths = parse_documents(text, seq_len)
    assert sum(lengths) == seq_len
    assert lengths == parse_documents(text, seq_len)
    assert text[0].isdigit() or min(lengths) > 0


def test_balanced_deals_by_the_documents_as_training_does():
    argv = ("--load-balancer", "balanced", "--mask", "document", "--documents", "40,8")
    assert case_of(*argv).layout != case_of("--load-balancer", "balanced").layout
    argv = ("--seq-len", "8192", *argv[:-1], "8000,192")
    costs = case_of(*argv).costs
    assert max(c.flops for c in costs) < 1.02 * np.mean([c.flops for c in costs])


# ---- the picture

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
                for tile in stage.tiles:
                    before = seen.sum()
                    for band in case.bands(rank, stage, tile):
                        shown_before, corners = seen.sum(), polygon(band)
                        for query in range(band.q_start, band.q_stop):
                            seen[query, slice(*band.visible(query))] += 1
                        # A diagonal cuts half a square off at each end.
                        assert area_of(corners) == pytest.approx(seen.sum() - shown_before, abs=0.51)
                    assert seen.sum() - before == tile.pairs
        assert (seen == each * dense(case.mask)[0]).all()


def area_of(corners: list[tuple[float, float]]) -> float:
    """By the shoelace formula."""
    return abs(sum(a[0] * b[1] - b[0] * a[1] for a, b in pairwise([*corners, *corners[:1]]))) / 2


@pytest.mark.parametrize(("ending", "start"), [("svg", b"<?xml"), ("png", b"\x89PNG")])
@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["--method", "all_to_all", "--mask", "document"],
        ["--load-balancer", "balanced", "--direction", "backward", "--rank", "1"],
        ["--degree", "11", "--mask", "window:1"],
    ],
    ids=lambda argv: " ".join(argv) or "default",
)
def test_a_picture_is_written_and_is_the_same_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: list[str], ending: str, start: bytes
):
    pictures = [tmp_path / f"{name}.{ending}" for name in ("a", "b")]
    for picture in pictures:
        assert main([*SMALL, *argv, "--output", str(picture)]) == 0
        assert capsys.readouterr().out.endswith(f"\n{picture}\n")
    first, second = (picture.read_bytes() for picture in pictures)
    assert first == second
    assert first.startswith(start)
    assert len(first) > 10_000
    assert b"<dc:date>" not in first


def test_other_plans_make_other_pictures(tmp_path: Path):
    pictures = set()
    for number, method in enumerate(METHODS):
        main([*SMALL, *with_degree(method), "--output", str(tmp_path / f"{number}.svg")])
        pictures.add((tmp_path / f"{number}.svg").read_text())
    assert len(pictures) == len(METHODS)
    assert any("#e69f00" in picture for picture in pictures)


# ---- the command line


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--method", "all_to_all", "--degree", "3"], "--degree 3 does not go with --heads 32: .* work: 1, 2, 4, 8"),
        (["--method", "all_to_all", "--head-degree", "2"], "--head-degree 2 has no effect with --method all_to_all"),
        (["--degree", "0"], "--degree 0 must be at least 1"),
        (["--head-dim", "-4"], "--head-dim -4 must be at least 1"),
        (["--degree", "49"], "--seq-len 48 gives some of --degree 49 ranks no token; use a length of at least 49"),
        (["--kv-heads", "5"], "--kv-heads 5 must divide --heads 32; use one of 1, 2, 4, 8, 16, 32"),
        (["--rank", "4"], "--rank 4 is none of --degree 4 ranks; use 0 to 3"),
        (["--mask", "casual"], "--mask 'casual' must be causal, full, document, or window:.* did you mean 'causal'"),
        (["--mask", "window:0"], "--mask 'window:0' must be .* at least 1"),
        (["--mask", "window"], "--mask 'window' must be .* as window:4096"),
        (["--documents", "48"], "--documents has no effect with --mask causal; .* use --mask document"),
        (["--mask", "document", "--documents", "40,9"], "--documents 40,9 are 49 tokens .* or use --seq-len 49"),
        (["--mask", "document", "--documents", "40,3"], "--documents 40,3 are 43 tokens .* add one of 5"),
        (
            ["--mask", "document", "--documents", "a,3"],
            "--documents 'a,3' must be lengths, such as 5000,3000, or random",
        ),
        (["--mask", "document", "--documents", "random"], "or random: and a seed, as random:0"),
        (["--output", "plan.pdf"], "--output plan.pdf must end in .svg or .png"),
        (["--output", "no/such/folder/plan.svg"], "--output .* lies in no folder: make no/such/folder first"),
        (["--method", "rng"], "argument --method: invalid choice: 'rng'"),
        (["--degree", "four"], "argument --degree: invalid int value: 'four'"),
        (["--windw", "3"], "unrecognized arguments: --windw 3"),
    ],
)
def test_a_bad_argument_is_told_in_one_sentence(
    capsys: pytest.CaptureFixture[str], argv: list[str], sentence: str
) -> None:
    try:
        code = main([*SMALL, *argv])
    except SystemExit as stopped:
        code = stopped.code
    out, err = capsys.readouterr()
    assert code == 2
    assert re.search(sentence, err)
    assert err.count("\n") == 1
    assert not out


def test_without_its_module_there_is_no_picture(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.delitem(sys.modules, "trainer.commands.plan_picture")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([*SMALL, "--output", str(tmp_path / "plan.svg")]) == 2
    assert "--output needs matplotlib: pip install matplotlib" in capsys.readouterr().err


def test_it_runs_from_anywhere_without_torch(tmp_path: Path):
    script = Path(__file__).parents[2] / "scripts" / "show_plan.py"
    command = [sys.executable, "-X", "importtime", str(script), *SMALL, "--output", "plan.svg"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=100)
    assert (tmp_path / "plan.svg").exists()
    imported = {line.rpartition("|")[2].strip() for line in ended.stderr.splitlines()}
    assert "matplotlib" in imported
    assert "torch" not in imported
