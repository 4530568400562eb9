"""Laws of activation checkpointing: it changes memory, not results, and "op" does not compute attention twice."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from longshard.sharding import exchange
from scripts.benchmarks.activation_checkpointing import Meter, measure
from tests.distributed import harness
from tests.distributed.harness import assert_parity, run_layout, trainer_of
from tests.distributed.pool import WorkerPool
from tests.distributed.test_parity import LAYOUTS, reference
from trainer.config.schema import ActivationCheckpoint
from trainer.models.decoder import Transformer
from trainer.models.initialization import initialize
from trainer.transforms.activation_checkpoint import apply_activation_checkpoint

MODES = {
    "none": [],
    "full": ["--activation_checkpoint.mode=full"],
    "2": ["--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=2"],
    "op": ["--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=op"],
}
ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"
REDUCE_SCATTER = "_c10d_functional::reduce_scatter_tensor"
LAYERS = harness.TINY.n_layers


# Two dimensions at a time: the support matrix.
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["one", "fsdp2+cp2+tp2"])
@pytest.mark.parametrize("mode", ["full", "2", "op"])
def test_losses_gradients_and_weights_do_not_change(pool: WorkerPool, layout: str, mode: str) -> None:
    world_size, arguments = LAYOUTS.get(layout, (1, []))
    precision = "--training.dtype=float64"
    got = pool.run(world_size, run_layout, [precision, *MODES[mode], *arguments])[0]
    assert_parity(got, reference(pool, precision), 1e-10)


class Calls(TorchDispatchMode):
    """Counts operators that really run; a checkpoint answers calls whose results it has kept before they get here."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.name().split(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def counted_case(arguments: list[str]) -> tuple[Counter[str], Counter[str], list[str]]:
    """One step: operators, collectives of our own, and the names of the parameters."""
    with trainer_of(["--training.local_batch_size=4", *arguments, "--training.global_batch_size=-1"]) as trainer:
        exchange.calls.clear()
        with Calls() as calls:
            trainer.train_step(1)
        names = [name for name, _ in trainer.model_parts[0].named_parameters()]
    return calls.counts, Counter(exchange.calls), names


def counted(pool: WorkerPool, layout: str) -> dict[str, tuple[Counter[str], Counter[str], list[str]]]:
    world_size, arguments = LAYOUTS.get(layout, (1, []))
    return {mode: pool.run(world_size, counted_case, [*settings, *arguments])[0] for mode, settings in MODES.items()}


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp2", "one", "tp2"])
def test_attention_forwards_that_are_run_again(pool: WorkerPool, layout: str) -> None:
    got = {mode: calls[ATTENTION] - LAYERS for mode, (calls, _, _) in counted(pool, layout).items()}
    assert got == {"none": 0, "op": 0, "2": LAYERS // 2, "full": LAYERS}


@pytest.mark.slow
def test_sums_over_tp_are_not_communicated_again_by_op(pool: WorkerPool) -> None:
    got = {mode: calls[REDUCE_SCATTER] for mode, (calls, _, _) in counted(pool, "tp2").items()}
    assert got["op"] == got["none"] < got["full"]


def test_context_parallel_attention_is_not_communicated_again_by_op(pool: WorkerPool) -> None:
    got = {mode: exchanges for mode, (_, exchanges, _) in counted(pool, "cp2").items()}
    assert got["op"] == got["none"]
    assert got["full"].total() > got["2"].total() > got["none"].total()


KEPT = "all_to_all --parallelism.context_parallel_keep_exchanged"


@pytest.mark.slow
@pytest.mark.parametrize("method", ["all_gather", "all_to_all", KEPT])
def test_nor_do_the_other_methods(pool: WorkerPool, method: str) -> None:
    """Gradients in each mode equal the single process, with documents that change the plan."""
    world_size, arguments = LAYOUTS["cp2"]
    mask = ["--training.dtype=float64", "--training.attention_mask=document"]
    settings = [*mask, *f"--parallelism.context_parallel_method={method}".split(), *arguments]
    exchanges = {}
    for mode, checkpointing in MODES.items():
        exchanges[mode] = pool.run(world_size, counted_case, [*settings, *checkpointing])[0][1]
        if mode != "none":
            got = pool.run(world_size, run_layout, [*settings, *checkpointing])[0]
            assert_parity(got, reference(pool, *mask), 1e-10)
    assert exchanges["op"] == exchanges["none"]
    assert exchanges["full"].total() > exchanges["2"].total() > exchanges["none"].total()


def bytes_case(arguments: list[str]) -> tuple[Counter[str], Counter[str]]:
    """Collectives of one step and the bytes that they send, by kind."""
    with trainer_of(["--training.local_batch_size=4", *arguments, "--training.global_batch_size=-1"]) as trainer:
        exchange.calls.clear()
        exchange.bytes_sent.clear()
        trainer.train_step(1)
    return Counter(exchange.calls), Counter(exchange.bytes_sent)


def test_keys_are_sent_once_in_each_pass_over_a_layer(pool: WorkerPool) -> None:
    """In the forward, its recomputation, and the backward, however many heads are sent at a time."""
    world_size, arguments = LAYOUTS["cp2"]
    base = [*arguments, "--training.dtype=float64", *MODES["full"], "--parallelism.context_parallel_method=all_to_all"]
    shape = harness.TINY
    rows = 4 * 16 // 2 * (shape.dim // shape.n_heads) * 8 // 2  # bytes of a head of all rows that go to the other rank
    queries, keys = shape.n_heads * rows, 2 * shape.n_kv_heads * rows
    for setting, passes in (("heads_per_pass=0", 1), ("heads_per_pass=1", 4), ("query_heads_per_pass=1", 8)):
        calls, sent = pool.run(world_size, bytes_case, [*base, f"--parallelism.context_parallel_{setting}"])[0]
        assert [calls[kind] for kind in ("qkv", "out", "qkv_dout", "dqkv")] == [
            n * LAYERS * passes for n in (2, 2, 1, 1)
        ]
        assert sent["qkv"] == 2 * LAYERS * (queries + keys)  # forward and recomputation
        assert sent["dqkv"] == LAYERS * (queries + keys)
        lse = 4 * 16 // 2 * shape.n_heads // 2 * 8
        assert sent["qkv_dout"] == LAYERS * (3 * queries + keys + lse)


@pytest.mark.slow
def test_names_of_parameters_stay(pool: WorkerPool) -> None:
    names = [names for _, _, names in counted(pool, "fsdp2").values()]
    assert names[0] == names[1] == names[2] == names[3]
    assert "layers.0.attention.wq.weight" in names[0]


def kept_and_computed(config: ActivationCheckpoint, n_layers: int = LAYERS) -> dict[str, int]:
    with torch.device("meta"):
        model = Transformer(replace(harness.TINY, n_layers=n_layers))
    apply_activation_checkpoint(model.layers, config)
    initialize(model, seed=0, device=torch.device("cpu"))
    return measure(model, torch.zeros(2, 64, dtype=torch.int64))


def test_memory_falls_and_work_grows_in_the_order_of_the_modes() -> None:
    got = [
        kept_and_computed(ActivationCheckpoint(mode, option))
        for mode, option in (("none", "op"), ("selective", "op"), ("full", "op"))
    ]
    kept = [result["kept_bytes"] for result in got]
    assert kept[0] > 2 * kept[1]
    assert kept[1] > 2 * kept[2]
    flops = [result["flops"] for result in got]
    assert flops[0] < flops[1] < flops[2] < 4 / 3 * flops[0]
    assert [result["attention_forwards"] for result in got] == [LAYERS, LAYERS, 2 * LAYERS]


def test_every_nth_layer_counts_from_the_nth() -> None:
    with torch.device("meta"):
        layers = torch.nn.ModuleDict({str(i): torch.nn.Linear(1, 1) for i in (1, 2, 3, 4, 5, 6)})  # of a later stage
    apply_activation_checkpoint(layers, ActivationCheckpoint("selective", "3"))
    assert [name for name, layer in layers.items() if "forward" in vars(layer)] == ["2", "5"]


def test_full_keeps_one_tensor_a_layer() -> None:
    two, five = (kept_and_computed(ActivationCheckpoint("full"), n_layers=n)["kept_bytes"] for n in (2, 5))
    hidden = 2 * 64 * harness.TINY.dim * 4
    assert five - two == 3 * hidden


def test_the_meter_sees_what_is_alive() -> None:
    """A control of the measurement itself."""
    x = torch.ones(8, requires_grad=True)
    with Meter(x) as meter:
        y = x * 2
        z = (y * y).sum()  # saves y
        assert meter.alive() == 8 * 4 + 4
        del y
        assert meter.alive() == 8 * 4 + 4
        z.backward()
        del z
        x.grad = None
        assert meter.alive() == 0
