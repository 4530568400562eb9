"""Laws of the planner: its arithmetic, its records of devices, its search, and what the command prints."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.commands import estimate as command
from trainer.commands import train
from trainer.commands.main import main as lct
from trainer.commands.start import parse
from trainer.components import metrics
from trainer.config.errors import ConfigError
from trainer.config.loader import parse_command_line
from trainer.distributed import ownership
from trainer.families.layer_kinds import LayerKind
from trainer.job import resolve
from trainer.planner.profile import Profile, deeper
from trainer.planner.profiling import _Allocator, added_up
from trainer.planner.search import longest_sequence, suggestions
from trainer.planner.timing import RECORDS, Device, device, step_time
from trainer.planner.tracing import trace
from trainer.planner.worker import _traceable, shallow_depths
from trainer.runtime.devices import Machine

_MIB = 1 << 20


def job_of(*arguments: str, ranks: int = 1, layers: int = 4):
    job = resolve(
        parse_command_line(["--training.seq_len=64", "--training.global_batch_size=-1", *arguments]).config,
        ranks,
        "cpu",
    )
    return replace(job, model=replace(job.model, n_layers=layers))


# ---- memory


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 64 * _MIB)), max_size=200))
@settings(max_examples=40, deadline=None)
def test_blocks_of_the_allocator_never_overlap(changes: list[tuple[int, int]]) -> None:
    """What is reserved is at least what is alive, rounded."""
    allocator, live, most = _Allocator(), {}, 0
    for name, size in changes:
        allocator.resize(name, size)
        live[name] = -(-size // 512) * 512
        most = max(most, sum(live.values()))
    for pool in ("small", "large"):
        spans = sorted((begin, begin + size) for of, begin, size in allocator._of.values() if of == pool)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
    assert allocator.reserved >= most


def test_freed_neighbours_are_one_block_again() -> None:
    allocator = _Allocator()
    for name in range(4):
        allocator.resize(name, 8 * _MIB)
    for order in ((1, 2), (2, 1)):
        for name in order:
            allocator.resize(name, 0)
        allocator.resize("as large as both", 16 * _MIB)
        assert allocator.reserved == 32 * _MIB
        allocator.resize("as large as both", 0)
        for name in order:
            allocator.resize(name, 8 * _MIB)
    for name in (1, 2):
        allocator.resize(name, 0)
    allocator.resize("as large as both", 16 * _MIB)
    allocator.resize("more", 2 * _MIB)
    assert allocator.reserved == 34 * _MIB


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--activation_checkpoint.mode=full"],
        ["--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=2"],
        ["--activation_checkpoint.mode=full", "--activation_checkpoint.group=2"],
        ["--model.name=glm4_moe", "--activation_checkpoint.mode=full"],
    ],
)
def test_a_deep_model_is_a_straight_line_over_shallow_ones(arguments: list[str], monkeypatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    job = job_of(*arguments, layers=9)
    if "glm4_moe" in job.config.model.name:  # the first three layers are dense
        job = replace(job, model=replace(job.model, layers=tuple(LayerKind(experts=i > 2) for i in range(9))))
    depths = shallow_depths(job)
    assert depths is not None
    assert max(depths) < 9

    def of(layers: int) -> Profile:
        shallow = replace(job, model=replace(job.model, n_layers=layers))
        return added_up(trace(shallow, 0, None), 1, range(layers))

    whole, line = of(9), deeper(*map(of, depths), 9)
    assert line.peak == pytest.approx(whole.peak, rel=0.002)
    assert line.peak_place == whole.peak_place
    for place, purposes in ((place, x) for place, x in whole.live.items() if "last layer" in place):
        assert sum(line.live[place].values()) == pytest.approx(sum(purposes.values()), rel=0.03), place
    assert sum(w.get("products", 0) for w in line.work.values()) == sum(
        w.get("products", 0) for w in whole.work.values()
    )


def test_what_muon_sends_is_a_straight_line_where_ranks_own_alike(monkeypatch, tmp_path: Path) -> None:
    """All matrices of nine layers over three ranks, in calls and bytes, from three and six layers."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ownership, "AT_ONCE", 1)  # rounds of one matrix a rank
    job = job_of("--optimizer.name=Muon", ranks=3, layers=9)
    found = {}
    for layers in (3, 6, 9):
        shallow = replace(job, model=replace(job.model, n_layers=layers))
        profile = added_up(trace(shallow, 0, None), 1, range(layers))
        found[layers] = profile
    line, whole = deeper(found[3], found[6], 9), found[9]
    (name,) = {name for name in whole.messages if name.startswith("optimizer")}
    assert line.messages[name] == pytest.approx(whole.messages[name])
    products = whole.work["optimizer"]["products"]
    assert products > 0
    assert line.work["optimizer"]["products"] == pytest.approx(products)
    args = job.model
    matrices = sum(rows * columns for key, (rows, columns) in args.linear_shapes().items() if key != "output")
    there, back = 2 / 3, 1 - 1 / 3
    assert whole.messages[name]["bytes"] == pytest.approx(4 * matrices * (there + back) / 3, rel=0.2)


def test_depths_have_as_many_layers_of_each_kind() -> None:
    assert shallow_depths(job_of(layers=5)) is None
    assert shallow_depths(job_of(layers=32)) == (4, 5)
    every_third = ("--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=3")
    assert shallow_depths(job_of(*every_third, layers=32)) == (5, 8)
    groups = ("--activation_checkpoint.mode=full", "--activation_checkpoint.group=4")
    assert shallow_depths(job_of(*groups, layers=32)) == (4, 8)
    assert shallow_depths(job_of("--model.name=gemma3", layers=32)) == (8, 14)  # six kinds in turn
    assert shallow_depths(job_of("--optimizer.name=Muon", ranks=8, layers=32)) == (8, 16)  # as many matrices a rank
    assert shallow_depths(job_of("--optimizer.name=Muon", ranks=32, layers=32)) == (4, 5)
    job = job_of("--model.name=glm4_moe", layers=32)
    dense_first = tuple(LayerKind(experts=layer > 2) for layer in range(32))
    assert shallow_depths(replace(job, model=replace(job.model, layers=dense_first))) == (7, 8)


def test_flops_are_those_of_the_model(monkeypatch, tmp_path: Path) -> None:
    """Products, and causal attention, of forward and backward."""
    monkeypatch.chdir(tmp_path)
    job = job_of()
    work = added_up(trace(job, 0, None), 1, range(4)).work
    products = sum(w.get("products", 0) for w in work.values())
    attention = sum(w.get("attention_forward", 0) + w.get("attention_backward", 0) for w in work.values())
    tokens = job.sequences_per_step * 64
    whole, _ = job.model.flops_per_token(64)
    of_attention = 12 * job.model.n_layers * job.model.n_heads * job.model.head_dim * 64
    assert products == tokens * (whole - of_attention)
    assert attention == pytest.approx(tokens * of_attention / 2 * 7 / 6, rel=1e-6)  # the backward computes scores again


@pytest.mark.parametrize("more", [(), ("--parallelism.pipeline_parallel_microbatches=8",)])
def test_a_pipeline_is_traced_with_as_many_micro_batches_as_are_alive(more: Sequence[str], tmp_path: Path) -> None:
    p = "--parallelism.pipeline_parallel_"
    job = job_of(f"{p}degree=2", f"{p}schedule=1F1B", "--training.local_batch_size=8", *more, ranks=2)
    traced = _traceable(job, str(tmp_path))
    assert (traced.pipeline.micro_batches, traced.config.training.local_batch_size) == (2, 2)


def test_more_micro_batches_repeat_forward_and_backward_alone() -> None:
    message = {"calls": 2.0, "bytes": 8.0, "ranks": 4, "span": 4}
    messages = {f"backward {mesh} allreduce_": message for mesh in ("fsdp", "dp_replicate")}
    work = {"forward": {"products": 3.0}, "optimizer": {"optimizer": 5.0}}
    more = replace(profile_of(), work=work, messages=messages).repeated(4)
    assert more.work == {"forward": {"products": 12.0}, "optimizer": {"optimizer": 5.0}}
    assert more.messages["backward fsdp allreduce_"] == {"calls": 8.0, "bytes": 32.0, "ranks": 4, "span": 4}
    assert more.messages["backward dp_replicate allreduce_"] == message


# ---- time

_DEVICE = Device("one", 1e12, 1e11, 1e10, 1e9, 80e9, launch=1e-6, efficiency={"products": 0.5})


def profile_of(**work: float) -> Profile:
    return Profile(1, {"forward/output": {"forward": 1.0}}, {"forward": work}, {}, {"fragments": 0.0, "host": 0.0})


def test_a_part_takes_as_long_as_its_kernels_or_its_launches() -> None:
    assert step_time(profile_of(products=1e12), _DEVICE).seconds == 2.0
    assert step_time(profile_of(products=1e12, moved=1e11), _DEVICE).seconds == 3.0
    assert step_time(profile_of(products=1e6, launches=1e6), _DEVICE).seconds == pytest.approx(1.0)
    cpu = replace(_DEVICE, type="cpu")
    assert step_time(profile_of(products=5e11, launches=1e6), cpu).seconds == pytest.approx(2.0)
    assert step_time(profile_of(copied=25e9 * 3, products=1e12), _DEVICE).seconds == 3.0


def test_messages_of_fsdp_hide_and_exchanges_of_heads_wait() -> None:
    message = {"calls": 0.0, "bytes": 3e10, "ranks": 8, "span": 8}
    for name, seconds in (("fsdp _allgather_base_", 3.0), ("cp send", 3.0), ("cp alltoall_base_", 5.0)):
        profile = replace(profile_of(products=1e12), messages={f"forward {name}": message})
        assert step_time(profile, _DEVICE).seconds == seconds, name
    over_nodes = replace(profile_of(products=1e12), messages={"forward fsdp _allgather_base_": message | {"span": 16}})
    assert step_time(over_nodes, _DEVICE).seconds == 30.0
    assert "messages" in step_time(over_nodes, _DEVICE).bottleneck


def test_an_update_during_the_backward_counts_where_it_takes_longer() -> None:
    for seconds, rest in ((3.0, 1.0), (1.0, 0.0)):
        work = {"backward": {"products": 1e12}, "optimizer": {"host": 40e9 * seconds}}
        profile = replace(profile_of(), work=work)
        assert step_time(profile, _DEVICE).seconds == 2.0 + seconds
        assert step_time(profile, _DEVICE, early=True).seconds == 2.0 + rest


def test_stages_of_a_pipeline_wait() -> None:
    assert step_time(profile_of(products=1e12), _DEVICE, bubble=0.5).seconds == 3.0


def test_records_are_whole_and_wrong_ones_are_one_sentence(tmp_path: Path) -> None:
    for name in ("h100", "h200", "b200", "a100"):
        assert device(name).efficiency.keys() >= {"products", "memory", "link", "network"}
    with pytest.raises(ConfigError, match=r"--gpu 'h10' is none of h100.*did you mean 'h100'"):
        device("h10")
    path = tmp_path / "mine.toml"
    path.write_text('[mine]\nname = "x"\nflops = 1e12\nfloops = 1\n')
    with pytest.raises(ConfigError, match="'floops' is no key of a record"):
        device(str(path))
    path.write_text('[mine]\nname = "x"\nflops = 1e12\n')
    with pytest.raises(ConfigError, match="bandwidth"):
        device(str(path))
    assert RECORDS.is_file()


# ---- search


def fake(total, speed: float = 1.0, host: float = 0.0):
    """An estimate of so many bytes."""
    return SimpleNamespace(
        total=total,
        fits=total <= 80e9,
        device=SimpleNamespace(memory=80e9),
        tokens_per_second=speed,
        profile=SimpleNamespace(totals={"host": host}),
    )


SIZES = (
    lambda n: 20e9 + 60e3 * n,
    lambda n: 10e9 + 40e3 * n + n**2 / 1e2,
    lambda n: 79e9 + 1e6 * n,
    lambda n: 90e9,
    lambda n: 20e9 + 1.2e6 * n,  # a unit is more than the search resolves
    lambda n: max(40e9, 30e3 * n) + 1e9 * (n > 32768),
    lambda n: 40e9 if n <= 2048 else 90e9,
)


@pytest.mark.parametrize("size", SIZES)
def test_the_longest_sequence_fits_and_a_longer_one_does_not(size) -> None:
    calls: list[int] = []

    def estimate(arguments: Sequence[str]):
        length = int(arguments[-1].rpartition("=")[2])
        calls.append(length)
        found = fake(size(length))
        found.job = SimpleNamespace(positions=length)
        return found

    longest, beyond = longest_sequence(estimate, [], 8192, 1024)
    most = max((n for n in range(1024, 1 << 22, 1024) if size(n) <= 80e9), default=0)
    if most == 0:
        assert longest is None
    else:
        assert 0.97 * most <= longest.job.positions <= most
        assert longest.fits
    assert not beyond.fits
    assert len(calls) <= 14
    assert max(calls) <= 16 * max(most, 8192)


def degrees_of(arguments: Sequence[str]) -> tuple[int, int, str]:
    keys = dict(text[2:].split("=", 1) for text in arguments)
    cp, tp = (int(keys[f"parallelism.{name}_parallel_degree"]) for name in ("context", "tensor"))
    return cp, tp, keys.get("parallelism.context_parallel_method", "")


def test_suggestions_are_what_fits_the_fastest_first() -> None:
    asked: list[tuple[int, int, str]] = []

    def estimate(arguments: Sequence[str]):
        cp, tp, method = degrees_of(arguments)
        asked.append((cp, tp, method))
        assert 8 % (cp * tp) == 0
        if tp == 8:
            raise ConfigError("heads")
        offloads = "offload" in " ".join(arguments)
        needed = 400e9 / cp / tp * (0.5 if offloads else 1.0)
        speed = 1000 / cp**0.1 / tp * (0.99 if method == "ring" else 1.0)
        return fake(needed, speed, host=1e12 if offloads and method == "ring" else 0.0)

    found = suggestions(estimate, [], 8, host_memory=100e9)
    chosen = [(*degrees_of(choice.settings), "offload" in " ".join(choice.settings)) for choice in found]
    # Half of the ranks with offloading fit, and are faster; the ring has no room on the host.
    assert chosen[0] == (4, 1, "all_to_all", True)
    assert (8, 1, "ring", False) in chosen
    assert not any(method == "ring" and offloads for *_, method, offloads in chosen)
    assert not any(tp == 8 for _, tp, *_ in chosen)
    assert (1, 1, "") not in asked, "fewer ranks than those that do not fit were tried"
    assert chosen.index((8, 1, "all_to_all", False)) < chosen.index((8, 1, "ring", False))  # as fast, fewer kernels


# ---- the command


def cpu_record(tmp_path: Path, memory: float = 1e10) -> str:
    path = tmp_path / "cpu.toml"
    peaks = f"flops = 1e11\nbandwidth = 1e10\nlink = 1e9\nnetwork = 1e9\nmemory = {memory}\n"
    path.write_text(f'[cpu]\nname = "a CPU"\ntype = "cpu"\n{peaks}')
    return str(path)


def test_the_command_prints_memory_traffic_and_time(tmp_path: Path, capfd: pytest.CaptureFixture, monkeypatch) -> None:
    arguments = ["debug_model", "--gpu", cpu_record(tmp_path), "--world-size", "2"]
    assert command.main([*arguments, "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["fits"]
    assert found["ranks"] == 2
    assert found["total"] >= found["reserved"] >= found["allocated"]
    assert math.isclose(sum(found["memory"].values()), found["allocated"], rel_tol=1e-9)
    assert any("fsdp" in name for name in found["messages"])
    assert command.main([*arguments, "--training.local_batch_size", "1", "--picture", str(tmp_path / "step.svg")]) == 0
    printed = capfd.readouterr().out
    for word in ("memory", "it fits", "traffic", "fsdp", "time", "tokens a second"):
        assert word in printed
    assert (tmp_path / "step.svg").stat().st_size > 1000


def test_other_answers_as_json_print_json_alone(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    job = [
        "debug_model",
        "--gpu",
        cpu_record(tmp_path, memory=2e8),
        "--world-size",
        "1",
        "--training.local_batch_size=1",
    ]
    assert command.main([*job, "--training.global_batch_size=-1", "--max-seq-len", "--json"]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["fits"]
    assert "longest" in err
    assert "beyond" in err


def test_a_wrong_setting_is_one_sentence(capfd: pytest.CaptureFixture, tmp_path: Path) -> None:
    for arguments, words in (
        (["debug_model", "--gpu", "h10"], "is none of h100"),
        (["debug_model", "--gpu", "missing.toml"], "--gpu 'missing.toml' is none of h100"),
        (["debug_model", "--world-size", "x"], "--world-size"),
        (["debug_model", "--gpu", cpu_record(tmp_path), "--training.seq_len", "0"], "training.seq_len"),
        (
            ["debug_model", "--gpu", cpu_record(tmp_path), "--parallelism.tensor_parallel_degree", "3"],
            "tensor_parallel_degree = 3",
        ),
    ):
        assert lct(["estimate", *arguments]) == 2
        error = capfd.readouterr().err
        assert error.startswith("error: ")
        assert words in error


def test_the_times_of_a_gpu_are_not_measured_as_those_of_a_cpu(
    tmp_path: Path, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "this_machine", lambda: Machine(1, 80 << 30, 1 << 34))
    measured: list[int] = []
    monkeypatch.setattr(command, "calibrate", lambda *_a, memory, **_k: measured.append(memory) or "")
    assert lct(["estimate", "debug_model", "--calibrate", str(tmp_path / "gpu.toml")]) == 2
    assert "--calibrate measures a CPU" in capfd.readouterr().err
    assert command.main(["debug_model", "--calibrate", str(tmp_path / "cpu.toml"), "--job.device", "cpu"]) == 0
    assert measured == [1 << 34]


# ---- a run beside its estimate


def test_a_run_on_gpus_starts_an_estimate_of_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(train.subprocess, "Popen", lambda arguments, **_: started.append(arguments))
    monkeypatch.delenv("NNODES", raising=False)
    for machine, expected in ((Machine(0, None, 1 << 34), 0), (Machine(8, 80 << 30, 1 << 34), 1)):
        monkeypatch.setattr(train, "this_machine", lambda machine=machine: machine)
        start = parse(["debug_model", "--job.dump_folder", str(tmp_path / "run")])
        train._start_estimate(start, parse_command_line(start.arguments).config)
        assert len(started) == expected
    assert started[0][3:] == ["estimate", *start.arguments, "--world-size", "8", "--json"]
    options, arguments = command._options(started[0][4:])
    assert options.world_size == "8"
    assert parse_command_line(arguments).config.job.dump_folder == str(tmp_path / "run")


def test_metrics_have_the_measured_and_the_predicted_peak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(metrics.logger, "info", said.append)
    run = SimpleNamespace(_predicted=None, _estimate=tmp_path / "estimate.json", device=torch.device("cuda"))
    beside = metrics.MetricsLogger._beside_estimate
    assert beside(run, 3.0) == {}
    run._estimate.write_text('{"alloc')  # it is being written
    assert beside(run, 3.0) == {}
    run._estimate.write_text(json.dumps({"allocated": 2.5 * 2**30}))
    assert beside(run, 3.0) == {"memory_predicted_gib": 2.5}
    assert beside(run, 3.1) == {"memory_predicted_gib": 2.5}
    assert said == ["memory: 3.0 GiB allocated at the peak, 2.5 GiB predicted"]
