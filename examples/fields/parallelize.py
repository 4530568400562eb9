"""Parallelism of a model of fields, applied from outside to the model on meta.

The model has `layers` by number, `output`, and `args`, its `FieldArgs`.
"""

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from longshard.domain.domain import Axis, Domain
from longshard.domain.modules import dry_run, parallelize
from longshard.domain.tensor import DomainTensor
from trainer.job.record import ResolvedJob
from trainer.parallel.data_parallel import REDUCE_SCATTER, DataParallelOptions, Units, apply_data_parallel
from trainer.parallel.parallel_dims import ParallelDims
from trainer.transforms.activation_checkpoint import apply_activation_checkpoint
from trainer.transforms.compile import apply_compile


def field_domain(job: ResolvedJob, dims: ParallelDims) -> Domain:
    """Return the domain of the job's fields, (B, C, height, width).

    Args:
        job: The resolved job.
        dims: The meshes of the job.
    """
    groups = [dims[name].get_group() for name in dims.degrees.domain_axes]
    return Domain({2 + i: Axis(*pair) for i, pair in enumerate(zip(job.details, groups, strict=True))})


def parallelize_fields(
    model: nn.Module, dims: ParallelDims, job: ResolvedJob, sharded: Mapping[str, int] | None = None
) -> None:
    """Apply domain and tensor parallelism, activation checkpointing, compilation, and data parallelism.

    Args:
        model: The model, on meta.
        dims: The meshes of the job.
        job: The resolved job.
        sharded: Linear modules of a layer, and the dimension of their weights that tensor parallelism shards.

    Raises:
        DomainOperatorError: The model calls a function without a rule for sharded fields.
    """
    domain = field_domain(job, dims)
    args = model.args
    batch = job.config.training.local_batch_size
    shape = domain.local_shape((batch, args.channels, args.height, args.width))
    fields = DomainTensor(torch.empty(shape, dtype=next(model.parameters()).dtype, device="meta"), domain)
    dry_run(model.output, parallelize(model, fields))
    if dims.size("tp") > 1:
        for layer in model.layers.values():
            for name, dim in (sharded or {}).items():
                _shard_linear(layer.get_submodule(name), dims["tp"], dim)
    blocks = list(model.layers.values())
    apply_activation_checkpoint(model.layers, job.config.activation_checkpoint)
    apply_compile(model.layers, job.compilation)
    options = DataParallelOptions.of(job)
    group = dims.own_group("dp_shard_cp", REDUCE_SCATTER)
    apply_data_parallel(model, Units(blocks, model.output), dims.parameter_mesh, options, group)


def _shard_linear(linear: nn.Linear, mesh: DeviceMesh, dim: int) -> None:
    """Shard outputs (dim 0) or inputs (dim 1) of a linear module; the domain's rule of `linear` does the rest."""
    linear.weight = nn.Parameter(distribute_tensor(linear.weight, mesh, [Shard(dim)], src_data_rank=None))
    if linear.bias is not None:
        placement = Shard(0) if dim == 0 else Replicate()
        linear.bias = nn.Parameter(distribute_tensor(linear.bias, mesh, [placement], src_data_rank=None))
