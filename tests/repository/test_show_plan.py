"""The plan's summary against the plan, and the command line."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lct_tools.plan import build, parse_documents, parse_mask, parser
from lct_tools.plan_case import DIRECTIONS, MOST_RANKS, Case
from lct_tools.plan_summary import WIDTH, busiest_and_mean, summary
from longshard.context.planning.auto import choose
from longshard.context.planning.cost import attention_cost
from longshard.context.planning.mask import causal
from longshard.context.planning.methods import METHODS, make_plan
from longshard.context.planning.options import ContextParallelOptions
from trainer.commands.main import main as lct

SMALL = ["--seq-len", "48", "--degree", "4"]


def case_of(*argv: str) -> Case:
    return build(parser().parse_args([*SMALL, *argv]))


def with_degree(method: str) -> list[str]:
    return ["--method", method, *(["--head-degree", "2"] if method == "hybrid" else [])]


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
    assert lct(["plan", *SMALL, *argv]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(("seq_len", "text"), [(100, "random:3"), (7, "random:0"), (10, "3,0,7")])
def test_documents_fill_the_sequence(seq_len: int, text: str):
    lengths = parse_documents(text, seq_len)
    assert sum(lengths) == seq_len
    assert lengths == parse_documents(text, seq_len)
    assert text[0].isdigit() or min(lengths) > 0


def test_balanced_assigns_by_the_documents_as_training_does():
    argv = ("--load-balancer", "balanced", "--mask", "document", "--documents", "40,8")
    assert case_of(*argv).layout != case_of("--load-balancer", "balanced").layout
    argv = ("--seq-len", "8192", *argv[:-1], "8000,192")
    pairs = case_of(*argv).pairs
    assert pairs.max() < 1.02 * pairs.mean()


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
    assert lct(["plan", *argv]) == 0
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
    for of in (
        lambda c: c.flops,
        lambda c: c.bytes_sent.total(),
        lambda c: c.bytes_received.total(),
        lambda c: c.calls.total(),
    ):
        assert busiest_and_mean(case, direction, of) == (max(map(of, costs)), np.mean([*map(of, costs)]))
    balance = re.search(r"over the mean: ([\d.]+)", summary(case))
    assert balance[1] == f"{max(flops) / np.mean(flops):.3f}"


def test_the_summary_prints_these_numbers():
    case = case_of("--seq-len", "1048576", "--degree", "64")
    words = {line.split()[0]: line.split()[1:] for line in summary(case).splitlines() if line.startswith("  ")}
    sent = [case.costs["backward"][rank].bytes_sent.total() / 2**30 for rank in range(64)]
    assert words["sends"][4:] == [f"{max(sent):.2f}", "GiB", f"{np.mean(sent):.2f}", "GiB"]
    held = [case.costs["forward"][rank].workspace / 2**20 for rank in range(64)]
    assert words["buffers"][:4] == [f"{max(held):.2f}", "MiB", f"{np.mean(held):.2f}", "MiB"]
    assert words["exchanges"] == ["63", "63", "126", "126"]
    assert words["stages"] == ["64", "64"]
    assert words["mask"][:4] == ["causal", "mask;", "50", "%"]


@pytest.mark.parametrize("load_balancer", ["head_tail", "contiguous"])
def test_of_many_ranks_a_few_stand_for_all(load_balancer: str):
    degree = MOST_RANKS + 8
    case = case_of("--seq-len", str(degree * 4), "--degree", str(degree), "--load-balancer", load_balancer)
    assert len(case.planned) == 20
    assert "These numbers are of 20 of the ranks" in summary(case)
    plans = [make_plan(case.layout, case.mask, "ring", rank) for rank in range(degree)]
    for direction in DIRECTIONS:
        each = [attention_cost(plan, case.shape, direction) for plan in plans]
        for of in (lambda c: c.bytes_sent.total(), lambda c: c.bytes_received.total()):
            most, mean = busiest_and_mean(case, direction, of)
            assert 0.97 * max(map(of, each)) < most <= max(map(of, each))
            assert mean == pytest.approx(np.mean([*map(of, each)]), rel=0.02)


@pytest.mark.slow
def test_a_summary_of_1024_ranks_plans_few_of_them(capsys: pytest.CaptureFixture[str]):
    assert lct(["plan", "--seq-len", "1048576", "--degree", "1024"]) == 0
    out = capsys.readouterr().out
    assert "These numbers are of 20 of the ranks" in out
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
    assert lct(["plan", *argv]) == 0
    out = capsys.readouterr().out
    assert f"auto chose {reason}" in " ".join(out.split())
    assert out.startswith(f"{options.method} on 8 ranks")


# ---- the command line


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--method", "all_to_all", "--degree", "3"], "--degree 3 does not go with --heads 32: .* work: 1, 2, 4, 8"),
        (["--method", "all_to_all", "--head-degree", "2"], "--head-degree 2 has no effect with --method all_to_all"),
        (["--degree", "0"], "--degree: 0 must be at least 1"),
        (["--head-dim", "-4"], "--head-dim: -4 must be at least 1"),
        (["--degree", "49"], "--seq-len 48 gives some of --degree 49 ranks no token; use a length of at least 49"),
        (["--kv-heads", "5"], "--kv-heads 5 must divide --heads 32; use one of 1, 2, 4, 8, 16, 32"),
        (["--mask", "casual"], "--mask 'casual' must be causal, full, document, or window:.* did you mean 'causal'"),
        (["--mask", "window:0"], "--mask 'window:0' must be .* at least 1"),
        (["--mask", "window"], "--mask 'window' must be .* as window:4096"),
        (["--documents", "48"], "--documents has no effect with --mask causal; .* use --mask document"),
        (["--mask", "document", "--documents", "40,9"], "--documents 40,9 are 49 tokens and must be --seq-len 48"),
        (["--mask", "document", "--documents", "40,3"], "--documents 40,3 are 43 tokens and must be --seq-len 48"),
        (
            ["--mask", "document", "--documents", "a,3"],
            "--documents 'a,3' must be lengths, such as 5000,3000, or random",
        ),
        (["--mask", "document", "--documents", "random"], "or random: and a seed, as random:0"),
        (["--output", "plan.pdf"], "--output plan.pdf must end in .svg or .png"),
        (["--output", "no/such/folder/plan.svg"], "--output .* lies in no folder: make no/such/folder first"),
        (["--seq-len", "650", "--degree", "65", "--output", "plan.svg"], "--output draws at most 64 ranks"),
        (["--method", "auto", "--head-degree", "2"], "--head-degree 2 has no effect with --method auto; .* use hybrid"),
        (["--method", "rng"], "--method: invalid choice: 'rng'"),
        (["--degree", "four"], "--degree: 'four' must be a whole number"),
        (["--windw", "3"], "unrecognized arguments: --windw 3"),
    ],
)
def test_a_bad_argument_is_told_in_one_sentence(
    capsys: pytest.CaptureFixture[str], argv: list[str], sentence: str
) -> None:
    try:
        code = lct(["plan", *SMALL, *argv])
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
        lct(["plan", "--help"])
    out = capsys.readouterr().out
    assert ended.value.code == 0
    assert out.startswith("usage: lct plan ")
    examples = re.findall(r"^  lct plan (.*)$", out, re.MULTILINE)
    assert len(examples) == 2
    monkeypatch.chdir(tmp_path)
    for example in examples:
        # A sixteenth of the length: the same options in less time.
        words = example.split()
        words[1] = str(int(words[1]) // 16)
        assert lct(["plan", *words]) == 0


def test_without_its_module_there_is_no_picture(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.delitem(sys.modules, "lct_tools.plan_picture")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert lct(["plan", *SMALL, "--output", str(tmp_path / "plan.svg")]) == 2
    assert "--output needs matplotlib: pip install matplotlib" in capsys.readouterr().err


def test_it_runs_from_anywhere_without_torch(tmp_path: Path):
    root = str(Path(__file__).parents[2])
    command = [sys.executable, "-X", "importtime", "-m", "trainer", "plan", *SMALL, "--output", "plan.svg"]
    settings = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": root}}
    ended = subprocess.run(command, **settings, capture_output=True, text=True, check=True, timeout=100)
    assert (tmp_path / "plan.svg").exists()
    imported = {line.rpartition("|")[2].strip() for line in ended.stderr.splitlines()}
    assert "matplotlib" in imported
    assert "torch" not in imported
