"""Laws of groups of layers: one input a group is kept, each layer but its last one runs once more, nothing changes."""

from dataclasses import replace
from unittest import mock

import pytest
import torch

from scripts.benchmarks.activation_checkpointing import Meter, measure
from tests.distributed import harness
from tests.distributed.harness import assert_parity, run_layout, trainer_of
from tests.distributed.pool import WorkerPool
from tests.distributed.test_offload import COMPILE, DOCUMENTS, FP64, OFFLOAD, model_of
from tests.distributed.test_parity import LAYOUTS, reference
from tests.slow import slow
from trainer.config.schema import ActivationCheckpoint
from trainer.models.block import TransformerBlock
from trainer.transforms.offload import CopyStream, RecomputedInput

FOUR = "--model.flavor=tiny4"
GROUP = [FOUR, "--activation_checkpoint.mode=full", "--activation_checkpoint.group=3"]
MODES = {
    "alone": [],
    "offload": OFFLOAD,
    "parts": ["--activation_checkpoint.mlp_chunk_tokens=5"],
    "compiled": [*COMPILE, *OFFLOAD],
}
METHODS = {method: f"--parallelism.context_parallel_method={method}" for method in ("ring", "all_gather", "all_to_all")}
PAIRS = [(layout, mode) for layout in ("one", "fsdp2", "tp2", "pp2", "fsdp2+cp2+tp2") for mode in MODES]


@pytest.mark.parametrize(("layout", "mode"), [("fsdp2", "offload"), *slow(*PAIRS)])
def test_losses_gradients_and_weights_do_not_change(pool: WorkerPool, layout: str, mode: str) -> None:
    world_size, arguments = LAYOUTS.get(layout, (1, []))
    got = pool.run(world_size, run_layout, [FP64, *GROUP, *MODES[mode], *arguments])[0]
    assert_parity(got, reference(pool, FP64, FOUR), 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_nor_do_they_with_documents(pool: WorkerPool, method: str) -> None:
    world_size, arguments = LAYOUTS["cp2"]
    got = pool.run(world_size, run_layout, [FP64, *DOCUMENTS, *GROUP, *OFFLOAD, METHODS[method], *arguments])[0]
    assert_parity(got, reference(pool, FP64, FOUR, *DOCUMENTS), 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp2+cp2", "cp2+pp2"])
def test_nor_do_they_with_experts(pool: WorkerPool, layout: str) -> None:
    world_size, arguments = LAYOUTS[layout]
    experts = ["--model.name=qwen3_moe", FOUR]
    got = pool.run(world_size, run_layout, [FP64, *GROUP, *experts, *arguments])[0]
    assert_parity(got, reference(pool, FP64, *experts), 1e-10)


def test_a_wrong_recomputed_input_is_seen(pool: WorkerPool) -> None:
    """A negative control: the backward uses the recomputed results of the group's first layers."""
    got = pool.run(1, wrong_layout, [FP64, *GROUP])[0]
    with pytest.raises(AssertionError):
        assert_parity(got, reference(pool, FP64, FOUR), 1e-10)


def wrong_layout(arguments: list[str]) -> harness.Record:
    real = RecomputedInput.on_device
    with mock.patch.object(RecomputedInput, "on_device", lambda self: real(self) * (1 + 1e-6)):
        return run_layout(arguments)


def settings_of(group: int, offload: str = "none") -> ActivationCheckpoint:
    return ActivationCheckpoint("full", group=group, offload=offload, offload_keep_last=0)


def test_the_first_layer_of_each_group_keeps_its_input() -> None:
    assert settings_of(3).kept(range(4, 12)) == [4, 7, 10]
    assert settings_of(3, "inputs").offloaded(range(8)) == [0, 3, 6]
    assert replace(settings_of(3, "inputs"), offload_keep_last=1).offloaded(range(8)) == [0, 3]
    assert settings_of(1).kept(range(3)) == [0, 1, 2]


@pytest.mark.parametrize(
    ("group", "inputs", "again"), [(1, 7, 0), (2, 4, 3), (3, 3, 4), (4, 2, 5), (7, 1, 6), (9, 1, 6)]
)
def test_memory_and_work_are_those_of_the_formula(group: int, inputs: int, again: int) -> None:
    """7 layers: an input for each group that is begun, and a forward more for each layer but the last of a group."""
    tokens, hidden = torch.zeros(2, 64, dtype=torch.int64), 2 * 64 * harness.TINY.dim * 4
    models = [model_of(settings_of(g), 7) for g in (1, group)]
    for model in models:
        model.layers.requires_grad_(False)  # gradients of weights are not what this is about
    whole, grouped = (measure(model, tokens) for model in models)
    assert grouped["kept_bytes"] - whole["kept_bytes"] == (inputs - 7) * hidden
    assert grouped["attention_forwards"] == 14 + again
    with Meter() as meter, torch.no_grad():
        model_of(settings_of(1), 7)(tokens)
    assert grouped["flops"] - whole["flops"] == again * meter.flops // 7
    alive = max(start // group + min(group, 7 - start) for start in range(0, 7, group))  # in one group's backward
    assert grouped["peak_bytes"] - whole["peak_bytes"] == (alive - 7) * hidden


def test_inputs_on_the_host_leave_one_group_on_the_device() -> None:
    tokens, hidden = torch.zeros(2, 64, dtype=torch.int64), 2 * 64 * harness.TINY.dim * 4
    models = [model_of(settings_of(3, "inputs"), n) for n in (6, 12)]
    for model in models:
        model.layers.requires_grad_(False)
    six, twelve = (measure(model, tokens) for model in models)
    assert (six["kept_bytes"], six["peak_bytes"]) == (twelve["kept_bytes"], twelve["peak_bytes"])
    assert six["kept_bytes"] < 3.1 * hidden  # besides the inputs: the last norm's and the output


def test_the_input_of_the_group_before_is_fetched_ahead() -> None:
    order: list[str] = []
    model = model_of(settings_of(3, "inputs"), 6)
    numbers = {layer: number for number, layer in model.layers.items()}
    forward = TransformerBlock.forward

    def counted(self: TransformerBlock, *args: object) -> torch.Tensor:
        order.append(numbers[self])
        return forward(self, *args)

    def device_like(_: CopyStream, x: torch.Tensor) -> torch.Tensor:
        order.append("copy")
        return torch.empty_like(x)

    with (
        mock.patch.object(TransformerBlock, "forward", counted),
        mock.patch.object(CopyStream, "device_like", device_like),
    ):
        out = model(torch.zeros(1, 4, dtype=torch.int64)).sum()
        order.clear()
        out.backward()
    # the group's other inputs, and then the recomputation of each layer, the last one first
    assert " ".join(order) == "copy 3 4 5 copy 4 copy 3 0 1 2 copy 1 0"


def gathers(arguments: list[str]) -> tuple[int, int]:
    """All-gathers of FSDP, and forwards of layers, in the second step."""
    calls, real = [0, 0], TransformerBlock.forward

    def forward(self: TransformerBlock, *args: object) -> torch.Tensor:
        calls[1] += 1
        return real(self, *args)

    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as groups

    gather = groups.foreach_all_gather

    def counted(*args: object, **options: object) -> object:
        calls[0] += 1
        return gather(*args, **options)

    with (
        trainer_of(arguments) as trainer,
        mock.patch.object(TransformerBlock, "forward", forward),
        mock.patch.object(groups, "foreach_all_gather", counted),
    ):
        trainer.train_step(1)
        calls[:] = 0, 0
        trainer.train_step(2)
    return tuple(calls)


@pytest.mark.slow
def test_weights_are_gathered_once_in_the_backward(pool: WorkerPool) -> None:
    world_size, arguments = LAYOUTS["fsdp2"]
    base = [FOUR, "--training.local_batch_size=4", "--training.global_batch_size=-1", *arguments]
    full = "--activation_checkpoint.mode=full"
    plain, grouped = (
        pool.run(world_size, gathers, [*base, full, f"--activation_checkpoint.group={g}"])[0] for g in (1, 4)
    )
    assert grouped == (plain[0], plain[1] + 3)
