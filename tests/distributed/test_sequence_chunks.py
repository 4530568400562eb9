"""Laws of a sequence in chunks: nothing changes but memory, which falls with the number of chunks."""

import weakref
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from unittest import mock

import pytest
import torch

from longshard.context import regions
from longshard.context.execution.chunks import ChunkRows, OnDevice
from longshard.sharding.ranges import Ranges
from scripts.benchmarks.activation_checkpointing import Meter
from tests.distributed.harness import TINY, Record, assert_parity, run_layout, trainer_of
from tests.distributed.pool import RankFailedError, WorkerPool
from tests.distributed.test_offload import COMPILE, FP64, FULL
from tests.distributed.test_parity import LAYOUTS, reference
from tests.slow import slow
from trainer.transforms.offload import CopyStream

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
    "latents, documents": [DOCUMENTS, "--model.name=deepseek_v3"],
    "chosen keys, documents": [DOCUMENTS, "--model.name=deepseek_v32"],
    "tied embeddings": ["--model.flavor=tiny_tied"],
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


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("how", ["plain", "offload"])
def test_nor_do_they_with_any_model(pool: WorkerPool, model: str, how: str) -> None:
    assert_chunks_change_nothing(pool, "one", MODELS[model], HOW[how])


@pytest.mark.slow
@pytest.mark.parametrize("how", HOW)
def test_nor_with_what_saves_memory(pool: WorkerPool, how: str) -> None:
    assert_chunks_change_nothing(pool, "one", MODELS["windows, documents"], HOW[how])


@pytest.mark.parametrize(
    ("layout", "how"),
    [("hsdp2x2", "plain"), ("fsdp2+tp2", "full, inputs offloaded"), *slow(*((x, "op") for x in SHARDED))],
)
def test_nor_over_ranks(pool: WorkerPool, layout: str, how: str) -> None:
    assert_chunks_change_nothing(pool, layout, MODELS["windows, documents"], HOW[how])


@pytest.mark.slow
def test_nor_with_float8(pool: WorkerPool) -> None:
    float8 = ["--float8.enable", "--float8.recipe_name=rowwise", "--float8.emulate"]
    got = pool.run(1, run_layout, [CHUNKS, *float8])[0]
    assert_parity(got, reference(pool, *float8), 1e-2)


def faulty_layout(fault: str) -> Record:
    """A run with a known mistake."""
    real = ChunkRows.add

    def add(self: ChunkRows, key: tuple[int, int], ranges: Ranges, gradient: torch.Tensor) -> None:
        real(self, key, ranges, gradient.zero_() if fault == "gradients of earlier chunks are dropped" else gradient)

    def copy(self: CopyStream, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source).mul_(1 + 1e-6 * (fault == "other values come back from the host"))

    with mock.patch.object(ChunkRows, "add", add), mock.patch.object(CopyStream, "copy", copy):
        return run_layout([FP64, CHUNKS, OFFLOAD])


@pytest.mark.parametrize(
    "fault", ["gradients of earlier chunks are dropped", *slow("other values come back from the host")]
)
def test_a_mistake_is_seen(pool: WorkerPool, fault: str) -> None:
    with pytest.raises(AssertionError, match=r"gradient of layers\.0\.attention\.wk"):
        assert_parity(pool.run(1, faulty_layout, fault)[0], reference(pool, FP64), 1e-7)
    assert_parity(pool.run(1, faulty_layout, "")[0], reference(pool, FP64), 1e-10)


# ---- memory


@dataclass
class Waiting:
    """Makes tensors wait on the device, and counts those that do."""

    alive: list[weakref.ref[torch.Tensor]] = field(default_factory=list)
    peak: int = 0

    def keep(self, tensor: torch.Tensor) -> OnDevice:
        self.alive.append(weakref.ref(tensor))
        here = {id(x): x.nbytes for x in (ref() for ref in self.alive) if x is not None}
        self.peak = max(self.peak, sum(here.values()))
        return OnDevice(tensor)


def memory_case(arguments: list[str]) -> tuple[int, int]:
    """Bytes that a micro-batch of one row makes outside attention at most, and bytes of keys and values that wait."""
    settings = ["--training.seq_len=512", "--training.local_batch_size=1", "--training.global_batch_size=-1"]
    settings += ["--activation_checkpoint.mode=full", "--training.loss_chunk_tokens=8"]
    with trainer_of([*settings, *arguments]) as trainer:
        (batch,) = trainer.take_batches(1)
        (model,), waiting = trainer.model_parts, Waiting()
        trainer.task.keep_rows = waiting.keep
        model.layers.requires_grad_(False)  # gradients of weights are not what this is about
        tensors = [x for x in batch.values() if isinstance(x, torch.Tensor)]
        with Meter(*model.parameters(), *model.buffers(), *tensors) as meter:
            trainer.forward_backward(batch, torch.tensor(1), last=True)
    return meter.peak, waiting.peak


def test_memory_of_activations_is_that_of_one_chunk(pool: WorkerPool) -> None:
    """In addition, K/V and dK/dV of all layers and of all chunks except the last wait."""
    peaks = {n: pool.run(1, memory_case, [f"--training.sequence_chunks={n}"])[0] for n in (2, 4, 8)}
    activations = {chunks: peak for chunks, (peak, _) in peaks.items()}
    assert activations[2] - activations[4] == pytest.approx(2 * (activations[4] - activations[8]), rel=1e-2)
    assert activations[4] - activations[8] > 0.4 * activations[4]
    row = 2 * TINY.n_kv_heads * TINY.head_dim * TINY.n_layers
    for chunks, (_, waiting) in peaks.items():
        assert waiting == (512 - 512 // chunks) * row * (4 + 4), chunks


def test_only_rows_that_a_later_chunk_sees_wait(pool: WorkerPool) -> None:
    """With a window of 9 the last 8 tokens of each chunk but the last."""
    ((_, waiting),) = pool.run(1, memory_case, ["--training.sequence_chunks=4", "--model.sliding_window=9"])
    # A chunk's gradients exist when the gradients of the next chunk are taken.
    row = 2 * TINY.n_kv_heads * TINY.head_dim * TINY.n_layers
    assert 3 * 8 * row * 4 <= waiting <= (3 + 2) * 8 * row * 4


def offload_case(arguments: list[str]) -> int:
    """Bytes on the host."""
    with trainer_of([CHUNKS, *arguments]) as trainer, mock.patch.object(CopyStream, "host_like", autospec=True) as made:
        made.side_effect = lambda _, x: torch.empty_like(x)
        trainer.train_step(1)
        return sum(call.args[1].nbytes for call in made.call_args_list)


def test_rows_wait_on_the_host_if_asked(pool: WorkerPool) -> None:
    """K/V and dK/dV wait, and a spare buffer for a sum that is written before the earlier sum is free."""
    row = 2 * TINY.n_kv_heads * TINY.head_dim * TINY.n_layers * 2 * 4  # two sequences
    rows = 6 + 5
    assert pool.run(1, offload_case, [])[0] == 0
    assert 2 * rows * row <= pool.run(1, offload_case, [OFFLOAD])[0] <= 2.5 * rows * row


@dataclass(eq=False)
class Noted:
    """A tensor that waits, and notes whether it was fetched before it is taken."""

    tensor: torch.Tensor
    noted: Counter[str]
    fetched: bool = False

    def fetch(self) -> torch.Tensor:
        self.fetched = True
        return self.tensor

    def take(self) -> torch.Tensor:
        self.noted["ahead" if self.fetched else "late"] += 1
        self.fetched = False
        return self.tensor


def waiting_case() -> tuple[Counter[str], int]:
    """Count how often waiting tensors are fetched ahead or late, and how many still wait at the end."""
    noted: Counter[str] = Counter()
    rows = ChunkRows(partial(Noted, noted=noted))
    with trainer_of([CHUNKS]) as trainer, mock.patch.object(regions, "ChunkRows", return_value=rows):
        trainer.forward_backward(trainer.take_batches(1)[0], torch.tensor(1), last=True)
    return noted, len(rows.rows) + len(rows.gradients)


def test_rows_and_sums_are_fetched_one_chunk_ahead(pool: WorkerPool) -> None:
    """The sums of the first chunk are an exception: no chunk is fetched before it."""
    ((noted, _),) = pool.run(1, waiting_case)
    assert noted["late"] == TINY.n_layers
    # Rows: by chunk 1 in the first pass, by 1 and 2 in the second, forward and backward. Sums: of 0 and 1 by chunk 1.
    assert noted["ahead"] == TINY.n_layers * (1 + 2 * (1 + 2) + 2)


def test_rows_go_with_the_backward_of_their_chunk(pool: WorkerPool) -> None:
    ((_, left),) = pool.run(1, waiting_case)
    assert left == 0


# ---- values of tokens


def losses_case(arguments: list[str]) -> list[torch.Tensor]:
    """The losses of tokens that observers see in the first micro-batch, and their sums for each row."""
    with trainer_of([FP64, *arguments]) as trainer:
        seen, batch = [], trainer.take_batches(1)[0]
        observer = trainer.observers[0]
        with mock.patch.object(observer, "losses", lambda _, losses: seen.append(losses.clone())):
            sums, _ = trainer.forward_backward(batch, torch.tensor(1), last=True)
    return [*seen, sums]


def test_losses_of_tokens_are_in_their_order(pool: WorkerPool) -> None:
    whole, chunked = (pool.run(1, losses_case, how)[0] for how in ([], [CHUNKS]))
    for one, other in zip(whole, chunked, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def unnumbered_case() -> None:
    with mock.patch("trainer.models.decoder.with_layer", lambda handle, _: handle), trainer_of([CHUNKS]) as trainer:
        trainer.train_step(1)


def test_a_model_that_numbers_no_layers_is_an_error(pool: WorkerPool) -> None:
    with pytest.raises(RankFailedError, match="a handle that names no layer; let the model"):
        pool.run(1, unnumbered_case)
