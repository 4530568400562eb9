"""Gradients of weights over the ranks of a domain, with any wrapper of the model.

Every rank computes the whole loss. Its gradient of a weight is the part that comes from its shards, times the number of
ranks. So the mean over the ranks is the gradient of one process. FSDP2, HSDP and DDP compute this mean over the ranks
of their mesh or group; this module computes it over the other ranks.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from longshard.domain.dispatch import DomainTensor, rule, unwrapped, wrapped
from longshard.domain.elementwise import own_part
from longshard.sharding.exchange import all_reduce
from longshard.sharding.placement import added_up
from longshard.sharding.tensors import fsdp_groups, local_part, wide_type

_BUCKET = 2**24
"""Number of elements that are reduced at once."""


@rule("grad", by_element=True)
def _gradient(function, outputs, inputs, grad_outputs=None, **kwargs) -> tuple[Any, ...]:
    """Compute torch.autograd.grad: the gradients of one process, of sharded and whole inputs; differentiable.

    An output or input must be sharded. Every rank of the domain must use whole tensors in the same way.
    """
    outputs, inputs = (list(t) if isinstance(t, Sequence) else [t] for t in (outputs, inputs))
    seeds = (
        list(grad_outputs)
        if isinstance(grad_outputs, Sequence)
        else [grad_outputs] * len(outputs)
    )

    def groups_of(tensors: Sequence) -> dict[int, ProcessGroup]:
        axes = [axis for x in wrapped(tensors) for axis in x.domain.axes.values()]
        return {id(axis.group): axis.group for axis in axes}

    groups = groups_of([*outputs, *inputs])

    def lacking(x: Any) -> list[ProcessGroup]:
        own = groups_of([x])
        return [group for number, group in groups.items() if number not in own]

    shares = []
    for y, seed in zip(wrapped(outputs), seeds, strict=True):
        if seed is None and y.shape.numel() != 1:
            raise RuntimeError(
                f"an output of shape {tuple(y.shape)} is not a single number; give `grad_outputs` for it"
            )
        seed = y.local.new_ones(()) if seed is None else seed
        own = own_part(seed, y.domain, y.shape)
        # the share of each rank in an output that all ranks compute
        copies = math.prod(group.size() for group in lacking(y))
        shares.append(own.expand(y.local.shape) / copies)
    results = []
    for x, part in zip(
        inputs, function(unwrapped(outputs), unwrapped(inputs), shares, **kwargs), strict=True
    ):
        for group in lacking(x) if part is not None else ():
            part = added_up(part, group)
        results.append(wrapped(part, x.domain) if isinstance(x, DomainTensor) else part)
    return tuple(results)


def average_gradients(model: nn.Module, mesh: DeviceMesh) -> None:
    """Make the gradients of the parameters equal to the gradients of one process; call it after a step's last backward.

    A collective over each dimension of the mesh over which a gradient is not averaged yet.

    The loss is whole on every rank, such as `y.mean()` of sharded y, and not divided by the number of ranks. Gradients
    that FSDP2, HSDP or DDP has averaged over a dimension of the mesh stay as they are in this dimension.

    Args:
        model: The model.
        mesh: The ranks that share the domain, and in dimensions of their own the ranks with other samples (data
            parallelism).

    Raises:
        ValueError: A wrapper has some ranks of a mesh dimension and not all, or divides by another number than its
            ranks, or is FSDP1.
    """
    averaged = _averaged_over(model)
    parameters = [p for p in model.parameters() if p.requires_grad]
    own = {dist.get_rank()}
    for group in mesh.get_all_groups():
        ranks = set(dist.get_process_group_ranks(group))
        remaining = []
        for p in parameters:
            common = averaged.get(p, own) & ranks
            if common not in (ranks, own):
                raise ValueError(
                    f"a parameter of shape {tuple(p.shape)} is averaged over ranks "
                    f"{sorted(averaged[p])}, some of the ranks {sorted(ranks)} of a dimension of the "
                    "mesh. Wrap the model over all of them, or none"
                )
            if common != ranks:
                remaining.append(p)
        if remaining:
            _average(remaining, group)


def _averaged_over(model: nn.Module) -> dict[nn.Parameter, set[int]]:
    """Return the global ranks over which FSDP2 or DDP averages the gradient of each parameter that they wrap.

    Raises:
        ValueError: A wrapper is FSDP1, or FSDP divides by a factor of the user.
    """
    averaged = {}
    for name, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel):
            raise ValueError(
                f"module {name or 'model'} is of FSDP1, which is not handled; use fully_shard or DDP"
            )
        if isinstance(module, DistributedDataParallel):
            ranks = set(dist.get_process_group_ranks(module.process_group))
            averaged |= dict.fromkeys(module.parameters(), ranks)
        for group in fsdp_groups(module) if isinstance(module, FSDPModule) else ():
            factor = group.gradient_divide_factor
            if factor is not None:  # a factor of the user, with which FSDP computes no mean
                raise ValueError(
                    f"FSDP of module {name or 'model'} divides gradients by {factor}, so they are no "
                    "mean over its ranks; leave out set_gradient_divide_factor"
                )
    for p in model.parameters():
        if isinstance(p, DTensor):
            averaged[p] = set(p.device_mesh.mesh.flatten().tolist())
    return averaged


def _average(parameters: Sequence[nn.Parameter], group: ProcessGroup) -> None:
    """Average gradients over a group in place, with sums in float32 at least; a collective.

    If a rank has no gradient and others have, it gets zeros before.
    """
    device = local_part(parameters[0]).device
    has = torch.tensor(
        [p.grad is not None for p in parameters], dtype=torch.int32, device=device
    )
    gradients = []
    for p, is_there in zip(parameters, all_reduce(has, group, "max").tolist(), strict=True):
        if is_there:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            gradients.append(local_part(p.grad).detach())
    for bucket in _buckets(gradients):
        dtype = wide_type(bucket[0].dtype)
        flat = all_reduce(torch.cat([g.reshape(-1).to(dtype) for g in bucket]), group).div_(
            group.size()
        )
        for g, mean in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
            g.copy_(mean.view(g.shape))


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield tensors of one type in runs of limited size."""
    bucket = []
    for x in tensors:
        if bucket and (
            x.dtype != bucket[0].dtype or sum(map(torch.numel, bucket)) + x.numel() > _BUCKET
        ):
            yield bucket
            bucket = []
        bucket.append(x)
    if bucket:
        yield bucket
