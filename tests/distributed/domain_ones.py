"""A `DomainTensor` of ones whose shards have given sizes."""

import torch
from torch.distributed.device_mesh import DeviceMesh

from longshard.domain.domain import Axis, Domain, sized
from longshard.domain.tensor import DomainTensor

X = (2, 4, 6, 5)  # rows of dimension 2 are 4 + 2, or 2 + 4 in `other`


def made(sizes: tuple[int, ...], mesh: DeviceMesh) -> DomainTensor:
    axis = Axis(sized(sizes), mesh.get_group())
    return DomainTensor(torch.ones(2, 4, axis.rows, 5, dtype=torch.float64), Domain({2: axis}))
