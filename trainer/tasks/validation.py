"""The loss on data that are not trained on: forwards alone, which leave the state of training as it is.

All documents are one stream, in a fixed order. Global sequence i belongs to data-parallel rank i % D, so that the
sequences, and the loss up to rounding, are the same on every layout. Every rank makes all of them and keeps its own.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from trainer.components.metrics import ValidationResult
from trainer.config.errors import ConfigError
from trainer.data.loader import TextBatch, arrays_of, tensors_of
from trainer.data.packing.sequence import IGNORE_INDEX, PackedSequence
from trainer.data.text_data import open_text, validation_data
from trainer.data.token_files.catalog import catalog_of
from trainer.distributed.parallel_dims import ParallelDims
from trainer.distributed.pipeline_parallel import Pipeline
from trainer.distributed.sharding.exchange import all_reduce
from trainer.job.record import ResolvedJob
from trainer.models.model_spec import Decoder
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
    rank, degree, done, sequences = dims.rank("dp"), dims.size("dp"), 0, iter(sequences)
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
        precompute_scales(part, task.config.float8)  # those of the step are of the weights before its update
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
        settings, training = job.config.validation, job.config.training
        self.settings, self.seq_len = settings, settings.seq_len or training.seq_len
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
        stream = self._data.stream(range(self._data.items), stream=0, seq_len=self.seq_len, seed=0)
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
            yield tensors_of(arrays) if plan is None else tensors_of(arrays) | {"plan": plan(arrays)}

    def run(self, model_parts: Sequence[nn.Module], pipeline: Pipeline | None) -> ValidationResult:
        """Return the loss of the whole validation set. A collective over all ranks."""
        started = time.monotonic()
        losses, counts = torch.zeros(2, 1, dtype=torch.float64, device=self.dims["world"].device_type)

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
