"""A sequence in chunks on one device, see `execution/chunks.py`: the context around forward and backward."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch.distributed.device_mesh import DeviceMesh

from trainer.distributed.context_parallel.execution.chunks import ChunkRows, KeptTensor
from trainer.distributed.context_parallel.live import LivePlan, opened
from trainer.distributed.context_parallel.planning.mask import Mask
from trainer.distributed.context_parallel.planning.options import ContextParallelOptions
from trainer.distributed.sharding.layout import AxisLayout


@contextmanager
def sequence_chunks(
    mesh: DeviceMesh,
    layout: AxisLayout,
    mask: Mask | None,
    options: ContextParallelOptions,
    *,
    sequences: int,
    keep: Callable[[torch.Tensor], KeptTensor],
) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield the handle of each chunk, for the forward AND the backward; inside, rows wait for later chunks.

    mesh: of one rank; layout: contiguous, of all chunks; mask: intersected with the mask of each attention; sequences:
    of the batch; keep: makes keys and values wait. The model gives each layer its own handle, `of_layer(...)`.
    """
    rows = ChunkRows(keep)
    with ExitStack() as stack:
        plans = (LivePlan(mesh, layout, mask, options, chunk=(number, rows)) for number in range(layout.degree))
        yield tuple(stack.enter_context(opened(plan, sequences)) for plan in plans)
