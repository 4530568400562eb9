"""Laws of Muon: every layout updates as one process does, one process as PyTorch's own, and each product runs once."""

from collections import Counter
from functools import lru_cache
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import DTensor

from longshard.sharding import exchange
from scripts.gpu_blocks.block import largest
from tests.distributed import test_late_read, test_skipped_steps
from tests.distributed.checkpoint_cases import load_step_save, merged, same, trainer_in
from tests.distributed.harness import trainer_of
from tests.distributed.pool import RankFailedError, WorkerPool
from tests.distributed.test_checkpoint_layouts import LAYOUTS as SAVED
from tests.distributed.test_checkpoint_layouts import MODEL, MORE, PAIRS, state_and_losses
from tests.distributed.test_parity import LAYOUTS, degrees
from tests.distributed.test_stored_types import ONE_ROW, drawn, rounding_case
from tests.distributed.test_verify import verified
from tests.slow import slow
from trainer.components import muon
from trainer.models.matrices import matrices_of
from trainer.parallel import ownership

MUON, FLOAT64 = "--optimizer.name=Muon", "--training.dtype=float64"
MOE, EP = "--model.name=qwen3_moe", "--parallelism.expert_parallel_degree="
OTHERS = {
    "fsdp3": (3, degrees(dp_shard=3)),  # uneven shards, some of them empty
    "ep2": (2, [*degrees(dp_shard=2), f"{EP}2"]),
    "fsdp4+ep2": (4, [*degrees(dp_shard=4), f"{EP}2"]),
    "fsdp8, rows of experts": (8, [*degrees(dp_shard=8), f"{EP}1", "--training.local_batch_size=1"]),
    "hsdp2x2+ep2": (4, [*degrees(dp_replicate=2, dp_shard=2), f"{EP}2"]),
    "cp2+tp2+ep4": (4, [*degrees(cp=2, tp=2), f"{EP}4"]),
    "one, offloaded": (1, ["--training.enable_cpu_offload"]),
}
FAMILIES = ("deepseek_v3", "kimi_linear", "qwen3_next", "granitemoehybrid", "gpt_oss", "glm4_moe")


def layout_of(name: str) -> tuple[int, list[str]]:
    return LAYOUTS.get(name) or OTHERS[name]


@lru_cache
def single_process_state(pool: WorkerPool, *arguments: str) -> dict[str, torch.Tensor]:
    return merged([{"state": pool.run(1, rounding_case, list(arguments))[0]}], "state")


def differences(pool: WorkerPool, layout: str, *model: str) -> dict[str, float]:
    """Return relative differences of weights and states to one process, after updates by the same gradients."""
    world_size, arguments = layout_of(layout)
    results = pool.run(world_size, rounding_case, [*model, *arguments])
    got, wanted = merged([{"state": result} for result in results], "state"), single_process_state(pool, *model)
    assert got.keys() == wanted.keys()
    return {
        name: ((got[name] - x).norm() / x.norm().clamp(min=1e-30)).item() for name, x in wanted.items() if x.numel()
    }


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        ("hsdp2x2", []),
        ("fsdp2+tp2", ["--muon.per_head"]),
        ("fsdp4+ep2", [MOE]),
        ("fsdp2+tp2", ["--model.name=qwen3_next"]),
        *slow(
            *(
                (layout, [])
                for layout in ("fsdp2", "ddp2", "tp2", "pp2", "cp2", "fsdp3", "fsdp2+tp2", "one, offloaded")
            ),
            *((layout, []) for layout in ("hsdp2x2+tp2", "fsdp2+tp2+pp2", "fsdp2+cp2+tp2", "hsdp2x4")),
            *((layout, [MOE]) for layout in OTHERS if "ep" in layout or "experts" in layout),
            *((layout, [f"--model.name={name}"]) for name in FAMILIES for layout in ("fsdp2", "tp2", "fsdp2+tp2")),
        ),
    ],
)
def test_every_layout_updates_as_one_process(pool: WorkerPool, layout: str, model: list[str]) -> None:
    errors = differences(pool, layout, MUON, FLOAT64, *model)
    assert largest(*errors.values()) < 1e-12, max(errors.items(), key=lambda item: item[1])


def torchs_muon_case(rule: str, nesterov: bool) -> dict[str, float]:
    """Largest differences to PyTorch's Muon after three updates by the same gradients, in bfloat16 products."""
    nesterov_key = f"--muon.nesterov={str(nesterov).lower()}"
    settings = [*ONE_ROW, MUON, "--muon.dtype=bfloat16", f"--muon.lr_rule={rule}", nesterov_key, "--muon.lr=0.01"]
    whole_rate = ["--lr_scheduler.warmup_steps=0", "--training.dtype=float32", "--muon.weight_decay=0.2"]
    with trainer_of([*settings, *whole_rate]) as trainer:
        (model,) = trainer.model_parts
        matrices = {name: p for name, p in model.named_parameters() if p in matrices_of([model])}
        copies = [torch.nn.Parameter(p.detach().clone()) for p in matrices.values()]
        theirs = torch.optim.Muon(copies, lr=0.01, weight_decay=0.2, nesterov=nesterov, adjust_lr_fn=rule)
        for update in range(3):
            for (name, parameter), copy in zip(matrices.items(), copies, strict=True):
                parameter.grad = copy.grad = drawn(f"{name} {update}", copy.detach())
            trainer.optimizer.step()
            theirs.step()
        return {
            name: (parameter - copy).abs().max().item()
            for (name, parameter), copy in zip(matrices.items(), copies, strict=True)
        }


@pytest.mark.parametrize(("rule", "nesterov"), [("original", True), ("match_rms_adamw", False)])
def test_one_process_updates_as_pytorchs_muon(pool: WorkerPool, rule: str, nesterov: bool) -> None:
    """Products of several matrices at once may round differently: in the last bit of float32."""
    errors = pool.run(1, torchs_muon_case, rule, nesterov)[0]
    assert set(errors) == {f"layers.{i}.{name}.weight" for i in range(2) for name in MATRICES}
    assert largest(*errors.values()) < 1e-6


MATRICES = [*(f"attention.{name}" for name in ("wq", "wk", "wv", "wo")), *(f"feed_forward.w{i}" for i in (1, 2, 3))]


def counted_case(arguments: list[str]) -> dict[str, object]:
    """Run one update; return the matrices that this rank made orthogonal, by shape, and the bytes that it sent."""
    made: Counter[tuple[int, int]] = Counter()
    real = muon.newton_schulz

    def counting(x: torch.Tensor) -> torch.Tensor:
        made[tuple(x.shape[1:])] += len(x)
        return real(x)

    with trainer_of([*ONE_ROW, MUON, FLOAT64, *arguments]) as trainer:
        model_parts = trainer.model_parts
        for part in model_parts:
            for name, parameter in part.named_parameters():
                parameter.grad = drawn(name, parameter.detach())
        before = exchange.bytes_sent["owners"]
        with mock.patch.object(muon, "newton_schulz", counting):
            trainer.optimizer.step()
        shards = {}
        for part in model_parts:
            for name, parameter in part.named_parameters():
                if parameter in matrices_of(model_parts):
                    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                    shards[name] = tuple(parameter.shape), local.numel()
        return {"made": made, "sent": exchange.bytes_sent["owners"] - before, "shards": shards}


@pytest.mark.parametrize(
    ("layout", "model", "copies"),
    [
        ("hsdp2x2", [], 2),
        ("fsdp4+ep2", [MOE], 1),
        *slow(("fsdp2", [], 1), ("fsdp2+tp2", [], 1), ("ddp4", [], 4), ("pp2", [], 1), ("hsdp2x2+ep2", [MOE], 2)),
    ],
)
def test_each_product_runs_once_and_sends_what_it_must(
    pool: WorkerPool, layout: str, model: list[str], copies: int
) -> None:
    """A matrix goes to its owner, without the owner's shard, and back to all copies, without the owner's own shards.

    copies: of each shard. An expert that lies on one rank stays there.
    """
    world_size, arguments = LAYOUTS.get(layout) or OTHERS[layout]
    single = pool.run(1, counted_case, model)[0]
    results = pool.run(world_size, counted_case, [*model, *arguments])
    made = sum((result["made"] for result in results), Counter())
    assert made == single["made"]
    assert single["sent"] == 0
    stays = "pp" in layout
    dealt = 8 * sum(numbers[0][-1] * rows_of(numbers[0]) for name, numbers in single["shards"].items() if divided(name))
    experts = 8 * sum(x[0][-1] * rows_of(x[0]) for name, x in single["shards"].items() if not divided(name))
    ranks = world_size // (2 if stays else 1)
    shards = ranks // copies
    there = 0 if stays else dealt * (shards - 1) // shards
    back = 0 if stays else dealt * copies - dealt // shards
    assert sum(result["sent"] for result in results) == there + back + experts * (copies - 1)
    if not model and not stays:  # as many matrices of each shape for each rank, or one more
        for shape, number in made.items():
            assert {result["made"][shape] for result in results} <= {number // ranks, -(-number // ranks)}


def divided(name: str) -> bool:
    return ".experts." not in name


def rows_of(shape: tuple[int, ...]) -> int:
    return torch.Size(shape[:-1]).numel()


@pytest.mark.parametrize(
    ("first", "then"), [("tp2", "ep2"), *slow(*(pair for pair in PAIRS if pair != ("tp2", "ep2")))]
)
def test_any_layout_resumes_from_any_other(pool: WorkerPool, tmp_path: Path, first: str, then: str) -> None:
    """Weights, momenta and steps in every bit; then losses to 1e-9."""
    wanted, losses = state_and_losses(pool, first, tmp_path / "first", MUON)
    folder = f"--checkpoint.folder={tmp_path / 'first' / 'checkpoint'}"
    got, went_on = state_and_losses(pool, then, tmp_path / "then", MUON, folder)
    assert [name for name in wanted if not same(wanted[name], got[name])] == []
    momenta = [name for name in wanted if name.endswith(".momentum")]
    assert {name.split(".")[-3] for name in momenta} >= {"wq", "wo", "experts"}
    assert len(losses) == len(went_on) == MORE
    assert went_on == pytest.approx(losses, rel=1e-9)


@pytest.mark.parametrize(("first", "then"), [("Muon", "AdamW"), ("AdamW", "Muon")])
def test_states_of_another_optimizer_are_refused(pool: WorkerPool, tmp_path: Path, first: str, then: str) -> None:
    name = "--optimizer.name="
    pool.run(1, load_step_save, str(tmp_path), [f"{name}{first}"], 1)
    with pytest.raises(RankFailedError, match=f"{then}' is not the {first} of the checkpoint .*exclude_from"):
        pool.run(1, load_step_save, str(tmp_path), [f"{name}{then}"], 1)
    again = ["--checkpoint.load_step=1", "--checkpoint.exclude_from_loading", "optimizer"]
    assert pool.run(1, load_step_save, str(tmp_path), [f"{name}{then}", *again], 1)[0]["step"] == 1


def test_a_saved_step_is_whole(pool: WorkerPool, tmp_path: Path) -> None:
    ranks, arguments = SAVED["ep2"]
    pool.run(ranks, load_step_save, str(tmp_path), [*MODEL, MUON, *arguments], 1)
    code, lines, err = verified(pool, tmp_path)
    assert (code, err) == (0, ""), (lines, err)


@pytest.mark.parametrize("implementation", ["foreach", "fused"])
def test_steps_that_are_left_out_change_nothing(pool: WorkerPool, implementation: str) -> None:
    settings = [*test_skipped_steps.MODEL, MUON, f"--optimizer.implementation={implementation}"]
    for seen in pool.run(2, test_skipped_steps.skipping_case, [*settings, *LAYOUTS["fsdp2"][1]], "wq.weight"):
        assert seen["changed"] == [1, 4]


@pytest.mark.slow
def test_steps_that_are_read_late_are_those_that_are_read_at_once(pool: WorkerPool, tmp_path: Path) -> None:
    settings, states = [MUON, *LAYOUTS["fsdp2"][1]], []
    for name, at_once in (("once", True), ("late", False)):
        results = pool.run(2, test_late_read.training_case, str(tmp_path / name), settings, at_once)
        states.append(merged(results, "state"))
    assert [name for name in states[0] if not same(states[0][name], states[1][name])] == []


@pytest.mark.parametrize("stored", ["--optimizer.state_dtype=bfloat16", "--training.dtype=bfloat16"])
def test_what_is_stored_in_bfloat16_is_rounded_alike_on_every_layout(pool: WorkerPool, stored: str) -> None:
    """Values are equal, except for the few whose float32 results lie within rounding of each other's border."""
    settings = [MUON, "--muon.dtype=float32", "--muon.per_head", "--training.dtype=float32", stored]
    world_size, arguments = LAYOUTS["fsdp2+tp2"]
    results = pool.run(world_size, rounding_case, [*settings, *arguments])
    got, wanted = merged([{"state": result} for result in results], "state"), single_process_state(pool, *settings)
    momenta = [name for name in wanted if name.endswith("momentum")]
    assert {wanted[name].dtype for name in momenta} == {torch.bfloat16}
    assert [name for name in momenta if not same(got[name], wanted[name])] == []
    for name, x in wanted.items():
        if not same(got[name], x):
            assert (got[name] != x).double().mean() < 0.01, name


def groups_case(arguments: list[str]) -> list[tuple[float, float, list[str]]]:
    """Rate, decay and parameters of each group."""
    with trainer_of([*ONE_ROW, "--lr_scheduler.warmup_steps=0", *arguments]) as trainer:
        names = {p: name for part in trainer.model_parts for name, p in part.named_parameters()}
        groups = trainer.optimizer.param_groups
        assert all(any(group is own for own in groups) for group in trainer.optimizer.other.param_groups)
        return [(group["lr"], group["weight_decay"], sorted(names[p] for p in group["params"])) for group in groups]


def test_rates_and_decays_by_name(pool: WorkerPool) -> None:
    rules = [
        '{parameters = "tok_embeddings.*", lr_factor = 0.1, weight_decay = 0.5}',
        '{parameters = "layers.*.wq.weight", weight_decay = 0}',
        '{parameters = "layers.*", lr_factor = 2}',
    ]
    settings = [MUON, "--optimizer.lr=0.5", "--muon.lr=0.25", "--muon.weight_decay=0.3", "--optimizer.groups", *rules]
    groups_of_ranks = pool.run(2, groups_case, [*settings, *LAYOUTS["pp2"][1]])
    rates = {name: group[:2] for groups in groups_of_ranks for group in groups for name in group[2]}
    assert rates["tok_embeddings.weight"] == (0.05, 0.5)
    assert rates["layers.1.attention.wq.weight"] == (0.25, 0.0)
    assert rates["layers.1.attention.wk.weight"] == (0.5, 0.3)
    assert rates["layers.0.attention_norm.weight"] == (1.0, 0.0)
    assert rates["output.weight"] == (0.5, 0.1)
    unused = [f'{{parameters = "{names}", lr_factor = 2}}' for names in ("layers.*", "layers.7.*")]
    with pytest.raises(RankFailedError, match=r"layers\.7\.\*.*, lr_factor = 2.*which is for no parameter"):
        pool.run(2, groups_case, [MUON, "--optimizer.groups", *unused, *LAYOUTS["pp2"][1]])


def rates_case(folder: str, arguments: list[str], steps: int) -> list[float]:
    """Continue in the folder up to step `steps`, save, and return the rates of these steps."""
    with trainer_in(folder, [*arguments, f"--training.steps={steps}"]) as trainer:
        rates = []
        for step in range(trainer.start_step + 1, steps + 1):
            rates.append(trainer.optimizer.param_groups[0]["lr"])
            trainer.train_step(step)
        trainer.checkpoint.save(steps, tokens_seen=7, last=True)
        return rates


def test_a_finished_run_goes_on_in_a_new_schedule(pool: WorkerPool, tmp_path: Path) -> None:
    """Warm-up of one step, then down to zero at the end: twice."""
    settings = ["--optimizer.lr=1.0", "--lr_scheduler.warmup_steps=1"]
    first = pool.run(1, rates_case, str(tmp_path), settings, 3)[0]
    again = pool.run(1, rates_case, str(tmp_path), [*settings, "--lr_scheduler.restart_step=3"], 7)[0]
    assert first == pytest.approx([1 / 2, 1, 1 / 2])
    assert again == pytest.approx([1 / 2, 1, 2 / 3, 1 / 3])
    with pytest.raises(RankFailedError, match="restart_step = 8 is after step 7"):
        pool.run(1, rates_case, str(tmp_path), [*settings, "--lr_scheduler.restart_step=8"], 9)


def test_rounds_of_one_matrix_give_what_one_round_of_all_gives(pool: WorkerPool) -> None:
    settings = [MUON, FLOAT64, *LAYOUTS["hsdp2x2"][1]]
    results = pool.run(4, small_rounds_case, settings)
    got, wanted = merged([{"state": result} for result in results], "state"), single_process_state(pool, MUON, FLOAT64)
    assert max(((got[name] - x).norm() / x.norm().clamp(min=1e-30)).item() for name, x in wanted.items()) < 1e-12


def small_rounds_case(arguments: list[str]) -> dict[str, torch.Tensor]:
    with mock.patch.object(ownership, "AT_ONCE", 1):
        return rounding_case(arguments)
