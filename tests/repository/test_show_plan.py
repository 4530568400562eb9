"""The plan's table and picture against the plan."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from trainer.commands.plan import build, main, parse_documents, parse_mask, parser
from trainer.commands.plan_case import DIRECTIONS, MOST_RANKS, Case
from trainer.commands.plan_summary import WIDTH, busiest_and_mean, busiest_and_mean_flops, summary
from trainer.commands.plan_tables import TABLES
from trainer.distributed.context_parallel.planning.auto import choose
from trainer.distributed.context_parallel.planning.cost import attention_cost
from trainer.distributed.context_parallel.planning.mask import causal
from trainer.distributed.context_parallel.planning.methods import METHODS, make_plan
from trainer.distributed.context_parallel.planning.options import ContextParallelOptions
from trainer.distributed.sharding.layout import head_tail

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
    """All tables of one direction, forward unless another one is given."""
    assert main([*SMALL, *argv, *([] if "--rank" in argv else ["--tables", *TABLES])]) == 0
    return tables(capsys.readouterr().out)


# ---- the table


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_stages_are_those_of_the_plan(capsys: pytest.CaptureFixture[str], direction: str):
    columns, *rows = shown(capsys, "--direction", direction)[f"Stages, {direction}"]
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


def test_the_costs_are_those_of_the_plan_with_their_means(capsys: pytest.CaptureFixture[str]):
    argv = ("--heads", "4", "--kv-heads", "2", "--head-dim", "64")
    case = case_of(*argv)
    costs = [case.cost(rank, "forward") for rank in range(4)]
    columns, *rows = shown(capsys, *argv)["Cost of one layer's attention, forward"]
    assert columns == ["rank", "kFLOP", "kv sent KiB", "received KiB", "calls", "buffers KiB"]
    assert [row[0] for row in rows] == ["0", "1", "2", "3", "maximum", "mean", "max/mean"]
    units = (1e3, 1024, 1024, 1, 1024)
    exact = [(c.flops, c.bytes_sent["kv"], c.bytes_received["kv"], c.calls["kv"], c.workspace) for c in costs]
    exact += [tuple(map(max, zip(*exact, strict=True))), tuple(np.mean(exact, axis=0))]
    for row, values in zip(rows, exact, strict=False):
        assert [float(cell.replace(",", "")) for cell in row[1:]] == pytest.approx(
            [value / unit for value, unit in zip(values, units, strict=True)], abs=6e-4
        )
    assert sum(c.bytes_sent["kv"] for c in costs) == 0.75 * 48 * 3 * (2 * 2 * 64 * 2)
    assert rows[-1][1:] == [f"{most / mean:.3f}" for most, mean in zip(*exact[-2:], strict=True)]


def test_one_rank_alone_is_shown_whole(capsys: pytest.CaptureFixture[str]):
    argv = ("--load-balancer", "balanced", "--mask", "document", "--documents", ",".join(["2"] * 24))
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
    pairs = case_of(*argv).pairs
    assert pairs.max() < 1.02 * pairs.mean()


def test_many_ranks_are_abbreviated_and_the_sums_are_of_all(capsys: pytest.CaptureFixture[str]):
    argv = ["--seq-len", "1024", "--degree", "64", "--direction", "backward"]
    assert main([*argv, "--tables", *TABLES]) == 0
    text = capsys.readouterr().out
    assert len(text.splitlines()) < 150
    found = tables(text)
    assert [row[0] for row in found["Who owns what"][1:]] == ["0", "1", "2", "...", "32", "...", "63"]
    assert [row[:2] for row in found["Stages, backward"][1:8]] == [
        ["0", "0"], ["0", "1"], ["0", "2"], ["0", "..."], ["0", "32"], ["0", "..."], ["0", "63"],
    ]  # fmt: skip
    case = case_of(*argv)
    sent = [case.cost(rank, "backward").bytes_sent["kv"] / 2**20 for rank in range(64)]
    rows = {row[0]: row for row in found["Cost of one layer's attention, backward"]}
    column = rows["rank"].index("kv sent MiB")
    assert rows["maximum"][column] == f"{max(sent):,.3f}"
    assert rows["mean"][column] == f"{np.mean(sent):,.3f}"


# ---- the summary

SUMMARIES = [
    ["--seq-len", "65536", "--degree", "1"],
    ["--seq-len", "65536", "--degree", "2"],
    ["--seq-len", "1048576", "--degree", "64"],
    ["--seq-len", "1048576", "--degree", "64", "--method", "hybrid", "--head-degree", "8", "--mask", "window:4096"],
    ["--seq-len", "65536", "--degree", "8", "--method", "auto", "--mask", "document"],
    ["--seq-len", "16384", "--degree", "1024", "--method", "all_gather", "--load-balancer", "contiguous"],
]


@pytest.mark.parametrize("argv", SUMMARIES, ids=" ".join)
def test_a_summary_is_short_and_narrow(capsys: pytest.CaptureFixture[str], argv: list[str]):
    assert main(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 20
    assert max(map(len, lines)) <= WIDTH == 100


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("mask", [["--mask", "causal"], ["--mask", "document", "--documents", "20,1,27"]])
def test_the_numbers_of_a_summary_are_those_of_all_plans(mask: list[str], method: str, direction: str):
    argv = [*mask, *with_degree(method), "--load-balancer", "contiguous"]
    case = case_of(*argv)
    heads = METHODS[method].head_degree(4, (2, 2))
    plans = [make_plan(case.layout, case.mask, method, rank, head_degree=heads) for rank in range(4)]
    costs = [attention_cost(plan, case.shape, direction) for plan in plans]
    assert case.pairs.tolist() == [plan.pairs for plan in plans]
    flops = [cost.flops for cost in costs]
    assert busiest_and_mean_flops(case, direction) == pytest.approx((max(flops), np.mean(flops)))
    for of in (lambda c: c.bytes_sent.total(), lambda c: c.bytes_received.total(), lambda c: c.calls.total()):
        assert busiest_and_mean(case, direction, of) == (max(map(of, costs)), np.mean([*map(of, costs)]))
    balance = re.search(r"over the mean: ([\d.]+)", summary(case))
    assert balance[1] == f"{max(flops) / np.mean(flops):.3f}"


def test_the_summary_prints_these_numbers():
    case = case_of("--seq-len", "1048576", "--degree", "64")
    words = {line.split()[0]: line.split()[1:] for line in summary(case).splitlines() if line.startswith("  ")}
    sent = [case.cost(rank, "backward").bytes_sent.total() / 2**30 for rank in range(64)]
    assert words["sends"][4:] == [f"{max(sent):.2f}", "GiB", f"{np.mean(sent):.2f}", "GiB"]
    held = [case.cost(rank, "forward").workspace / 2**20 for rank in range(64)]
    assert words["buffers"][:4] == [f"{max(held):.2f}", "MiB", f"{np.mean(held):.2f}", "MiB"]
    assert words["exchanges"] == ["63", "63", "126", "126"]
    assert words["stages"] == ["64", "64"]
    assert words["mask"][:4] == ["causal", "mask;", "50", "%"]


@pytest.mark.parametrize("load_balancer", ["head_tail", "contiguous"])
def test_of_many_ranks_a_few_stand_for_all(load_balancer: str):
    degree = MOST_RANKS + 8
    case = case_of("--seq-len", str(degree * 4), "--degree", str(degree), "--load-balancer", load_balancer)
    assert len(case.planned) == 20
    assert "Compute is of all ranks, the rest of 20 of them" in summary(case)
    for direction in DIRECTIONS:
        each = [case.cost(rank, direction) for rank in range(degree)]
        for of in (lambda c: c.bytes_sent.total(), lambda c: c.bytes_received.total()):
            most, mean = busiest_and_mean(case, direction, of)
            assert 0.97 * max(map(of, each)) < most <= max(map(of, each))
            assert mean == pytest.approx(np.mean([*map(of, each)]), rel=0.02)


@pytest.mark.slow
def test_a_summary_of_1024_ranks_plans_few_of_them(capsys: pytest.CaptureFixture[str]):
    assert main(["--seq-len", "1048576", "--degree", "1024"]) == 0
    out = capsys.readouterr().out
    assert "Compute is of all ranks, the rest of 20 of them" in out
    assert re.search(r"stages +1,024 +1,024", out)


@pytest.mark.parametrize("mask", [["--mask", "causal"], ["--mask", "window:4"], ["--mask", "document"]])
def test_auto_chooses_as_training_does(capsys: pytest.CaptureFixture[str], mask: list[str]):
    argv = ["--seq-len", "8192", "--degree", "8", "--method", "auto", *mask]
    case = case_of(*argv)
    packed = mask[-1] == "document"
    _, batch, _ = parse_mask("document", 8192, None) if packed else (None, None, None)
    masks = (causal(8192),) if packed else (case.mask,)
    options, reason = choose(ContextParallelOptions(), masks, 8, case.shape, batch=batch, hybrids=not packed)
    assert (case.options, case.reason) == (options, reason)
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert f"auto chose {reason}" in " ".join(out.split())
    assert out.startswith(f"{options.method} on 8 ranks")


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
        (["--seq-len", "650", "--degree", "65", "--output", "plan.svg"], "--output draws at most 64 ranks"),
        (["--method", "auto", "--head-degree", "2"], "--head-degree 2 has no effect with --method auto; .* use hybrid"),
        (["--tables", "stage"], "argument --tables: invalid choice: 'stage'"),
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
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert not out


def test_the_help_has_examples_that_run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    out = capsys.readouterr().out
    assert ended.value.code == 0
    assert out.startswith("usage: lct plan ")
    examples = re.findall(r"^  lct plan (.*)$", out, re.MULTILINE)
    assert len(examples) == 3
    monkeypatch.chdir(tmp_path)
    for example in examples:
        # A sixteenth of the length: the same options in less time.
        words = example.split()
        words[1] = str(int(words[1]) // 16)
        assert main(words) == 0


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
