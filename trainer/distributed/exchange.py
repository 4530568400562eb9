"""The one door for collectives of our own (FSDP's and DTensor's are theirs): each call is counted by kind."""

from collections import Counter

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

# kind -> calls of this process; what tests compare with what a step should cost
calls: Counter[str] = Counter()


def all_reduce(x: torch.Tensor, mesh: DeviceMesh, op: str = "sum") -> torch.Tensor:
    """Sum, maximum or minimum of `x` over a 1-D mesh, in place; nothing is sent on a mesh of size one.

    x: any shape, the same on every rank of the mesh; op: `sum`, `max` or `min`.
    """
    if mesh.size() > 1:
        calls["all_reduce"] += 1
        dist.all_reduce(x, op=getattr(dist.ReduceOp, op.upper()), group=mesh.get_group())
    return x


def all_gather(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The `x` of every rank of a 1-D mesh: (size, *x.shape), in the mesh's order."""
    gathered = x.new_empty(mesh.size(), *x.shape)
    calls["all_gather"] += 1
    # torch 2.13 renamed it
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(gathered.view(-1), x.reshape(-1), group=mesh.get_group())
    return gathered
