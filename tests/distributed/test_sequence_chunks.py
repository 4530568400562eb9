"""Laws of a sequence in chunks: nothing changes but memory, which falls with the number of chunks."""

import pytest
import torch

from scripts.benchmarks.activation_checkpointing import Meter
from tests.distributed.harness import assert_parity, run_layout, trainer_of
from tests.distributed.pool import WorkerPool
from tests.distributed.test_offload import COMPILE, FP64, FULL
from tests.distributed.test_parity import LAYOUTS, reference
from tests.slow import slow
from trainer.models.auxiliary_loss import normalise_auxiliary_losses

CHUNKS, OFFLOAD = "--training.sequence_chunks=3", "--training.sequence_chunks_offload"
# Sequences have 16 tokens, so that chunks have 5 or 6, and most documents cross a border.
DOCUMENTS = "--training.attention_mask=document"
MODELS = {
    "causal": [],
    "documents": [DOCUMENTS],
    "documents, one row": [DOCUMENTS, "--training.local_batch_size=1"],
    "windows shorter than a chunk": ["--model.sliding_window=3"],
    "windows longer than a chunk": ["--model.sliding_window=9", "--model.sliding_window_every=2"],
    "windows, documents": [DOCUMENTS, "--model.sliding_window=7", "--model.sliding_window_every=2"],
    "sinks, documents": [DOCUMENTS, "--model.attention_sinks"],
    "gpt-oss: experts, windows, sinks, documents": [DOCUMENTS, "--model.name=gpt_oss"],
    "experts with an auxiliary loss": ["--model.name=qwen3_moe"],
    "tied embeddings": ["--model.flavor=tiny_tied"],
    "adapters": ["--lora.rank=4"],
    "adapters of one matrix": ["--lora.rank=4", "--lora.modules", "w1"],
    "one micro-batch": ["--training.global_batch_size=-1"],
}
HOW = {
    "plain": [],
    "offload": [OFFLOAD],
    "math": ["--parallelism.context_parallel_kernel=math"],
    "full": ["--activation_checkpoint.mode=full"],
    "every 2nd layer": ["--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=2"],
    "op": ["--activation_checkpoint.mode=selective", OFFLOAD],
    "full, inputs offloaded": [*FULL, OFFLOAD],
    "feed-forward in parts": ["--activation_checkpoint.mode=full", "--activation_checkpoint.mlp_chunk_tokens=2"],
    "loss in chunks": ["--training.loss_chunk_tokens=4"],
    "compiled": [*COMPILE, "--activation_checkpoint.mode=full"],
    "budget": [*COMPILE, "--activation_checkpoint.mode=memory_budget", OFFLOAD],
    "op, compiled": [*COMPILE, "--activation_checkpoint.mode=selective"],
    "CPU offload": ["--training.enable_cpu_offload"],
}
SHARDED = ["fsdp2", "ddp2", "tp2", "hsdp2x2", "fsdp2+tp2", "hsdp2x2+tp2"]


def assert_chunks_change_nothing(pool: WorkerPool, layout: str, model: list[str], how: list[str]) -> None:
    world_size, arguments = LAYOUTS.get(layout, (1, []))
    chunks = [] if any("sequence_chunks=" in setting for setting in how) else [CHUNKS]
    got = pool.run(world_size, run_layout, [FP64, *chunks, *arguments, *model, *how])[0]
    assert_parity(got, reference(pool, FP64, *model), 1e-10)


@pytest.mark.parametrize("chunks", [7, *slow(2, 3, 16)])
@pytest.mark.parametrize("model", ["causal", "windows, documents"])
def test_losses_gradients_and_weights_do_not_change(pool: WorkerPool, chunks: int, model: str) -> None:
    assert_chunks_change_nothing(pool, "one", MODELS[model], [f"--training.sequence_chunks={chunks}"])


@pytest.mark.parametrize("model", [*slow(*MODELS)])
@pytest.mark.parametrize("how", ["plain", "offload"])
def test_nor_do_they_with_any_model(pool: WorkerPool, model: str, how: str) -> None:
    assert_chunks_change_nothing(pool, "one", MODELS[model], HOW[how])


@pytest.mark.parametrize("model", ["windows, documents"])
@pytest.mark.parametrize("how", [*slow(*HOW)])
def test_nor_with_what_saves_memory(pool: WorkerPool, model: str, how: str) -> None:
    assert_chunks_change_nothing(pool, "one", MODELS[model], HOW[how])


@pytest.mark.parametrize(
    ("layout", "how"), [("fsdp2+tp2", "full, inputs offloaded"), *slow(*((x, "op") for x in SHARDED))]
)
def test_nor_over_ranks(pool: WorkerPool, layout: str, how: str) -> None:
    assert_chunks_change_nothing(pool, layout, MODELS["windows, documents"], HOW[how])


def peak_case(arguments: list[str]) -> int:
    """Bytes that a micro-batch of one row makes at most; the weights of the layers have no gradients."""
    settings = ["--training.seq_len=512", "--training.local_batch_size=1", "--training.global_batch_size=-1"]
    settings += ["--activation_checkpoint.mode=full", "--training.loss_chunk_tokens=8"]
    with trainer_of([*settings, *arguments]) as trainer:
        (batch,) = trainer.take_batches(1)
        (model,) = trainer.model_parts
        model.layers.requires_grad_(False)
        tensors = [x for x in batch.values() if isinstance(x, torch.Tensor)]
        normalise_auxiliary_losses(model, torch.tensor(1))
        with Meter(*model.parameters(), *model.buffers(), *tensors) as meter:
            trainer.forward_backward(batch, torch.tensor(1), last=True)
    return meter.peak
