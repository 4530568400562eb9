"""Laws of the planner's traces: blocks of the allocator, layers, operations, micro-batches."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lct_planner.device import _is_composite
from lct_planner.profile import Profile, deeper
from lct_planner.profiling import _Allocator, added_up
from lct_planner.tracing import trace
from lct_planner.worker import _traceable, shallow_depths
from tests.unit.planner_profile import profile_of
from trainer.config.loader import parse_command_line
from trainer.families.layer_kinds import LayerKind
from trainer.job import resolve
from trainer.parallel import ownership

pytestmark = pytest.mark.about("lct_planner")

_MIB = 1 << 20


def job_of(*arguments: str, ranks: int = 1, layers: int = 4):
    job = resolve(
        parse_command_line(["--training.seq_len=64", "--training.global_batch_size=-1", *arguments]).config,
        ranks,
        "cpu",
    )
    return replace(job, model=replace(job.model, n_layers=layers))


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 64 * _MIB)), max_size=200))
@settings(max_examples=40, deadline=None)
def test_blocks_of_the_allocator_never_overlap(changes: list[tuple[int, int]]) -> None:
    """Reserved memory is at least the memory alive, rounded."""
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
    profiles = {}
    for layers in (3, 6, 9):
        shallow = replace(job, model=replace(job.model, n_layers=layers))
        profile = added_up(trace(shallow, 0, None), 1, range(layers))
        profiles[layers] = profile
    line, whole = deeper(profiles[3], profiles[6], 9), profiles[9]
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


def test_an_operator_with_a_kernel_is_traced_as_one_though_it_could_be_made_of_others() -> None:
    with_kernel, without = torch.ops.aten.silu_backward.default, torch.ops.aten.linear.default
    assert with_kernel._can_decompose()
    assert without._can_decompose()
    assert not _is_composite(with_kernel)
    assert _is_composite(without)


def test_flops_are_those_of_the_model(monkeypatch, tmp_path: Path) -> None:
    """Products, and causal attention, of forward and backward."""
    monkeypatch.chdir(tmp_path)
    job = job_of()
    work = added_up(trace(job, 0, None), 1, range(4)).work
    products = sum(w.get("products", 0) for w in work.values())
    attention = sum(x for w in work.values() for name, x in w.items() if name.startswith("attention_"))
    assert {x.split()[1] for w in work.values() for x in w if x.startswith("attention_")} == {"cpu_flash"}
    tokens = job.sequences_per_step * 64
    whole, _ = job.model.flops_per_token(64)
    attention_flops = 12 * job.model.n_layers * job.model.n_heads * job.model.head_dim * 64
    assert products == tokens * (whole - attention_flops)
    assert attention == pytest.approx(
        tokens * attention_flops / 2 * 7 / 6, rel=1e-6
    )  # the backward computes scores again


@pytest.mark.parametrize("size", [1, 2])
def test_a_pipeline_is_traced_with_as_many_micro_batches_as_are_alive(size: int, tmp_path: Path) -> None:
    p = "--parallelism.pipeline_parallel_"
    sizes = ("--training.local_batch_size=8", f"{p}microbatch_size={size}")
    traced = _traceable(job_of(f"{p}degree=2", f"{p}schedule=1F1B", *sizes, ranks=2), str(tmp_path))
    assert (traced.pipeline.micro_batches, traced.config.training.local_batch_size) == (2, 2 * size)


def test_more_micro_batches_repeat_forward_and_backward_alone() -> None:
    message = {"calls": 2.0, "bytes": 8.0, "ranks": 4, "span": 4}
    messages = {f"backward {mesh} allreduce_": message for mesh in ("fsdp", "dp_replicate")}
    work = {"forward": {"products": 3.0}, "optimizer": {"optimizer": 5.0}}
    repeated = replace(profile_of(), work=work, messages=messages).repeated(4)
    assert repeated.work == {"forward": {"products": 12.0}, "optimizer": {"optimizer": 5.0}}
    assert repeated.messages["backward fsdp allreduce_"] == {"calls": 8.0, "bytes": 32.0, "ranks": 4, "span": 4}
    assert repeated.messages["backward dp_replicate allreduce_"] == message
