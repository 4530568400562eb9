"""Forwards without a backward, for validation, evaluation and DPO. All data-parallel ranks share the sequences.

Global sequence i belongs to data-parallel rank i % D. So every layout runs the same sequences, and the measured values
are equal up to rounding. Every rank makes all sequences and keeps its own.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from trainer.data.loader import TextBatch, arrays_of
from trainer.data.packing import IGNORE_INDEX, PackedSequence
from trainer.models.model_spec import Decoder
from trainer.parallel.parallel_dims import ParallelDims
from trainer.parallel.pipeline_parallel import Pipeline
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
        The indices in `sequences` of this rank's sequences, and arrays of shape (rows, S): tokens, labels, positions,
        document ids. If the last forward lacks sequences, copies fill it up; the copies have no label and no index.
    """
    rank = dims.rank("dp")
    degree = dims.size("dp")
    first_number = 0
    sequences = iter(sequences)
    for first in sequences:
        together = [first, *islice(sequences, rows * degree - 1)]
        local_sequences = together[rank::degree]
        arrays = arrays_of(local_sequences + [first] * (rows - len(local_sequences)))
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
    """Run the forward of each batch without gradients, then call `measure` on the ranks that have its hidden states.

    A collective over all ranks, so each rank needs the same number of batches. Afterwards FSDP's gathered weights are
    freed.

    Args:
        task: The task of the job.
        model_parts: The model parts of this rank.
        pipeline: Runs the forwards with pipeline parallelism. None without it.
        batches: The batches of this rank.
        measure: Gets the hidden states after each forward: of the batch, or of each chunk of it.
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
