"""The benchmark of the trainer: both loops do the same work, its arithmetic, and what it writes."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from scripts.benchmarks import train as benchmark
from scripts.benchmarks import train_loops as loops
from scripts.benchmarks.train import Block, compared, main, parser, settled, speed
from scripts.benchmarks.train_loops import Bare, PeakMemory, Rounds, Work, memory_of, train
from tests.support_matrix import Record
from trainer.families.decoder_args import LLAMA3 as FLAVORS
from trainer.runtime.console import logger

MEASUREMENTS = Path(__file__).resolve().parents[2] / "docs" / "measurements"

SMALL = ["--layers", "1", "--seq-len", "32", "--rows", "2", "--steps", "2", "--rounds", "2"]


def small(*argv: str) -> Work:
    return settled(*parser().parse_known_args([*SMALL, "--features", "", *argv]))[0]


@pytest.fixture(autouse=True)
def left_as_before() -> Iterator[None]:
    """The benchmark adds flavors and sends the log to a file. One thread: several would wait for a busy machine's."""
    flavors, handlers, threads = dict(FLAVORS), list(logger.handlers), torch.get_num_threads()
    torch.set_num_threads(1)
    level, propagate = logger.level, logger.propagate
    yield
    torch.set_num_threads(threads)
    FLAVORS.clear()
    FLAVORS.update(flavors)
    logger.handlers, logger.propagate = handlers, propagate
    logger.setLevel(level)


# ---- the loops


def losses_of_both(work: Work) -> list[tuple[float, float]]:
    """Return the losses of three steps: (trainer, bare loop)."""
    bare = Bare(work)
    steps = train(work.config, work.device, 3, lambda step: None)
    return [(step["loss"], bare.step().item()) for step in steps]


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_both_loops_do_the_same_work(compute: str) -> None:
    work = small("--metrics.log_freq=1", "--training.mixed_precision_param", compute)
    for trainer, bare in losses_of_both(work):
        assert trainer == pytest.approx(bare, rel=1e-6 if compute == "float32" else 1e-4)


@pytest.mark.parametrize("wrong", ["optimizer", "batches"])
def test_other_work_would_be_seen(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    work = small("--metrics.log_freq=1")
    bare = Bare(work)
    if wrong == "optimizer":
        bare.optimizer.param_groups[0]["lr"] *= 1.1
    else:
        next(bare.batches)
    steps = train(work.config, work.device, 3, lambda step: None)
    assert any(step["loss"] != pytest.approx(bare.step().item(), rel=1e-6) for step in steps)


def test_a_bare_step_in_bfloat16_updates_float32_weights() -> None:
    bare = Bare(small("--training.mixed_precision_param", "bfloat16"))
    before = [parameter.detach().clone() for parameter in bare.model.parameters()]
    bare.step()
    assert {p.dtype for p in bare.working.parameters()} == {torch.bfloat16}
    assert bare.working.frequencies.dtype == torch.float64
    for now, then in zip(bare.model.parameters(), before, strict=True):
        assert now.dtype == now.grad.dtype == torch.float32
        assert not torch.equal(now, then)


def test_a_window_as_long_as_the_row_hides_nothing() -> None:
    args, overrides = parser().parse_known_args([*SMALL, "--features", "kernel=cpu_flash"])
    work, variants = settled(args, overrides)
    plain, planned = (train(config, work.device, 1, lambda step: None)[0] for config in variants.values())
    assert planned["loss"] == pytest.approx(plain["loss"], rel=1e-6)


# ---- rounds


class FakeBare:
    def __init__(self) -> None:
        self.steps = 0

    def step(self) -> None:
        self.steps += 1


def test_blocks_alternate_and_the_warm_up_does_not_count() -> None:
    work, bare = small(), FakeBare()
    rounds = Rounds(work, bare)
    done = []
    for step in range(1, rounds.total + 1):
        rounds.pace(step)
        done.append(bare.steps)
    # three to warm up, then two of the trainer after every two bare ones
    assert done == [0, 0, 0, 2, 2, 4, 4, 6]
    assert (len(rounds.bare_blocks), len(rounds.blocks)) == (3, 2)


def test_ratios_are_medians_to_the_bare_blocks_around() -> None:
    bare = [Block(1.0, 2.0), Block(3.0, 2.0), Block(1.0, 2.0), Block(1.0, 2.0)]
    row = compared(bare, [Block(2.0, 1.0), Block(4.0, 6.0), Block(1.5, 4.0)])
    assert (row["ratio"], row["ratio_range"], row["ratio_of_fastest"]) == (1.5, [1.0, 2.0], 1.5)
    assert row["cpu_ratio"] == 2.0


def test_speed_is_of_a_step_of_the_median_block(monkeypatch: pytest.MonkeyPatch) -> None:
    work = small()
    full, causal = work.shape().flops_per_token(32)
    row = speed(work, [Block(1.0, 1.0), Block(4.0, 1.0), Block(9.0, 1.0)])
    assert (row["ms_per_step"], row["tokens_per_second"]) == (2000.0, 32.0)  # 2 rows of 32 tokens in 2 s
    assert row["tflops"] == round(32 * full / 1e12, 4)
    assert row["mfu"] is None
    monkeypatch.setattr(benchmark, "peak_flops", lambda device, dtype: 64 * full)
    row = speed(work, [Block(4.0, 1.0)])
    assert (row["mfu"], row["mfu_causal"]) == (0.5, round(causal / full / 2, 4))


def test_an_interrupted_trainer_gives_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "train", lambda *_: [{"loss": 1.0}])
    with pytest.raises(KeyboardInterrupt):
        benchmark.against(small(), FakeBare(), small().config)


def test_out_of_memory_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(benchmark, "train", fail)
    assert "out of memory" in benchmark.against(small(), FakeBare(), small().config)["error"]


# ---- memory


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the kernel keeps no resettable peak")
def test_memory_is_that_of_weights_state_and_logits() -> None:
    work = small("--seq-len", "1024", "--rows", "1")
    shape = work.shape()
    least = 4 * (3 * shape.n_params() + 2 * 1024 * shape.vocab_size)  # weights, two moments, logits, their gradient
    assert least < memory_of(work, None)["memory_gib"] * 2**30 < 3 * least


def test_a_peak_is_what_was_held_at_once_since_the_reset() -> None:
    memory = PeakMemory(torch.device("cpu"))
    _ = torch.ones(2**26)  # 256 MiB
    del _
    memory.reset()
    _ = torch.ones(2**24)
    peak = memory.read()
    assert peak is None if not Path("/proc/self/clear_refs").exists() else 0.06 < peak < 0.2


def test_a_child_that_runs_out_of_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[object] = []

    def fail(work: Work) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(loops, "Bare", fail)
    loops._measure_memory(type("Pipe", (), {"send": staticmethod(sent.append)}), 1, small(), None)
    assert sent == [(True, {"memory_error": "out of memory"})]


# ---- command line


def test_the_result_names_its_command_and_holds_every_variant(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "result.json"
    argv = [*SMALL, "--features", "selective+kernel=cpu_flash", "--no-memory", "--json", str(file)]
    assert main([*argv, "--training.seed", "3"]) == 0
    result = json.loads(file.read_text())
    assert result["command"] == " ".join(["python scripts/benchmarks/train.py", *argv, "--training.seed 3"])
    assert (result["layers"], result["seq_len"], result["rows"], result["vocab_size"]) == (1, 32, 2, 4352)
    assert (result["device"], result["threads"]) == ("cpu", torch.get_num_threads())
    assert torch.__version__.startswith(result["torch"])  # the package's version may lack the build's name
    bare, *variants = result["results"]
    assert [row["variant"] for row in variants] == ["trainer", "selective+kernel=cpu_flash"]
    for row in variants:
        assert row["first_loss"] == pytest.approx(bare["first_loss"], rel=1e-6)
        assert 0 < row["ratio_range"][0] <= row["ratio"] <= row["ratio_range"][1]
        assert row["tokens_per_second"] > 0
        assert row["cpu_ratio"] > 0
    assert len(capsys.readouterr().out.splitlines()) == 4  # no log lines among them


def test_by_default_every_feature_that_a_cpu_has(monkeypatch: pytest.MonkeyPatch) -> None:
    _, variants = settled(*parser().parse_known_args(SMALL))
    assert list(variants) == ["trainer", "compile", "selective", "full", "memory_budget", "kernel=cpu_flash"]
    assert variants["trainer"] == replace(variants["compile"], compile=variants["trainer"].compile)
    assert variants["compile"].compile.enable


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ("--features telepathy", "telepathy"),
        ("--features compile+kernel=cpu_flush", "'kernel=cpu_flash'"),
        ("--features float8", "compute capability"),
        ("--features kernel=cudnn", "cudnn"),
        ("--flavor 9B --layers 2", "9B"),
        ("--layers 0", "--layers 0"),
        ("--rounds 0", "--rounds 0"),
        ("--device telephone", "telephone"),
        ("--json /nowhere/rows.json", "/nowhere"),
        ("--training.sed 1", "training.seed"),
        ("--training.global_batch_size 16", "training.global_batch_size"),
        ("--compile.enable", "--features"),
        ("--model.sliding_window 8", "sliding window"),
    ],
)
def test_bad_arguments_are_one_sentence(argv: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(argv.split())
    except SystemExit as stopped:  # argparse's own
        code = stopped.code
    assert code == 2
    error = capsys.readouterr().err
    assert named in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("file", sorted(path.name for path in MEASUREMENTS.glob("*.json")))
def test_every_file_of_numbers_says_where_it_comes_from(file: str) -> None:
    content = json.loads((MEASUREMENTS / file).read_text())
    made_with = content.get("made_with", content)
    assert content["command"].startswith(("python ", "pytest "))
    assert {"torch", "python", "device"} <= made_with.keys()
    commits = {content["commit"]} if "commit" in content else set(Record().commits())
    assert commits
    assert all(re.fullmatch("[0-9a-f]{7,40}", commit) for commit in commits), "made with uncommitted changes"
