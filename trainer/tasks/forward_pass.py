"""Forwards without a backward, whose sequences all data-parallel ranks share.

Global sequence i belongs to data-parallel rank i % D, so that the sequences, and what is measured up to rounding, are
the same on every layout. Every rank makes all sequences and keeps its own.
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
