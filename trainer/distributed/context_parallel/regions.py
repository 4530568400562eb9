"""Context parallelism on a part of a model: a region, and the functions with which tensors enter and leave it.

Outside a region every rank of its group computes the same, on whole sequences; inside, each rank has its own rows.
Attention in the region has the style `ContextParallelAttention` and gets the region's plan. Other attention stays
local.

At the border of a region, a gradient on the outside is `partial` or `replicated`: see `sharding/placement.py`.
Parameters that are used inside a region always have partial gradients: `replicate` them, or let FSDP sum them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from trainer.distributed.context_parallel.live import LivePlan, flat_mesh, opened
from trainer.distributed.context_parallel.planning.mask import Mask
from trainer.distributed.context_parallel.planning.options import ContextParallelError, ContextParallelOptions
from trainer.distributed.sharding.layout import AxisLayout
from trainer.distributed.sharding.placement import replicate, shard, unshard


@dataclass(frozen=True)
class Region:
    """An open context or region: the handle for its attention, its layout, group, and plan, which counts calls.

    attention_plan: (sequences,) int64, the `plan` of attention that has the style `ContextParallelAttention`.
    """

    attention_plan: torch.Tensor
    layout: AxisLayout
    group: dist.ProcessGroup
    live: LivePlan

    def shard(self, x: torch.Tensor, dim: int, *, grad: str = "partial") -> torch.Tensor:
        """Return this rank's rows of a tensor that every rank has whole."""
        return shard(x, self.layout, dim, group=self.group, grad=grad)

    def unshard(self, x: torch.Tensor, dim: int, *, grad: str = "partial") -> torch.Tensor:
        """Return all rows of a tensor of which each rank has its own."""
        return unshard(x, self.layout, dim, group=self.group, grad=grad)

    def replicate(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor that every rank uses in the region; its gradient is the sum of all ranks' gradients."""
        return replicate(x, self.group)


@contextmanager
def region(
    mesh: DeviceMesh,
    layout: AxisLayout,
    mask: Mask | None = None,
    options: ContextParallelOptions | None = None,
    *,
    kv_layout: AxisLayout | None = None,
    sequences: int | None = None,
) -> Iterator[Region]:
    """Open a region over the ranks of a mesh, around forward AND backward; several may be open at once.

    mesh: 1-D; for `hybrid` 2-D, (ring, head group). layout: who owns which tokens of the region (`options.layout(...)`
    makes one); mask: intersected with the mask of each attention; kv_layout: the layout of the keys, for cross
    attention to another sharded sequence; sequences: of the batch, by default as many as the mask has.

    Raises:
        ContextParallelError: a layout for another number of ranks; or, at the end, no attention ran in the region
            although modules of this process are parallelised over `mesh`.
    """
    options = options or ContextParallelOptions()
    mesh, groups = flat_mesh(mesh, options)
    for part in (layout, kv_layout or layout):
        if part.degree != mesh.size():
            raise ContextParallelError(
                f"a layout for {part.degree} ranks does not fit a region over {mesh.size()} ranks; make it for them"
            )
    q_len, kv_len = layout.length, (kv_layout or layout).length
    if mask is not None and (
        (mask.q_len, mask.kv_len) != (q_len, kv_len) or mask.sequences not in (1, sequences or mask.sequences)
    ):
        raise ContextParallelError(
            f"the mask is for {mask.sequences} x {mask.q_len} queries and {mask.kv_len} keys, and there are "
            f"{sequences or 'any number of'} sequences of {q_len} queries and {kv_len} keys; make it for them, or "
            "one for all sequences"
        )
    live = LivePlan(mesh, layout, mask, options, kv_layout, groups)
    with opened(live, sequences) as handle:
        yield Region(handle, layout, mesh.get_group(), live)
