"""A sequence in chunks on one device, see `execution/chunks.py`: the context, and the numbers of the layers."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from trainer.distributed.context_parallel.execution.chunks import ChunkRows, KeptTensor
from trainer.distributed.context_parallel.live import LivePlan, of_layer, opened
from trainer.distributed.context_parallel.planning.mask import Mask
from trainer.distributed.context_parallel.planning.options import ContextParallelOptions
from trainer.distributed.sharding.forward import replace_forward
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
    of the batch; keep: makes keys and values wait.
    """
    rows = ChunkRows(keep)
    with ExitStack() as stack:
        plans = (LivePlan(mesh, layout, mask, options, chunk=(number, rows)) for number in range(layout.degree))
        yield tuple(stack.enter_context(opened(plan, sequences)) for plan in plans)


def number_layers(layers: Mapping[str, nn.Module]) -> None:
    """Let each layer give its attention a handle with its number. Call it after all that replaces a layer's forward.

    layers: by number; their forward is `(x, freqs_cis, attention_plan, positions)`.
    """
    for number, layer in layers.items():
        replace_forward(layer, "sequence chunks", _numbered(layer.forward, int(number)))


def _numbered(forward: Callable[..., torch.Tensor], layer: int) -> Callable[..., torch.Tensor]:
    def numbered(
        x: torch.Tensor, freqs_cis: torch.Tensor, attention_plan: torch.Tensor, positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        return forward(x, freqs_cis, of_layer(attention_plan, layer), positions)

    return numbered
