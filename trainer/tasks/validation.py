"""The validation of a run: one pass over the validation documents, one stream in a fixed order."""

import time
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from longshard.sharding.exchange import all_reduce
from trainer.components.step_metrics import ValidationResult
from trainer.config.errors import ConfigError
from trainer.data.job_data import open_text, validation_data
from trainer.data.loader import TextBatch, planned_batch
from trainer.data.order.streams import Shuffled
from trainer.data.packing import PackedSequence
from trainer.data.token_files.catalog import catalog_of
from trainer.job.record import ResolvedJob
from trainer.models.model_spec import Decoder
from trainer.parallel.parallel_dims import ParallelDims
from trainer.parallel.pipeline_parallel import Pipeline
from trainer.runtime.agreement import once_a_node
from trainer.tasks.forward_pass import forward_only, own_batches
from trainer.tasks.language import LanguageTask
from trainer.tasks.task import RankInputs


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
        self._data = open_text(data, training.packing, once_a_node(lambda: catalog_of(data)))
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
        """Yield packed sequences of one pass over the documents: at most `validation.sequences`, or all if it is 0.

        The last sequence is left out if it would continue with the first document again. Every rank and every
        validation gets the same sequences.
        """
        documents = range(self._data.items)
        stream = self._data.packed(Shuffled(documents, stream=0, seed=0), self.seq_len)
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
