"""The parity harness: compares a layout's losses, gradients, norms and weights with a single process.

Every layout trains on the same rows: row i is made from i, and data-parallel rank r of D takes rows r, r + D, ...
Rows have different numbers of labels, and every odd row of the first step has none, so that some ranks have no label.
With packed documents some rows end with padding.
"""

import json
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from longshard.context.attention import ContextParallelAttention
from longshard.context.convolution import ContextParallelConvolution
from longshard.context.live import own_positions
from longshard.context.planning.options import BatchPlan
from tests.hf_families import GEMMA4_EXPERTS, GEMMA4_SHARED, MODELS
from trainer.config.data import CONVERSATIONS
from trainer.config.loader import parse_command_line
from trainer.config.schema import JobConfig
from trainer.data.packing import IGNORE_INDEX, NO_POSITION
from trainer.families.decoder_args import TransformerArgs
from trainer.families.feed_forward_args import ExpertArgs
from trainer.families.layer_kinds import LayerKind, RopeScaling
from trainer.job import ResolvedJob, resolve
from trainer.models import decoder
from trainer.models.decoder import Transformer
from trainer.parallel import data_parallel
from trainer.parallel.parallel_dims import ParallelDims
from trainer.runtime.process_group import Process, process_group
from trainer.tasks.language import LanguageTask
from trainer.tasks.rank_batch import RankBatch
from trainer.tasks.task import Batch, Task
from trainer.trainer import Trainer

STEPS = 2
VOCAB = 128
TINY = TransformerArgs(dim=64, n_layers=2, n_heads=16, n_kv_heads=8, ffn_hidden_dim=96)
# For the ranks of the pool only: in the test process the list of flavors is what the program offers.
TEST_FLAVORS = {
    "tiny": TINY,
    "tiny_tied": replace(TINY, tie_embeddings=True),
    "tiny4": replace(TINY, n_layers=4),
}
TINY_EXPERTS = replace(TINY, experts=ExpertArgs(4, 2, 48), router_aux_loss_coef=0.5, qk_norm=True)
TINY_GPT_OSS = replace(
    TINY_EXPERTS,
    experts=ExpertArgs(4, 2, 48, biases=True, clamped=True),
    attention_bias=True,
    output_bias=True,
    qk_norm=False,
    attention_sinks=True,
    sliding_window=5,
    layers=(LayerKind(), LayerKind(window=False)),
    rope_scaling=RopeScaling(32.0, original_max_seq_len=4, kind="yarn", truncate=False),
)
# The same of other families.
FAMILY_FLAVORS = {
    "qwen3": {
        "tiny": replace(TINY, qk_norm=True, head_size=8),
        "tiny_biased": replace(TINY, qk_norm=True, head_size=8, attention_bias=True, output_bias=True),
    },
    "mistral": {"tiny": replace(TINY, sliding_window=5)},
    "qwen3_moe": {"tiny": TINY_EXPERTS, "tiny4": replace(TINY_EXPERTS, n_layers=4)},
    "gpt_oss": {"tiny": TINY_GPT_OSS, "tiny4": replace(TINY_GPT_OSS, n_layers=4)},
}
# Of each other family its first shape there, with heads for two ranks, and without a tied matrix for pipelines.
FAMILY_FLAVORS |= {
    family: {"tiny": replace(args, dim=64, n_heads=16, n_kv_heads=8, head_size=8, tie_embeddings=False)}
    for family, args in reversed(list(MODELS.values()))
    if family not in FAMILY_FLAVORS
}
FAMILY_FLAVORS["gemma4"] |= {
    name: replace(args, dim=64, n_heads=16, n_kv_heads=8, head_size=8)
    for name, args in (("tiny_shared", GEMMA4_SHARED), ("tiny_experts", GEMMA4_EXPERTS))
}

# Small enough to be quick, odd enough to be strict; a case's own arguments come after.
BASE = [
    "--model.flavor=tiny",
    "--training.seq_len=16",
    "--training.global_batch_size=8",
    "--training.local_batch_size=2",
    f"--training.steps={STEPS}",
    "--training.max_norm=0.5",
    "--optimizer.lr=1e-3",  # Adam turns the rounding of a gradient near zero into a whole step of this size
    "--lr_scheduler.warmup_steps=1",
    "--metrics.log_freq=1",
]

FUSED = "--optimizer.implementation=fused"
"""The implementation that GPUs use. With the other one, a short run over ranks would spend most of its time in DTensor,
which handles each operator for each new mesh."""


@dataclass
class Record:
    """The results of a run: whole tensors in the reference's shapes; lists have one entry for each step."""

    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    """The gradients that the optimizer gets, clipped."""
    limits: list[float] = field(default_factory=list)
    """The largest norm of all gradients together that clipping allows."""
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    """At the end, like the weights."""
    metrics: list[dict] = field(default_factory=list)
    local_elements: int = 0
    """Elements of parameters that this rank holds."""


@dataclass(frozen=True)
class Rows:
    """A loader of made batches."""

    batches: Callable[[], Iterator[Batch]]
    epoch: float = 0.0

    def __iter__(self) -> Iterator[Batch]:
        return self.batches()

    def state_dict(self) -> dict[int, dict[str, int]]:
        return {}


EXPORTED = ["--checkpoint.enable", "--checkpoint.last_save_in_hf"]
_POSITION = {0: {"samples": 0, "seed": 0, "data_streams": 8}}


def exported(trainer: Trainer, step: int) -> Path:
    """Save the last step of a job with `EXPORTED`; return the Hugging Face folder next to the checkpoint."""
    with mock.patch.object(Rows, "state_dict", return_value=_POSITION):
        trainer.checkpoint.save(step, tokens_seen=0, last=True)
    return trainer.checkpoint.folder.path / f"step-{step}-hf"


class MadeRows(LanguageTask):
    """The real task on made-up rows."""

    def __init__(self, job: ResolvedJob, dims: ParallelDims, fault: str | None) -> None:
        super().__init__(job, dims)
        self.fault = fault

    def open_loader(
        self, plan: Callable[[Mapping[str, np.ndarray]], BatchPlan] | None = None, exchange: Callable = iter
    ) -> Rows:
        return Rows(lambda: exchange(self.batches_of_rows(plan)))

    def batches_of_rows(self, plan: Callable[[Mapping[str, np.ndarray]], BatchPlan] | None) -> Iterator[Batch]:
        training = self.config.training
        degree, i = self.dims.size("dp"), self.dims.rank("dp")
        while True:
            rows, numbers, padded = [], [], 0
            for _ in range(training.local_batch_size):
                no_labels = i < training.global_batch_size and i % 2 == 1
                padding = i % 4 if self.config.masks_documents else 0
                rows.append(make_row(i, training.seq_len, no_labels=no_labels, padding=padding))
                numbers.append(i)
                i, padded = i + degree, padded + padding
            batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
            arrays = {name: x.numpy().copy() for name, x in batch.items()}
            batch |= {"padding": padded, "numbers": numbers}
            yield batch | ({} if plan is None else {"plan": plan(arrays)})

    @contextmanager
    def sequence_context(self, whole: RankBatch, *arguments: object) -> Iterator[torch.Tensor | None]:
        with super().sequence_context(whole, *arguments) as plan:
            if self.fault == "labels shifted after cutting":
                labels = whole.columns["labels"]
                labels[:, :-1] = whole.columns["tokens"][:, 1:]  # what a rank can know of its part alone
                labels[:, -1] = IGNORE_INDEX
            yield plan


class RecordingTrainer(Trainer):
    """The real trainer on made-up rows; it records its gradients, weights and metrics."""

    def __init__(self, *args, record: Record, fault: str | None = None) -> None:
        self.record = record
        self.fault = fault
        super().__init__(*args)

    def build_task(self) -> Task:
        return MadeRows(self.job, self.dims, self.fault) if makes_rows(self.job) else super().build_task()

    def optimizer_step(self, norm: float | torch.Tensor) -> None:
        super().optimizer_step(norm)
        self.record.gradients.append(self.gather_stages(settled_gradient))  # clipped; the update has left them
        self.record.limits.append(min(float(norm), self.config.training.max_norm))

    def gather_stages(
        self, value: Callable[[torch.Tensor], torch.Tensor | None], named: Callable = nn.Module.named_parameters
    ) -> dict[str, torch.Tensor]:
        """A tensor for every parameter, or whatever is `named`, of the model, by name; a collective.

        None, such as the gradient of a frozen parameter, is left out.
        """
        tensors = {name: value(x) for part in self.model_parts for name, x in named(part)}
        tensors = {name: whole(x) for name, x in tensors.items() if x is not None}
        tensors_of_ranks: list[dict[str, torch.Tensor]] = [{} for _ in range(self.dims.size("pp"))]
        torch.distributed.all_gather_object(tensors_of_ranks, tensors, group=self.dims["pp"].get_group())
        return {name: x for stages in tensors_of_ranks for name, x in stages.items()}


def make_row(i: int, seq_len: int, *, no_labels: bool = False, padding: int = 0) -> dict[str, torch.Tensor]:
    """Return global row i: random tokens in documents, and labels. The share of missing labels depends on i.

    padding: tokens at the end, a document of their own without labels and positions.
    """
    generator = torch.Generator().manual_seed(1000 + i)
    text = torch.randint(VOCAB, (seq_len + 1,), generator=generator)
    hidden = torch.rand(seq_len, generator=generator) < (1.0 if no_labels else (i % 7) / 8)
    starts = (torch.rand(seq_len, generator=generator) < 0.2).long().index_fill_(0, torch.tensor([0]), 1)
    places, end = torch.arange(seq_len), seq_len - padding
    hidden[end:] = True
    starts[end:] = torch.arange(padding) == 0
    return {
        "tokens": text[:-1].clone(),
        "labels": text[1:].masked_fill(hidden, IGNORE_INDEX),
        "positions": (places - (places * starts).cummax(0).values).masked_fill(places >= end, NO_POSITION),
        "document_ids": starts.cumsum(0) - 1,
    }


def makes_rows(job: ResolvedJob) -> bool:
    """Return whether a job trains on made-up rows; fields and conversations come from its data set."""
    return job.model.task == "tokens" and job.config.training.dataset not in CONVERSATIONS


def settled_gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    """The gradient, which must lie as its parameter does: a partial sum would be whole in `full_tensor` alone."""
    gradient = parameter.grad
    if isinstance(parameter, DTensor) and parameter.requires_grad:
        assert gradient.placements == parameter.placements, (gradient.placements, parameter.placements)
    return gradient


def whole(x: torch.Tensor) -> torch.Tensor:
    """The full tensor, on the CPU; a collective for a tensor that is cut."""
    x = x.detach()
    return (x.full_tensor() if isinstance(x, DTensor) else x).cpu().clone()


def resolved(config: JobConfig, process: Process) -> ResolvedJob:
    """The job on this rank's device, for made-up rows; by default it computes in the data type of its weights.

    On GPUs the default of the program is bfloat16, which no bound of parity fits.
    """
    training = config.training
    if (training.dtype, training.mixed_precision_param) == ("float32", "auto"):
        config = replace(config, training=replace(training, mixed_precision_param="float32"))
    job = resolve(config, process.world_size, process.device.type)
    return replace(job, model=replace(job.model, vocab_size=VOCAB)) if makes_rows(job) else job


@contextmanager
def trainer_of(arguments: list[str]) -> Iterator[RecordingTrainer]:
    """The trainer of BASE and `arguments` on this rank, for a case that steps by itself."""
    process = Process.from_environment()
    with tempfile.TemporaryDirectory() as folder:
        config = parse_command_line([*BASE, f"--job.dump_folder={folder}", *arguments]).config
        with process_group(process, config.comm, cpu_tensors=config.training.enable_cpu_offload):
            trainer = RecordingTrainer(resolved(config, process), process.device, record=Record())
            yield trainer
            trainer.metrics.close()


def run_layout(arguments: list[str], fault: str | None = None, settings: Sequence[str] = (*BASE, FUSED)) -> Record:
    """On each rank: train STEPS steps, unless the arguments say more.

    Args:
        arguments: of the program, after `settings`.
        fault: a known mistake, see `planted`.
        settings: what most runs share.

    Returns:
        What the run did; on other ranks than the first the number of elements alone.
    """
    process = Process.from_environment()
    with tempfile.TemporaryDirectory() as folder:
        config = parse_command_line([*settings, f"--job.dump_folder={folder}", *arguments]).config
        job = resolved(config, process)
        record = Record()
        with process_group(process, config.comm, cpu_tensors=config.training.enable_cpu_offload), planted(fault):
            trainer = RecordingTrainer(job, process.device, record=record, fault=fault)
            for step in range(1, config.training.steps + 1):
                trainer.train_step(step)
            trainer.metrics.close()
            for p in (p for part in trainer.model_parts for p in part.parameters()):
                record.local_elements += (p.to_local() if isinstance(p, DTensor) else p).numel()
            record.weights = trainer.gather_stages(lambda p: p)
            named_buffers = partial(nn.Module.named_buffers, remove_duplicate=False)
            record.buffers = trainer.gather_stages(lambda x: x, named_buffers)
        if process.rank == 0:
            lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
            record.metrics = [json.loads(line) for line in lines]
            return record
    return Record(local_elements=record.local_elements)  # one copy is enough to send home


@contextmanager
def planted(fault: str | None) -> Iterator[None]:
    """Make the mistake that a negative control is about."""
    real = data_parallel.fully_shard

    def leave_out_a_parameter(module: nn.Module, **settings: object) -> nn.Module:
        if isinstance(module, Transformer):
            settings["ignored_params"] = {module.norm.weight}
        return real(module, **settings)

    def average(module: FSDPModule, _: object) -> None:
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(float(torch.distributed.get_world_size()))

    if fault == "gradients averaged":
        with mock.patch.object(data_parallel, "sum_gradients", average):
            yield
    elif fault == "one parameter not reduced":
        with mock.patch.object(data_parallel, "fully_shard", leave_out_a_parameter):
            yield
    elif fault == "attention not under CP":
        with mock.patch.object(ContextParallelAttention, "_apply", lambda _self, module, _mesh: module):
            yield
    elif fault == "convolution not under CP":
        with mock.patch.object(ContextParallelConvolution, "_apply", lambda _self, module, _mesh: module):
            yield
    elif fault == "positions of the first rank":
        with mock.patch.object(decoder, "own_positions", lambda *args: torch.arange(len(own_positions(*args)))):
            yield
    else:
        yield


def assert_parity(got: Record, wanted: Record, tolerance: float) -> None:
    """Relative differences of losses, norms, and of each tensor in its Euclidean norm, all at most `tolerance`."""
    problems = []

    def compare(label: str, a: torch.Tensor | float, b: torch.Tensor | float) -> None:
        a, b = (torch.as_tensor(x, dtype=torch.float64) for x in (a, b))
        error = (a - b).norm().item()
        scale = b.norm().item()
        # An exact zero must be met exactly, and a NaN is never near.
        if not (error <= tolerance * scale and math.isfinite(error)):
            problems.append(f"{label}: {error / scale if scale else error:.1e}")

    assert len(got.metrics) == len(wanted.metrics) >= STEPS
    for step, (ours, theirs) in enumerate(zip(got.metrics, wanted.metrics, strict=True), 1):
        for key in ("loss", "loss_max", "grad_norm", "lr", "tokens_seen"):
            compare(f"step {step} {key}", ours[key], theirs[key])
    for step, (ours, theirs) in enumerate(zip(got.gradients, wanted.gradients, strict=True), 1):
        assert ours.keys() == theirs.keys()
        for name, grad in theirs.items():
            compare(f"step {step} gradient of {name}", ours[name], grad)
        # Clipping is part of both runs: what it promises is checked by itself.
        norm = math.sqrt(sum(grad.double().square().sum().item() for grad in ours.values()))
        compare(f"step {step} norm after clipping", norm, got.limits[step - 1])
    for kind, ours, theirs in (("weight", got.weights, wanted.weights), ("buffer", got.buffers, wanted.buffers)):
        assert ours.keys() == theirs.keys()
        for name, x in theirs.items():
            compare(f"{kind} {name}", ours[name], x)
    assert not problems, "\n".join(problems)
