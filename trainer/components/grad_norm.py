"""One gradient norm for the whole model, also with parameters on different meshes, and clipping by it."""

import math
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from trainer.distributed.parallel_dims import ParallelDims


def settle_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Bring each gradient to its parameter's placement: tensor parallelism leaves norms with partial sums."""
    for parameter in parameters:
        grad = parameter.grad
        if isinstance(grad, DTensor) and grad.placements != parameter.placements:
            parameter.grad = grad.redistribute(placements=parameter.placements)


def squared_norm(parameters: Iterable[nn.Parameter], dims: ParallelDims) -> torch.Tensor:
    """Return this rank's part of the squared norm of all gradients: () float64, on the device of the job.

    Each rank divides its squares by the number of ranks that hold the same gradient. The sum over all ranks then counts
    every element once, on any mesh and pipeline stage. (`clip_grad_norm_` refuses mixed meshes.)
    """
    held: dict[int, list[torch.Tensor]] = defaultdict(list)  # replicas -> local gradients
    ranks_of_stage = dims.size("world") // dims.size("pp")
    for parameter in parameters:
        if parameter.grad is not None:
            held[ranks_of_stage // _shards(parameter.grad)].append(_local(parameter.grad))
    device = dims["world"].device_type
    total = torch.zeros((), dtype=torch.float64, device=device)
    for replicas, grads in held.items():
        # float64: a float32 sum over a million squares is off by 2e-4 on a CPU, differently for each way of sharding.
        norms = torch.stack(
            torch._foreach_norm(grads, 2, dtype=torch.float64)
        )  # which reads float32, and copies nothing
        total += (norms**2).sum().to(device) / replicas
    return total


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], norm: float, max_norm: float) -> None:
    """Scale all gradients so that their common norm is at most `max_norm`."""
    if norm > max_norm:
        grads = [_local(parameter.grad) for parameter in parameters if parameter.grad is not None]
        torch._foreach_mul_(grads, max_norm / norm)


def _local(x: torch.Tensor) -> torch.Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def _shards(x: torch.Tensor) -> int:
    """Return the number of different shards of a tensor; ranks of its other mesh dimensions have replicas."""
    if not isinstance(x, DTensor):
        return 1
    sizes = zip(x.device_mesh.shape, x.placements, strict=True)
    return math.prod(size for size, placement in sizes if not placement.is_replicate())
