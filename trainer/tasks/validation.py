"""Forwards without a backward, for validation, evaluation and DPO. All data-parallel ranks share the sequences.

Global sequence i belongs to data-parallel rank i % D. So every layout runs the same sequences, and the measured values
are equal up to rounding. Every rank makes all sequences and keeps its own.

The validation of a run is one pass over the validation documents, one stream in a fixed order.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from longshard.sharding.exchange import all_reduce
from trainer.components.step_metrics import ValidationResult
from trainer.config.errors import ConfigError
from trainer.data.job_data import open_text, validation_data
from trainer.data.loader import TextBatch, arrays_of, planned_batch
from trainer.data.order.streams import Shuffled
from trainer.data.packing import IGNORE_INDEX, PackedSequence
from trainer.data.token_files.catalog import catalog_of
from trainer.job.record import ResolvedJob
from trainer.models.model_spec import Decoder
from trainer.parallel.parallel_dims import ParallelDims
from trainer.parallel.pipeline_parallel import Pipeline
from trainer.runtime.agreement import once_a_node
from trainer.tasks.language import LanguageTask
from trainer.tasks.task import RankInputs
from trainer.transforms.float8 import precompute_scales

Measure = Callable[[Decoder, torch.Tensor, RankInputs], None]
"""Called after a forward with: the model part with the output, hidden states, and the rank's part or a chunk of it."""


def own_batches(
    sequences: Iterable[PackedSequence], rows: int, dims: ParallelDims
) -> Iterator[tuple[list[int], dict[str, np.ndarray]]]:
    """Yield the forwards of this rank. All ranks get the same number of forwards.

    Args:
        sequences: All sequences, the same on every rank.
        rows: Sequences of a forward.
        dims: The meshes of the run.

    Yields:
        The numbers of this rank's sequences, and arrays of shape (rows, S): tokens, labels, positions, document ids.
        If sequences are missing in the last forward, copies fill it up; they have no label and no number.
    """
    rank = dims.rank("dp")
    degree = dims.size("dp")
    first_number = 0
    sequences = iter(sequences)
    for first in sequences:
        together = [first, *islice(sequences, rows * degree - 1)]
        local_sequences = together[rank::degree]
        filling = [first] * (rows - len(local_sequences))
        arrays = arrays_of(local_sequences + filling)
        arrays["labels"][len(local_sequences) :] = IGNORE_INDEX
        yield list(range(first_number + rank, first_number + len(together), degree)), arrays
        first_number += len(together)


@torch.no_grad()
def forward_only(
    task: LanguageTask,
    model_parts: Sequence[nn.Module],
    pipeline: Pipeline | None,
    batches: Iterable[TextBatch],
    measure: Measure,
) -> None:
    """Run the forward of each batch, then call `measure` on the ranks that have its hidden states.

    Args:
        task: The task of the job.
        model_parts: The model parts of this rank.
        pipeline: Runs the forwards with pipeline parallelism. None without it.
        batches: The batches of this rank.
        measure: Gets the hidden states after each forward.
    """
    for part in model_parts:
        # the scales of the training step belong to the weights before the update
        precompute_scales(part, task.config)
    for batch in batches:
        with task.batch_context(batch, model_parts) as share:
            for part in share.parts:
                hidden = (pipeline or model_parts[0])(part.inputs, **part.arguments)
                if hidden is not None:
                    measure(model_parts[-1], hidden, part)
    reshard(model_parts)


def reshard(model_parts: Sequence[nn.Module]) -> None:
    """Free the weights that FSDP gathered for forwards without a backward.

    Args:
        model_parts: Modules in which FSDP modules are looked for.
    """
    for module in chain.from_iterable(part.modules() for part in model_parts):
        if isinstance(module, FSDPModule):
            module.reshard()


class Validation:
    """The validation of one job on this rank.

    Args:
        job: The resolved job.
        dims: The meshes of the run.
        task: The training task; its loss and attention are used.

    Raises:
        ConfigError: The data have less than one sequence.
    """

    def __init__(self, job: ResolvedJob, dims: ParallelDims, task: LanguageTask) -> None:
        self.dims = dims
        self.task = task
        settings = job.config.validation
        training = job.config.training
        self.settings = settings
        self.seq_len = settings.seq_len or training.seq_len
        self._rows = settings.local_batch_size or training.local_batch_size
        data = validation_data(job.config)
        catalog = once_a_node(lambda: catalog_of(data))
        self._data = open_text(data, training.packing, catalog)
        if next(self.sequences(), None) is None:
            raise ConfigError(
                f"the validation data hold less than one sequence of {self.seq_len} tokens; give more data or a lower "
                "validation.seq_len"
            )

    @property
    def identity(self) -> dict[str, int]:
        """The values that decide which validation data are used, by name."""
        return self._data.describe(self._data.items, self.seq_len)

    def due(self, step: int, *, last: bool) -> bool:
        """Return whether to validate after this step: every `validation.freq`-th step, and the last one.

        Args:
            step: Number of the step.
            last: Whether it is the last step of the run.
        """
        return last or step % self.settings.freq == 0

    def sequences(self) -> Iterator[PackedSequence]:
        """Yield whole packed sequences of one pass over the documents, at most `validation.sequences` of them."""
        order = Shuffled(range(self._data.items), stream=0, seed=0)
        stream = self._data.packed(order, self.seq_len)
        wanted = self.settings.sequences
        while not wanted or stream.samples < wanted:
            sequence = stream.next_sample()
            if stream.passes > 1 or (stream.passes == 1 and stream.state.get("token")):
                return  # it begins at the end of the last document and continues with the first
            yield sequence

    def batches(self) -> Iterator[TextBatch]:
        """Yield this rank's batches. All ranks get the same number of batches.

        Sequences that fill up the last batch have no labels.
        """
        for _, arrays in own_batches(self.sequences(), self._rows, self.dims):
            yield planned_batch(arrays, self.task.batch_planner)

    def run(
        self, model_parts: Sequence[nn.Module], pipeline: Pipeline | None
    ) -> ValidationResult:
        """Return the loss of the whole validation set. A collective over all ranks.

        Args:
            model_parts: The model parts of this rank.
            pipeline: Runs the forwards with pipeline parallelism. None without it.
        """
        started = time.monotonic()
        losses, counts = self.dims.zeros(2, 1)

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
