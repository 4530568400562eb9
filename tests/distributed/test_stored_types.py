"""Laws of moments and weights in bfloat16: every layout rounds alike, and a run resumes as if not interrupted."""

import hashlib
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from longshard.sharding.tensors import local_part
from tests.distributed import test_late_read, test_skipped_steps
from tests.distributed.checkpoint_cases import load_step_save, merged, same, whole_state
from tests.distributed.harness import assert_parity, run_layout, trainer_of
from tests.distributed.pool import WorkerPool
from tests.distributed.test_parity import LAYOUTS, degrees, reference
from tests.slow import slow
from trainer.components.optimizer import ensure_state

MOMENTS, WEIGHTS = "--optimizer.state_dtype=bfloat16", "--training.dtype=bfloat16"
EXPERTS = ["--model.name=qwen3_moe"]
OTHERS = {
    "fsdp3": (3, degrees(dp_shard=3)),  # uneven shards, some of them empty
    "ep2": (2, [*degrees(dp_shard=2), "--parallelism.expert_parallel_degree=2"]),
    "fsdp4+ep2": (4, [*degrees(dp_shard=4), "--parallelism.expert_parallel_degree=2"]),
    "one, offloaded": (1, ["--training.enable_cpu_offload"]),
}
ONE_ROW = ["--training.global_batch_size=-1", "--training.local_batch_size=2"]


def drawn(name: str, like: torch.Tensor) -> torch.Tensor:
    """Numbers that the name of a tensor fixes, on any layout."""
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "big")
    x = torch.randn(like.shape, generator=torch.Generator().manual_seed(seed)).to(like.dtype)
    return (
        distribute_tensor(x, like.device_mesh, like.placements, src_data_rank=None) if isinstance(like, DTensor) else x
    )


def rounding_case(arguments: list[str], updates: int = 2) -> dict[str, torch.Tensor]:
    """Update with the same gradients on any layout: the weights and moments, whole, and the steps."""
    with trainer_of([*ONE_ROW, *arguments]) as trainer:
        ensure_state(trainer.optimizer)
        for update in range(updates):
            for part in trainer.model_parts:
                for name, parameter in part.named_parameters():
                    parameter.grad = drawn(f"{name} {update}", parameter.detach())
            trainer.optimizer.step()
        return {name: x for name, x in whole_state(trainer).items() if isinstance(x, torch.Tensor)}


@lru_cache
def single_process_state(pool: WorkerPool, *arguments: str) -> dict[str, torch.Tensor]:
    return merged([{"state": pool.run(1, rounding_case, list(arguments))[0]}], "state")


@pytest.mark.parametrize(
    ("layout", "stored"),
    [
        ("fsdp2+tp2", MOMENTS),
        *slow(
            *(
                (layout, stored)
                for layout in ("fsdp2", "tp2", "hsdp2x2", "pp2", "cp2")
                for stored in (MOMENTS, WEIGHTS)
            ),
            ("fsdp2+tp2", WEIGHTS),
            *((layout, stored) for layout in OTHERS for stored in (MOMENTS, WEIGHTS)),
        ),
    ],
)
def test_every_layout_rounds_alike(pool: WorkerPool, layout: str, stored: str) -> None:
    """Equal gradients give equal weights and moments, in every bit."""
    world_size, arguments = LAYOUTS.get(layout) or OTHERS[layout]
    model = EXPERTS if "ep2" in layout else []
    settings = [stored, "--optimizer.implementation=for-loop", *model]
    results = pool.run(world_size, rounding_case, [*settings, *arguments])
    got, wanted = merged([{"state": result} for result in results], "state"), single_process_state(pool, *settings)
    assert got.keys() == wanted.keys()
    assert [name for name in wanted if not same(got[name], wanted[name])] == []
    rounded = [name for name in wanted if name.endswith("exp_avg_sq")]
    assert rounded
    assert {wanted[name].dtype for name in rounded} == {torch.bfloat16}


def test_negative_control_of_rounding(pool: WorkerPool) -> None:
    """The comparison sees values that are rounded to nearest."""
    settings = (MOMENTS, "--optimizer.implementation=for-loop")
    wanted = single_process_state(pool, *settings)
    nearest = single_process_state(pool, *settings, "--optimizer.rounding=nearest")
    for moment in ("exp_avg", "exp_avg_sq"):
        other = [name for name in wanted if name.endswith(moment) and not same(wanted[name], nearest[name])]
        assert len(other) == len([name for name in wanted if name.endswith(moment)])


@pytest.mark.parametrize("layout", [*slow("fsdp2", "tp2", "hsdp2x2", "fsdp2+cp2+tp2", "fsdp2+tp2+pp2")])
def test_losses_and_weights_are_those_of_one_process(pool: WorkerPool, layout: str) -> None:
    """In float64 with moments in bfloat16: sums over ranks differ by 1e-16, which changes no rounding."""
    world_size, arguments = LAYOUTS[layout]
    settings = ["--training.dtype=float64", MOMENTS]
    got = pool.run(world_size, run_layout, [*settings, *arguments])[0]
    assert_parity(got, reference(pool, *settings), 1e-10)
    with pytest.raises(AssertionError, match="weight"):
        assert_parity(got, reference(pool, "--training.dtype=float64"), 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["foreach", "fused"])
@pytest.mark.parametrize("stored", [MOMENTS, WEIGHTS])
def test_a_resumed_run_is_the_run_in_every_bit(
    pool: WorkerPool, tmp_path: Path, stored: str, implementation: str
) -> None:
    settings = [stored, f"--optimizer.implementation={implementation}", "--training.deterministic"]
    ranks, arguments = LAYOUTS["fsdp2"]
    wanted = merged(pool.run(ranks, load_step_save, str(tmp_path / "a"), [*settings, *arguments], 4), "after")
    for _ in range(2):
        got = merged(pool.run(ranks, load_step_save, str(tmp_path / "b"), [*settings, *arguments], 2), "after")
    assert [name for name in wanted if not same(got[name], wanted[name])] == []


def changes(arguments: list[str]) -> dict[str, torch.Tensor]:
    """By how much two updates change weights of 1/4 to 1 by size, in float64."""
    with trainer_of([*ONE_ROW, *arguments]) as trainer:
        ensure_state(trainer.optimizer)
        parameters = dict(trainer.model_parts[0].named_parameters())
        before = {}
        for name, parameter in parameters.items():
            size = drawn(name, parameter.detach()).clamp(-1, 1)
            local_part(parameter.detach()).copy_(local_part(size.sign() * (0.25 + 0.75 * size.abs())))
            before[name] = local_part(parameter.detach()).double().clone()
        for update in range(2):
            for name, parameter in parameters.items():
                parameter.grad = drawn(f"{name} {update}", parameter.detach())
            trainer.optimizer.step()
        return {name: local_part(p.detach()).double() - before[name] for name, p in parameters.items()}


DTYPES = [(weights, state) for weights in ("float64", "float32", "bfloat16") for state in ("float32", "bfloat16")]


@pytest.mark.parametrize("implementation", ["fused", *slow("foreach", "for-loop")])
@pytest.mark.parametrize("name", ["AdamW", "Adam", "Muon"])
@pytest.mark.parametrize(("weights", "state"), DTYPES)
def test_each_optimizer_takes_each_pair_of_types(
    pool: WorkerPool, name: str, weights: str, state: str, implementation: str
) -> None:
    """Two updates equal the updates in float64, except for the rounding of stored values."""
    settings = [f"--optimizer.name={name}", f"--optimizer.implementation={implementation}", "--optimizer.lr=0.5"]
    settings += ["--optimizer.rounding=nearest"]
    got = pool.run(1, changes, [*settings, f"--training.dtype={weights}", f"--optimizer.state_dtype={state}"])[0]
    exact = pool.run(1, changes, [*settings, "--training.dtype=float64"])[0]
    assert got.keys() == exact.keys()
    for key, wanted in exact.items():
        error = (got[key] - wanted).norm() / wanted.norm()
        assert error < (0.05 if "bfloat16" in (weights, state) else 1e-3), f"{key}: {error:.1e}"


@pytest.mark.parametrize(("saved", "loaded"), [("float32", "bfloat16"), *slow(("bfloat16", "float32"))])
def test_a_checkpoint_loads_with_the_other_setting(pool: WorkerPool, tmp_path: Path, saved: str, loaded: str) -> None:
    """Its moments are cast, to nearest; weights and steps stay; then it trains on, on another layout."""
    key, folder = "--optimizer.state_dtype=", str(tmp_path)
    before = merged(pool.run(1, load_step_save, folder, [f"{key}{saved}"], 2), "after")
    results = pool.run(2, load_step_save, folder, [f"{key}{loaded}", *LAYOUTS["fsdp2"][1]], 1)
    after = merged(results, "before")
    dtype = getattr(torch, loaded)
    moments = {name for name in before if ".exp_avg" in name}
    wanted = {name: x.to(dtype) if name in moments else x for name, x in before.items()}
    assert [name for name in wanted if not same(after[name], wanted[name])] == []
    assert {x.dtype for name, x in merged(results, "after").items() if name in moments} == {dtype}


def memory_case(arguments: list[str]) -> tuple[int, int, int]:
    """Return this rank's bytes of moments of matrices and of norms, and the bytes that the job counts."""
    with trainer_of(arguments) as trainer:
        ensure_state(trainer.optimizer)
        sizes = {True: 0, False: 0}
        for parameter, state in trainer.optimizer.state.items():
            for moment in (state["exp_avg"], state["exp_avg_sq"]):
                local = moment.to_local() if isinstance(moment, DTensor) else moment
                sizes[parameter.ndim == 1] += local.untyped_storage().nbytes()
        return sizes[False], sizes[True], trainer.job.task.memory(trainer.job).optimizer


@pytest.mark.parametrize(("layout", "stored"), [("fsdp2", 4), *slow(("tp2", 4), ("fsdp2", 8), ("tp2", 8))])
def test_moments_take_what_the_job_counts(pool: WorkerPool, layout: str, stored: int) -> None:
    """4 bytes a parameter in place of 8; norms, which the count leaves out, are less than a hundredth."""
    settings = [*LAYOUTS[layout][1], *([MOMENTS] if stored == 4 else [])]
    for matrices, norms, counted in pool.run(2, memory_case, settings):
        assert matrices == counted
        assert norms < counted / 100


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["foreach", "fused"])
def test_steps_that_are_left_out_change_nothing(pool: WorkerPool, implementation: str) -> None:
    settings = [*test_skipped_steps.MODEL, f"--optimizer.implementation={implementation}", MOMENTS]
    for seen in pool.run(2, test_skipped_steps.skipping_case, [*settings, *LAYOUTS["fsdp2"][1]]):
        assert seen["changed"] == [1, 4]


@pytest.mark.slow
def test_steps_that_are_read_late_are_those_that_are_read_at_once(pool: WorkerPool, tmp_path: Path) -> None:
    settings = [MOMENTS, *LAYOUTS["fsdp2"][1]]
    states = []
    for name, at_once in (("once", True), ("late", False)):
        results = pool.run(2, test_late_read.training_case, str(tmp_path / name), settings, at_once)
        states.append(merged(results, "state"))
    assert [name for name in states[0] if not same(states[0][name], states[1][name])] == []
