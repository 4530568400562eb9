"""Laws of offloaded inputs: only where they wait changes; the memory of the device does not grow with the layers."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import nn

from scripts.benchmarks.activation_checkpointing import measure
from tests.distributed import harness
from tests.distributed.harness import assert_parity, run_layout
from tests.distributed.pool import WorkerPool
from tests.distributed.test_parity import LAYOUTS, reference
from tests.slow import slow
from trainer.config.schema import ActivationCheckpoint
from trainer.models.decoder import Transformer
from trainer.models.initialization import initialize
from trainer.transforms import activation_checkpoint
from trainer.transforms.activation_checkpoint import apply_activation_checkpoint
from trainer.transforms.offload import CopyStream, HostInputs, apply_offload

FP64 = "--training.dtype=float64"
OFFLOAD = ["--activation_checkpoint.offload=inputs", "--activation_checkpoint.offload_keep_last=0"]
FULL = ["--activation_checkpoint.mode=full", *OFFLOAD]
COMPILE = ["--compile.enable", "--compile.backend=aot_eager"]
DOCUMENTS = ["--training.attention_mask=document", "--model.sliding_window=5"]
ATTENTION = ["--activation_checkpoint.mode=selective", *OFFLOAD, "--activation_checkpoint.offload=inputs+attention"]
MODES = {
    "full": FULL,
    "2": ["--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=2", *OFFLOAD],
    "op": ["--activation_checkpoint.mode=selective", *OFFLOAD],
    "attention": ATTENTION,
    "op, compiled": ["--activation_checkpoint.mode=selective", *COMPILE, *OFFLOAD],
    "full, compiled": [*FULL, *COMPILE],
    "budget": ["--activation_checkpoint.mode=memory_budget", *COMPILE, *OFFLOAD],
}
PAIRS = [(layout, mode) for layout in ("one", "fsdp2", "tp2", "pp2", "cp2", "fsdp2+cp2+tp2") for mode in MODES]
QUICK = [("fsdp2+cp2", "full"), ("pp2", "full, compiled"), ("cp2+pp2", "attention")]


@pytest.mark.parametrize(("layout", "mode"), [*QUICK, *slow(*PAIRS)])
def test_losses_gradients_and_weights_do_not_change(pool: WorkerPool, layout: str, mode: str) -> None:
    world_size, arguments = LAYOUTS.get(layout, (1, []))
    got = pool.run(world_size, run_layout, [FP64, *MODES[mode], *arguments])[0]
    assert_parity(got, reference(pool, FP64), 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp2+cp2", "cp2+pp2", "tp2+pp2"])
@pytest.mark.parametrize("model", [DOCUMENTS, ["--model.name=qwen3_moe"], ["--model.name=gpt_oss"]])
@pytest.mark.parametrize("mode", [FULL, ATTENTION], ids=["full", "attention"])
def test_nor_do_they_with_other_models_and_masks(
    pool: WorkerPool, layout: str, model: list[str], mode: list[str]
) -> None:
    world_size, arguments = LAYOUTS[layout]
    got = pool.run(world_size, run_layout, [FP64, *model, *mode, *arguments])[0]
    assert_parity(got, reference(pool, FP64, *model), 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["all_gather", "all_to_all"])
@pytest.mark.parametrize("options", [[], DOCUMENTS, ["--parallelism.context_parallel_keep_exchanged"]])
def test_nor_do_results_of_attention_with_other_methods(pool: WorkerPool, method: str, options: list[str]) -> None:
    if "keep_exchanged" in str(options) and method == "all_gather":
        pytest.skip("it exchanges no heads")
    model = options if options == DOCUMENTS else []
    world_size, arguments = LAYOUTS["cp2"]
    method = f"--parallelism.context_parallel_method={method}"
    got = pool.run(world_size, run_layout, [FP64, *ATTENTION, *arguments, method, *options])[0]
    assert_parity(got, reference(pool, FP64, *model), 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["InterleavedZeroBubble", "ZBVZeroBubble"])
def test_a_backward_in_parts_takes_an_input_repeatedly(pool: WorkerPool, schedule: str) -> None:
    world_size, arguments = LAYOUTS["pp2"]
    stages = ("tok_embeddings", "layers.0", "layers.1", "norm,output")
    in_parts = ["--parallelism.pipeline_parallel_module_fqns", *stages, "--activation_checkpoint.mlp_chunk_tokens=5"]
    schedule = f"--parallelism.pipeline_parallel_schedule={schedule}"
    got = pool.run(world_size, run_layout, [FP64, *in_parts, schedule, *FULL, *arguments])[0]
    assert_parity(got, reference(pool, FP64), 1e-10)


@pytest.mark.parametrize(("mode", "smallest"), [(FULL, 1), (ATTENTION, 4)])
def test_wrong_values_that_come_back_are_seen(pool: WorkerPool, mode: list[str], smallest: int) -> None:
    """A control: recomputation starts from the host's copies, and the backward reads attention's results from them."""
    got = pool.run(1, wrong_layout, [FP64, *mode], smallest)[0]
    with pytest.raises(AssertionError):
        assert_parity(got, reference(pool, FP64), 1e-10)


def wrong_layout(arguments: list[str], smallest: int) -> harness.Record:
    """Run with wrong copies of tensors with at least `smallest` dimensions: inputs have 3, outputs of attention 4."""

    def copy(self: CopyStream, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source).mul_(1 + 1e-6 * (source.ndim >= smallest))

    with mock.patch.object(CopyStream, "copy", copy):
        return run_layout(arguments)


def model_of(settings: ActivationCheckpoint, n_layers: int = 4) -> Transformer:
    with torch.device("meta"):
        model = Transformer(replace(harness.TINY, n_layers=n_layers, vocab_size=8))
    apply_activation_checkpoint(model.layers, settings)
    apply_offload(model.layers, settings, "cpu")
    initialize(model, seed=0, device=torch.device("cpu"))
    return model


def test_memory_of_the_device_does_not_grow_with_the_layers() -> None:
    tokens = torch.zeros(2, 64, dtype=torch.int64)
    hidden = 2 * 64 * harness.TINY.dim * 4
    for offload, growth in (("none", 1), ("inputs", 0)):
        settings = ActivationCheckpoint("full", offload=offload, offload_keep_last=1)
        models = [model_of(settings, n) for n in (4, 9)]
        for model in models:
            model.layers.requires_grad_(False)  # gradients of weights are not what this is about
        four, nine = (measure(model, tokens) for model in models)
        for place in ("kept_bytes", "peak_bytes"):
            assert nine[place] - four[place] == 5 * growth * hidden, (offload, place)


def test_results_of_attention_leave_the_device_with_the_inputs() -> None:
    """A further layer keeps neither its input (B, S, dim), nor its output (B, H, S, D) and log-sum-exp (B, H, S)."""
    tokens, rows = torch.zeros(2, 64, dtype=torch.int64), 2 * 64
    hidden, lse, grown = rows * harness.TINY.dim * 4, rows * harness.TINY.n_heads * 4, {}
    for offload in ("none", "inputs", "inputs+attention"):
        settings = ActivationCheckpoint("selective", offload=offload, offload_keep_last=0)
        models = [model_of(settings, n) for n in (4, 9)]
        for model in models:
            model.layers.requires_grad_(False)
        four, nine = (measure(model, tokens) for model in models)
        assert nine["attention_forwards"] == 9  # none is computed again
        grown[offload] = [nine[place] - four[place] for place in ("kept_bytes", "peak_bytes")]
    assert grown["inputs"] == [x - 5 * hidden for x in grown["none"]]
    assert grown["inputs+attention"] == [x - 5 * (2 * hidden + lse) for x in grown["none"]]


def test_attention_that_is_not_seen_is_an_error() -> None:
    model = model_of(ActivationCheckpoint("selective", offload="inputs+attention", offload_keep_last=0))
    hidden = mock.patch.object(activation_checkpoint, "_ATTENTION", frozenset())
    with hidden, pytest.raises(RuntimeError, match="has not seen the attention of a layer"):
        model(torch.zeros(2, 64, dtype=torch.int64))


def test_a_fraction_of_the_layers_and_the_last_ones() -> None:
    settings = ActivationCheckpoint("full", offload="inputs", offload_keep_last=1, offload_fraction=0.5)
    assert [len(settings.offloaded(range(layers))) for layers in (1, 2, 3, 7, 8)] == [0, 1, 2, 4, 4]
    assert replace(settings, offload_keep_last=5).offloaded(range(8)) == [0, 1, 2]
    assert replace(settings, mode="selective", selective_ac_option="3").offloaded(range(4, 12)) == [5, 8]
    tokens, hidden = torch.zeros(2, 64, dtype=torch.int64), 2 * 64 * harness.TINY.dim * 4
    models = [model_of(replace(settings, offload_fraction=share), 8) for share in (0.5, 1.0)]
    half, whole = (measure(model, tokens)["kept_bytes"] for model in models)
    assert half - whole == 3 * hidden


def test_buffers_are_used_again() -> None:
    made = []
    model = model_of(ActivationCheckpoint("full", offload="inputs", offload_keep_last=0))
    with mock.patch.object(CopyStream, "host_like", lambda _, x: made.append(torch.empty_like(x)) or made[-1]):
        for _ in range(3):
            model(torch.zeros(2, 64, dtype=torch.int64)).sum().backward()
    assert len(made) == 4


def test_the_input_of_the_block_before_is_fetched_ahead_and_no_other() -> None:
    inputs, fetched = HostInputs(CopyStream("cpu")), []
    with mock.patch.object(CopyStream, "device_like", lambda _, x: fetched.append(x.clone()) or torch.empty_like(x)):
        kept = [inputs.keep(torch.full((1,), float(i)), is_first=i % 3 == 0, to_host=True) for i in range(6)]
        inputs.keep(torch.ones(1), is_first=True, to_host=False)
        for i in (5, 4, 3):
            assert kept[i].take().item() == i
        assert torch.cat(fetched).tolist() == [5, 4, 3]
        kept[2].take()
    assert torch.cat(fetched).tolist() == [5, 4, 3, 2, 1]


def test_an_input_comes_back_in_its_strides() -> None:
    inputs = HostInputs(CopyStream("cpu"))
    for x in (torch.randn(3, 4, 5).transpose(0, 2), torch.randn(4, 6)[:, ::2], torch.randn(0, 3)):
        kept = inputs.keep(x, is_first=True, to_host=True)
        inputs.keep(x, is_first=True, to_host=True)
        back = kept.take()
        assert back.equal(x)
        assert back.data_ptr() != x.data_ptr() or not x.numel()
        assert back.stride() == torch.empty_like(x).stride()


def test_without_gradients_nothing_is_kept() -> None:
    model = model_of(ActivationCheckpoint("full", offload="inputs", offload_keep_last=0))
    with mock.patch.object(HostInputs, "keep", side_effect=AssertionError), torch.no_grad():
        model(torch.zeros(2, 64, dtype=torch.int64))


class Hides(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * 1.0).square()


def test_an_input_that_is_not_seen_is_an_error() -> None:
    layers = nn.ModuleDict({"0": Hides()})
    apply_offload(layers, ActivationCheckpoint("full", offload="inputs", offload_keep_last=0), "cpu")
    with pytest.raises(RuntimeError, match="'inputs', or a group of layers, has not seen the input of a layer"):
        layers["0"](torch.ones(3, requires_grad=True))


def test_host_memory_of_a_gpu_is_locked_as_long_as_it_is_there() -> None:
    copies, runtime = CopyStream("cpu"), mock.Mock()
    copies._device = torch.device("cuda")
    runtime.cudaHostRegister.return_value = 0
    with mock.patch.object(torch.cuda, "cudart", return_value=runtime):
        buffer = copies.host_like(torch.zeros(3, 4))
        place = buffer.data_ptr()
        runtime.cudaHostRegister.assert_called_once_with(place, 48, 0)
        runtime.cudaHostUnregister.assert_not_called()
        del buffer
        runtime.cudaHostUnregister.assert_called_once_with(place)
        runtime.cudaHostRegister.return_value = 2
        with pytest.raises(MemoryError, match=r"cannot lock 48 more bytes of host memory \(CUDA error 2\)"):
            copies.host_like(torch.zeros(3, 4))
