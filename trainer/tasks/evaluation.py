"""Measurements by forwards alone, which leave training as it is: validation, loss by position, retrieval of a needle.

All validation documents are one stream, in a fixed order. Global sequence i belongs to data-parallel rank i % D, so
that the sequences, and the loss up to rounding, are the same on every layout. Every rank makes all of them and keeps
its own. The other measurements share sequences and forwards in the same way.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, pairwise
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from longshard.sharding.exchange import all_reduce
from trainer.components.loss import token_losses, whole_logits, whole_sequence
from trainer.components.step_metrics import ValidationResult, perplexity
from trainer.config.errors import ConfigError
from trainer.data.evaluation import NeedlePrompt
from trainer.data.job_data import open_text, validation_data
from trainer.data.loader import TextBatch, arrays_of, tensors_of
from trainer.data.packing import IGNORE_INDEX, PackedSequence
from trainer.data.token_files.catalog import catalog_of
from trainer.job.record import ResolvedJob
from trainer.models.decoder import rotated_until
from trainer.models.model_spec import Decoder
from trainer.parallel.parallel_dims import ParallelDims
from trainer.parallel.pipeline_parallel import Pipeline
from trainer.runtime.agreement import once_a_node
from trainer.tasks.language import LanguageTask
from trainer.tasks.task import RankInputs
from trainer.transforms.float8 import precompute_scales

Measure = Callable[[Decoder, torch.Tensor, RankInputs], None]
"""What is done with the hidden states of a forward: (part with the output, hidden states, share or a chunk of it)."""


def own_batches(
    sequences: Iterable[PackedSequence], rows: int, dims: ParallelDims
) -> Iterator[tuple[list[int], dict[str, np.ndarray]]]:
    """Yield the forwards of this rank, as many as of every other rank: the numbers of its sequences, and arrays.

    rows: sequences of a forward; the arrays have so many: tokens, labels, positions, document ids, (rows, S). Rows that
    fill up the last forward have no label and no number.
    """
    rank = dims.rank("dp")
    degree = dims.size("dp")
    done = 0
    sequences = iter(sequences)
    for first in sequences:
        together = [first, *islice(sequences, rows * degree - 1)]
        mine = together[rank::degree]
        filling = [first] * (rows - len(mine))
        arrays = arrays_of(chain(mine, filling))
        arrays["labels"][len(mine) :] = IGNORE_INDEX
        yield list(range(done + rank, done + len(together), degree)), arrays
        done += len(together)


@torch.no_grad()
def forward_only(
    task: LanguageTask,
    model_parts: Sequence[nn.Module],
    pipeline: Pipeline | None,
    batches: Iterable[TextBatch],
    measure: Measure,
) -> None:
    """Run the forwards of batches, and call `measure` after each, on ranks that have its hidden states."""
    for part in model_parts:
        # those of the step are of the weights before its update
        precompute_scales(part, task.config)
    for batch in batches:
        with task.batch_context(batch, model_parts) as share:
            for part in share.parts:
                hidden = (pipeline or model_parts[0])(part.inputs, **part.arguments)
                if hidden is not None:
                    measure(model_parts[-1], hidden, part)
    reshard(model_parts)


def reshard(model_parts: Sequence[nn.Module]) -> None:
    """Free the weights that FSDP has gathered for forwards which no backward follows."""
    for module in chain.from_iterable(part.modules() for part in model_parts):
        if isinstance(module, FSDPModule):
            module.reshard()


class Validation:
    """The validation of one job on this rank.

    task: of training, whose loss and attention are used.
    """

    def __init__(self, job: ResolvedJob, dims: ParallelDims, task: LanguageTask) -> None:
        self.dims, self.task = dims, task
        settings = job.config.validation
        training = job.config.training
        self.settings = settings
        self.seq_len = settings.seq_len or training.seq_len
        self._rows = settings.local_batch_size or training.local_batch_size
        data = validation_data(job.config)
        catalog = once_a_node(lambda: catalog_of(data), dims["world"])
        self._data = open_text(data, training.packing, catalog)
        if next(self.sequences(), None) is None:
            raise ConfigError(
                f"the validation data hold less than one sequence of {self.seq_len} tokens; give more data or a lower "
                "validation.seq_len"
            )

    @property
    def identity(self) -> dict[str, int]:
        """What decides the validation data, by name."""
        return self._data.describe(self._data.items, self.seq_len)

    def due(self, step: int, *, last: bool) -> bool:
        """Return whether this step is validated: every `validation.freq`-th, and the last one."""
        return last or step % self.settings.freq == 0

    def sequences(self) -> Iterator[PackedSequence]:
        """Yield whole packed sequences of one pass over the documents, at most `validation.sequences` of them."""
        stream = self._data.stream(
            range(self._data.items), stream=0, seq_len=self.seq_len, seed=0
        )
        wanted = self.settings.sequences
        while not wanted or stream.samples < wanted:
            sequence = stream.next_sample()
            if stream.passes > 1 or (stream.passes == 1 and stream.state.get("token")):
                return  # it begins at the end of the last document and continues with the first
            yield sequence

    def batches(self) -> Iterator[TextBatch]:
        """Yield this rank's batches, as many as every other rank has; rows that fill up the last one have no label."""
        for _, arrays in own_batches(self.sequences(), self._rows, self.dims):
            plan = self.task.batch_planner
            yield (
                tensors_of(arrays)
                if plan is None
                else tensors_of(arrays) | {"plan": plan(arrays)}
            )

    def run(
        self, model_parts: Sequence[nn.Module], pipeline: Pipeline | None
    ) -> ValidationResult:
        """Return the loss of the whole validation set. A collective over all ranks."""
        started = time.monotonic()
        losses, counts = torch.zeros(
            2, 1, dtype=torch.float64, device=self.dims["world"].device_type
        )

        def counted() -> Iterator[TextBatch]:
            for batch in self.batches():
                counts.add_(self.task.counts(batch).sum())
                yield batch

        def measure(part: Decoder, hidden: torch.Tensor, share: RankInputs) -> None:
            losses.add_(self.task.losses(part, hidden, share.targets).double().sum())

        forward_only(self.task, model_parts, pipeline, counted(), measure)
        total = all_reduce(losses / self.dims.size("tp"), self.dims["world"]).item()
        tokens = int(all_reduce(counts, self.dims["dp"]).item())
        return ValidationResult(total / max(tokens, 1), tokens, time.monotonic() - started)


@dataclass(frozen=True)
class Retrieved:
    """The answer to one prompt, each token given the true ones before it.

    correct: every token is the likeliest one; log_probability: mean of its tokens.
    """

    correct: bool
    log_probability: float


class Evaluation:
    """Measurements with the model of a job. rows: sequences of a forward on each data-parallel rank."""

    def __init__(
        self, task: LanguageTask, dims: ParallelDims, model: nn.Module, *, rows: int
    ) -> None:
        self.task = task
        self.dims = dims
        self.model = model
        self.rows = rows
        self.device = torch.device(dims["world"].device_type)

    def by_position(
        self, sequences: Iterable[PackedSequence], edges: Sequence[int]
    ) -> list[dict[str, Any]]:
        """Return a row for the tokens between each two edges, at the positions `first` to `last` - 1. A collective.

        loss: their mean cross entropy; perplexity: None where it is too large for a float. sequences: the same on every
        rank; edges: rising positions, the first one 0, the last one the length.
        """
        places = list(pairwise(edges))
        sums = torch.zeros(len(places), 2, dtype=torch.float64, device=self.device)

        def measure(part: Decoder, hidden: torch.Tensor, share: RankInputs) -> None:
            losses = self.task.losses(part, hidden, share.targets).double()
            positions = share.arguments["positions"]  # of the tokens of this rank
            for number, (first, last) in enumerate(places):
                counted = (
                    (positions >= first) & (positions < last) & (share.targets != IGNORE_INDEX)
                )
                sums[number, 0] += losses.where(counted, 0).sum()
                sums[number, 1] += counted.sum()

        batches = (
            self._batch(arrays) for _, arrays in own_batches(sequences, self.rows, self.dims)
        )
        forward_only(self.task, [self.model], None, batches, measure)
        totals = self._total(sums).tolist()
        rows = []
        for (first, last), (total, n) in zip(places, totals, strict=True):
            loss = total / max(n, 1)
            finite = perplexity(loss) if math.isfinite(perplexity(loss)) else None
            rows.append(
                {
                    "first": first,
                    "last": last,
                    "tokens": round(n),
                    "loss": loss,
                    "perplexity": finite,
                }
            )
        return rows

    def needles(self, prompts: Sequence[NeedlePrompt]) -> list[Retrieved]:
        """Return how each prompt, all of one length, is answered. A collective over all ranks.

        Only the logits of the answers exist.
        """
        most = max(prompt.answer_tokens for prompt in prompts)
        numbers: list[list[int]] = []
        rows: list[torch.Tensor] = []

        def batches() -> Iterator[TextBatch]:
            for mine, arrays in own_batches(
                (prompt.sequence for prompt in prompts), self.rows, self.dims
            ):
                numbers.append(mine)
                yield self._batch(arrays)

        def measure(part: Decoder, hidden: torch.Tensor, share: RankInputs) -> None:
            rows.append(answered(part, hidden, share.targets, most, self.dims))

        forward_only(self.task, [self.model], None, batches(), measure)
        sums = torch.zeros(len(prompts), 2, dtype=torch.float64, device=self.device)
        for mine, found in zip(numbers, rows, strict=True):
            # rows that fill up a forward have no number
            for number, row in zip(mine, found, strict=False):
                sums[number] = row
        return [
            Retrieved(round(hits) == prompt.answer_tokens, -loss / prompt.answer_tokens)
            for prompt, (hits, loss) in zip(prompts, self._total(sums).tolist(), strict=True)
        ]

    def _batch(self, arrays: dict) -> TextBatch:
        rotated_until(self.model, arrays["tokens"].shape[1])
        # they are then cut, and a share has its own
        return tensors_of(arrays) | {"uses_positions": True}

    def _total(self, sums: torch.Tensor) -> torch.Tensor:
        """Return the sums of all ranks; those of one tensor-parallel group have the same."""
        return all_reduce(sums / self.dims.size("tp"), self.dims["world"])


def answered(
    part: Decoder, hidden: torch.Tensor, targets: torch.Tensor, most: int, dims: ParallelDims
) -> torch.Tensor:
    """Return for each sequence (targets of this rank that have the largest logit, sum of their losses): (B, 2) float64.

    hidden: of this rank; targets: (B, S of this context-parallel rank), at most `most` of which are labels.
    """
    hidden = whole_sequence(hidden, dims["tp"])
    # Labelled tokens first. Each rank takes as many, so that the output has one shape on all of a group.
    taken = (
        (targets != IGNORE_INDEX).int().argsort(dim=1, descending=True, stable=True)[:, :most]
    )
    labels = targets.gather(1, taken)
    wanted = hidden.gather(1, taken[..., None].expand(-1, -1, hidden.shape[-1]))
    logits = whole_logits(part, wanted, dims["tp"])
    hits = (logits.argmax(-1) == labels).sum(1)
    return torch.stack([hits.double(), token_losses(logits, labels).double().sum(1)], dim=1)
