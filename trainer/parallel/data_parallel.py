"""FSDP, HSDP and DDP through `fully_shard`, with gradients that are SUMS over the ranks.

The loss is already divided by the number of valid tokens of the whole step, so FSDP's averaging is switched off.
Gradients then match a single-device run for all degrees, also when ranks hold different numbers of valid tokens, or
none.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup, Work
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard

from longshard.sharding.exchange import all_gather_single, allocate, reduce_scatter
from trainer.job.record import ResolvedJob

REDUCE_SCATTER = "fsdp_reduce_scatter"
"""Purpose of the groups over which gradients are reduced."""


@dataclass(frozen=True)
class DataParallelOptions:
    """Settings of `apply_data_parallel`."""

    param_dtype: torch.dtype
    reduce_dtype: torch.dtype
    reshard_after_forward: bool
    reshard_last: bool
    """Whether to free the last unit after the forward too, although the backward needs it first."""
    cpu_offload: bool
    forward_prefetch: int
    """Number of units to gather ahead of the running one; 0: FSDP's default, which is one."""
    zero_copy: bool
    """Whether messages are in memory of the process groups, if the groups have some."""

    @classmethod
    def of(cls, job: ResolvedJob) -> "DataParallelOptions":
        """Return the settings of a job.

        Args:
            job: The resolved job.
        """
        config = job.config
        reduce = config.training.mixed_precision_reduce
        if config.training.dtype == "float64":
            reduce = "float64"
        how = config.parallelism.fsdp_reshard_after_forward
        return cls(
            param_dtype=getattr(torch, job.compute_dtype),
            reduce_dtype=getattr(torch, reduce),
            # In a pipeline parameters stay gathered for the next micro-batch.
            reshard_after_forward=how == "always"
            or (how == "default" and job.pipeline is None),
            reshard_last=how == "always",
            cpu_offload=config.training.enable_cpu_offload,
            forward_prefetch=config.parallelism.fsdp_forward_prefetch,
            zero_copy=config.parallelism.fsdp_zero_copy,
        )


@dataclass(frozen=True)
class InnerUnits:
    """Modules within units that are units of their own, with parameters on another mesh."""

    mesh: DeviceMesh
    by_unit: Mapping[nn.Module, nn.Module]
    placement: Callable[[nn.Parameter], Shard] | None
    """Which dimension of a parameter to shard; None: the first."""
    reduce_group: ProcessGroup | None
    """See `apply_data_parallel`."""


@dataclass(frozen=True)
class Units:
    """Modules whose parameters are gathered together. All other parameters of the model belong to the root."""

    in_order: Sequence[nn.Module]
    """Units that are gathered one at a time, in the order of the forward."""
    last: nn.Module | None
    """One more unit, whose parameters the backward needs first; it stays gathered unless `reshard_last`."""
    inner: InnerUnits | None = None
    """Units inside units of `in_order`."""
    exact: Sequence[nn.Module] = ()
    """Small modules within units, whose parameters are not cast."""


def apply_data_parallel(
    model: nn.Module,
    units: Units,
    mesh: DeviceMesh,
    options: DataParallelOptions,
    reduce_group: ProcessGroup | None,
) -> None:
    """Shard (and replicate) the parameters of `model` over `mesh`, in place.

    If there is nothing to shard, replicate, cast or offload, the model is not changed. But if it has both plain and
    tensor-parallel parameters, plain parameters are wrapped over one rank too, because the optimizer takes either plain
    parameters or DTensors.

    Args:
        model: The whole model, or the stage of this rank.
        units: The modules whose parameters are gathered together.
        mesh: The ranks that shard, or (replicate, shard).
        options: Data types, memory and prefetching.
        reduce_group: The ranks that shard, for reduce-scatter alone. None: the group of the mesh.
    """
    inner = units.inner
    is_sharded = mesh.size() > 1 or (inner is not None and inner.mesh.size() > 1)
    if not is_sharded and not _needs_fsdp(model, options):
        return
    settings = _settings(mesh, options)
    uncast = {
        "mp_policy": MixedPrecisionPolicy(None, options.reduce_dtype, cast_forward_inputs=False)
    }
    for module in units.exact:
        if next(module.parameters()).dtype != options.param_dtype:
            fully_shard(module, **settings | uncast)
    if inner is not None:
        for unit in inner.by_unit.values():
            own = settings | {"mesh": inner.mesh, "shard_placement_fn": inner.placement}
            fully_shard(unit, reshard_after_forward=_frees(inner.mesh, options), **own)
    reshard = dict.fromkeys(units.in_order, _frees(mesh, options))
    if units.last is not None:
        reshard[units.last] = options.reshard_last and _frees(mesh, options)
    for unit, after_forward in reshard.items():
        fully_shard(unit, reshard_after_forward=after_forward, **settings)
    fully_shard(model, **settings)
    if inner is not None:
        # Each unit gathers at least the next one: a host that waits for the routing does not run ahead of the device.
        options = replace(options, forward_prefetch=max(2 * options.forward_prefetch, 1))
    _prefetch(_order(reshard, inner), options, last_is_apart=units.last is not None)
    _set_reductions(model, mesh, reduce_group, inner, options)


def _settings(mesh: DeviceMesh, options: DataParallelOptions) -> dict[str, Any]:
    """Return the arguments of `fully_shard` that most units have."""
    offload = OffloadPolicy()
    if options.cpu_offload:
        offload = CPUOffloadPolicy(torch.cuda.is_available())
    return {
        "mesh": mesh,
        # Inputs keep their dtype: rotary tables stay float32, while activations are bfloat16.
        "mp_policy": MixedPrecisionPolicy(
            options.param_dtype, options.reduce_dtype, cast_forward_inputs=False
        ),
        "offload_policy": offload,
    }


def _set_reductions(
    model: nn.Module,
    mesh: DeviceMesh,
    reduce_group: ProcessGroup | None,
    inner: InnerUnits | None,
    options: DataParallelOptions,
) -> None:
    """Let all units sum gradients, the inner units over their own mesh, and choose their communicators."""
    inner_units = set() if inner is None else {*inner.by_unit.values()}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            over, group = (
                (inner.mesh, inner.reduce_group)
                if module in inner_units
                else (mesh, reduce_group)
            )
            sum_gradients(module, over)
            if group is not None:
                module.set_custom_reduce_scatter(
                    OverGroup(reduce_scatter, group, options.zero_copy)
                )
            if options.zero_copy and over.size(over.ndim - 1) > 1:
                module.set_custom_all_gather(
                    OverGroup(all_gather_single, over.get_group(over.ndim - 1), zero_copy=True)
                )


def _needs_fsdp(model: nn.Module, options: DataParallelOptions) -> bool:
    """Return whether one rank wraps its parameters too: to cast or offload them, or because they are of two kinds."""
    kinds = {isinstance(parameter, DTensor) for parameter in model.parameters()}
    casts = next(model.parameters()).dtype != options.param_dtype
    return casts or options.cpu_offload or len(kinds) > 1


def _order(reshard: Iterable[nn.Module], inner: InnerUnits | None) -> list[nn.Module]:
    """Return the units in the order in which they are gathered: each outer unit before its inner one."""
    if inner is None:
        return [*reshard]
    pairs = ((unit, inner.by_unit.get(unit)) for unit in reshard)
    return [module for pair in pairs for module in pair if module is not None]


def _frees(mesh: DeviceMesh, options: DataParallelOptions) -> bool:
    """Return whether units are freed after the forward.

    A single rank would only cast its weights again for the backward, so its units are not freed. If the weights are on
    the host, units are freed: then memory is short on the device.
    """
    return options.reshard_after_forward and (
        options.cpu_offload or mesh.size(mesh.ndim - 1) > 1
    )


@dataclass(frozen=True)
class OverGroup:
    """A collective of FSDP over a given group. With `zero_copy` its buffers are in the group's memory, if it has some.

    Reduce-scatters have a group of their own, so that they overlap the all-gathers of the backward. By default both
    share a communicator, and NCCL runs its operations one after another. From torch 2.13 on, FSDP has
    `set_separate_reduce_scatter_group` for this. But each call of it splits NCCL's group of all ranks, so pipeline
    stages with and without experts would wait for each other.

    Attributes:
        collective: The function to call.
        group: The group of the collective.
        zero_copy: Allocate buffers in the group's memory.
    """

    collective: Callable[..., Work | None]
    group: ProcessGroup
    zero_copy: bool

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return an uninitialised buffer.

        Args:
            size: Shape of the buffer.
            dtype: Dtype of the buffer.
            device: Device of the buffer.
        """
        settings = {"dtype": dtype, "device": device}
        group_buffer = allocate(self.group, size, **settings) if self.zero_copy else None
        return torch.empty(*size, **settings) if group_buffer is None else group_buffer

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, **settings: Any
    ) -> Work | None:
        """Run the collective over this group instead of `group`, with FSDP's `async_op` and `op`."""
        return self.collective(output_tensor, input_tensor, group=self.group, **settings)


def _prefetch(
    units: Sequence[FSDPModule], options: DataParallelOptions, *, last_is_apart: bool
) -> None:
    """Set which units each unit prefetches during the forward.

    last_is_apart: the last unit runs after the model's forward. FSDP gathers it only after all layers are done, so the
    unit before it always prefetches it.
    """
    for i, unit in enumerate(units):
        ahead = max(options.forward_prefetch, int(last_is_apart and i == len(units) - 2))
        if ahead:
            unit.set_modules_to_forward_prefetch(list(units[i + 1 : i + 1 + ahead]))


def sum_gradients(module: FSDPModule, mesh: DeviceMesh) -> None:
    """Reduce gradients by plain sums: without a divisor, and without the pre-multiplied sums that gloo lacks.

    Args:
        module: An FSDP module.
        mesh: Its mesh.
    """
    # with one rank FSDP would divide by the factor, which is a pass over the gradients
    if mesh.size() > 1:
        module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)


def reduce_across_replicas(model: nn.Module, now: bool) -> None:
    """Set whether the next backward sums gradients over dp_replicate too; the last micro-batch of a step must.

    Args:
        model: The model part.
        now: Whether to sum.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_all_reduce(now)


class _Held:
    """A tensor in an object, so that FSDP does not find it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def keep_on_host(model: nn.Module, *names: str) -> None:
    """Hide tensor arguments of `model` from FSDP's hooks, so that FSDP does not move them to its device.

    Call it after `fully_shard`. The forward gets the arguments unchanged.

    Args:
        model: The model.
        *names: Names of the arguments, which must be passed by name.
    """

    def hide(_module: object, args: object, inputs: dict[str, Any]) -> tuple:
        held = {n: _Held(inputs[n]) for n in names if isinstance(inputs.get(n), Tensor)}
        return args, inputs | held

    def show(_module: object, args: object, inputs: dict[str, Any]) -> tuple:
        return args, {n: x.tensor if isinstance(x, _Held) else x for n, x in inputs.items()}

    # before the hook of `fully_shard`
    model.register_forward_pre_hook(hide, prepend=True, with_kwargs=True)
    model.register_forward_pre_hook(show, with_kwargs=True)
