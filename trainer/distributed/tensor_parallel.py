"""Tensor parallelism with sequence parallelism for decoder blocks, and the loss over a vocabulary that is cut.

Between blocks each tp rank holds its part of the sequence, (B, S / tp, dim); attention and feed-forward see the whole
sequence and their part of the heads or the hidden dimension (Korthikanti et al., arXiv 2205.05198).
"""

from contextlib import AbstractContextManager, nullcontext

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle

from trainer.distributed.ties import ties_kept


class LocalParameter(ParallelStyle):
    """Style for a module whose forward gives its `weight`, one element a head: each rank gets those of its heads."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def partition(_name: str, part: nn.Module, mesh: DeviceMesh) -> None:
            weight = distribute_tensor(part.weight, mesh, [Shard(0)], src_data_rank=None)
            part.register_parameter("weight", nn.Parameter(weight))

        return distribute_module(module, device_mesh, partition, output_fn=lambda _part, x, _mesh: x.to_local())


def apply_tensor_parallel(module: nn.Module, mesh: DeviceMesh, plan: dict[str, ParallelStyle]) -> None:
    """Apply `plan` (submodule name -> style) over the 1-D `mesh`; a parameter that two submodules share stays one."""
    with ties_kept(module):
        parallelize_module(module, mesh, plan)


def loss_context(tp_mesh: DeviceMesh, *, disabled: bool) -> AbstractContextManager:
    """Context for loss AND backward: logits stay cut over the vocabulary and are never gathered."""
    return loss_parallel() if tp_mesh.size() > 1 and not disabled else nullcontext()


def logits_layout(*, disable_loss_parallel: bool) -> Shard | Replicate:
    """Where the logits of the output projection lie: cut over the vocabulary for the parallel loss, or whole."""
    return Replicate() if disable_loss_parallel else Shard(-1)
