"""The optimizer, and which parameters decay."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pkgutil import resolve_name

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from trainer.components.muon import Muon
from trainer.components.rounding import MOMENTS, Group, RoundedAdam, Rounding, add_state
from trainer.config.errors import SharedConfigError
from trainer.config.optimizer import Optimizer
from trainer.config.registry import OPTIMIZERS
from trainer.config.schema import JobConfig
from trainer.models.experts import Experts
from trainer.models.matrices import matrices_of
from trainer.parallel.ownership import Owners
from trainer.parallel.parallel_dims import ParallelDims
from trainer.runtime.agreement import gather_values


def ensure_state(optimizer: torch.optim.Optimizer) -> None:
    """Give parameters that were never updated their first state.

    For Adam and Muon, the state is added directly. If an optimizer of another class has no state at all, it makes a
    step with gradients of zero and a learning rate of zero.

    Args:
        optimizer: The optimizer, changed in place.
    """
    if isinstance(optimizer, Muon):
        optimizer.add_state()
        optimizer = optimizer.other
    if isinstance(optimizer, torch.optim.Adam):
        dtype = getattr(optimizer, "state_dtype", None)
        add_state(optimizer, optimizer.param_groups, MOMENTS, dtype)
    elif optimizer is not None and not optimizer.state:
        groups = optimizer.param_groups
        rates = [group["lr"] for group in groups]
        gradients = {p: p.grad for group in groups for p in group["params"]}
        for group in groups:
            group["lr"] = 0.0
        for parameter in gradients:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        for parameter, gradient in gradients.items():
            parameter.grad = gradient


def build_optimizer(
    model_parts: Sequence[nn.Module], config: JobConfig, dims: ParallelDims | None = None
) -> torch.optim.Optimizer:
    """Return the configured optimizer of all trained parameters: of this program, or of a package.

    Args:
        model_parts: The model parts of this rank.
        config: The configuration.
        dims: The meshes of the run, which only Muon needs. With Muon, this function is a collective of all ranks.

    Raises:
        ConfigError: Muon does not know whether a parameter is a matrix.
    """
    settings = config.optimizer
    if settings.name in OPTIMIZERS:
        return resolve_name(OPTIMIZERS[settings.name])(model_parts, config)
    names = {
        parameter: name for part in model_parts for name, parameter in part.named_parameters()
    }
    matrices = {}
    if settings.name == "Muon":
        matrices = matrices_of(model_parts, per_head=config.muon.per_head)
    groups = parameter_groups(nn.ModuleList(model_parts), settings.weight_decay)
    groups = [
        {**group, "params": [p for p in group["params"] if p not in matrices]}
        for group in _with_rules(groups, settings, names)
    ]
    rounding = Rounding(
        names, seed=config.training.seed, stochastic=settings.rounding == "stochastic"
    )
    implementation = settings.implementation_on(next(iter(names)).device.type)
    adam = _adam(
        [group for group in groups if group["params"]], config, rounding, implementation
    )
    if settings.name != "Muon":
        return adam
    muon = config.muon
    moments = getattr(torch, config.state_dtype)
    matrix_group = {"params": list(matrices), "lr": _or(muon.lr, settings.lr)}
    matrix_group["weight_decay"] = _or(muon.weight_decay, settings.weight_decay)
    groups = _with_rules([matrix_group], settings, names)
    in_order = {p: matrices[p] for group in groups for p in group["params"]}
    device = torch.device(dims["world"].device_type)
    is_double = config.training.dtype == "float64"
    compute = "float64" if is_double else muon.dtype_on(device.type)
    owners = Owners(in_order, dims.stage_group(), dtype=getattr(torch, compute), device=device)
    how = {"rounding": rounding, "momenta": moments, "fused": implementation == "fused"}
    return Muon(groups, owners, muon, other=adam, **how)


def _adam(
    groups: list[Group], config: JobConfig, rounding: Rounding, implementation: str
) -> torch.optim.Adam | None:
    if not groups:
        return None
    settings = config.optimizer
    decoupled = settings.name != "Adam"
    how = {"lr": settings.lr, "betas": (settings.beta1, settings.beta2), "eps": settings.eps}
    how |= {name: implementation == name for name in ("foreach", "fused")}
    stored = {str(group["params"][0].dtype).removeprefix("torch.") for group in groups}
    if "bfloat16" in stored or settings.state_dtype not in (None, *stored):
        how["decoupled_weight_decay"] = decoupled
        return RoundedAdam(groups, rounding, getattr(torch, config.state_dtype), **how)
    return (torch.optim.AdamW if decoupled else torch.optim.Adam)(groups, **how)


def _with_rules(
    groups: Sequence[Group], settings: Optimizer, names: Mapping[nn.Parameter, str]
) -> list[Group]:
    divided = []
    for group in groups:
        by_name = defaultdict(list)
        for parameter in group["params"]:
            by_name[settings.group_of(names[parameter])].append(parameter)
        for own, parameters in by_name.items():
            changed = {**group, "params": parameters, "lr": group.get("lr", settings.lr)}
            if own is not None:
                changed["lr"] *= _or(own.lr_factor, 1.0)
                changed["weight_decay"] = _or(own.weight_decay, group["weight_decay"])
            divided.append(changed)
    return divided


def check_groups(
    optimizer: torch.optim.Optimizer,
    model_parts: Iterable[nn.Module],
    settings: Optimizer,
) -> None:
    """Check that Muon has a matrix, and each entry of `optimizer.groups` a parameter, on at least one rank.

    A collective of all ranks.

    Args:
        optimizer: The optimizer.
        model_parts: The model parts of this rank.
        settings: Table `[optimizer]`.

    Raises:
        SharedConfigError: An entry has no parameter that earlier entries leave to it, or Muon has no matrix.
    """
    names = [name for part in model_parts for name, _ in part.named_parameters()]
    used = [settings.group_of(name) for name in names]
    used_here = [group in used for group in settings.groups]
    by_rank = gather_values(used_here) if used_here else []
    for group, *is_used in zip(settings.groups, *by_rank, strict=True):
        if not any(is_used):
            raise SharedConfigError(
                f"optimizer.groups has {group}, which is for no parameter that an earlier entry has "
                f"not taken; examples of names: {', '.join(map(repr, names[:3]))}"
            )
    if settings.name == "Muon" and not any(gather_values(bool(optimizer.matrix_groups))):
        raise SharedConfigError(
            "optimizer.name = 'Muon' finds no matrix in this model; use optimizer.name = 'AdamW'"
        )


def _or(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else value


def parameter_groups(whole: nn.Module, weight_decay: float) -> list[Group]:
    """Return the groups of an optimizer; groups that decay come first.

    Norms, biases and embeddings (also tied) do not decay. A group has parameters of one mesh, as its kernels need.

    Args:
        whole: A module with all parameters.
        weight_decay: Decay of the groups that decay.
    """
    embeddings = {m.weight for m in whole.modules() if isinstance(m, nn.Embedding)}
    biases = {bias for m in whole.modules() if isinstance(m, Experts) for bias in (m.b13, m.b2)}
    groups = defaultdict(list)
    for p in (p for p in whole.parameters() if p.requires_grad):
        decays = p.ndim > 1 and p not in embeddings and p not in biases
        groups[decays, p.device_mesh if isinstance(p, DTensor) else None].append(p)
    return [
        {"params": group, "weight_decay": weight_decay * decays}
        for (decays, _), group in sorted(groups.items(), key=lambda group: not group[0][0])
    ]


def can_mask_update(optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    """Return whether `mask_update` works: fused kernels, and all gradients of full precision on the device of the job.

    Then the host launches the update before it knows the gradient norm. Gradients of half precision would be scaled by
    a factor that is rounded to half precision.

    Args:
        optimizer: The optimizer.
        device: The device of the job.
    """
    return all(
        group.get("fused")
        and p.device.type == device.type
        and p.dtype in (torch.float32, torch.float64)
        for group in optimizer.param_groups
        for p in group["params"]
    )


def mask_update(optimizer: torch.optim.Optimizer, not_finite: torch.Tensor) -> None:
    """Let the next step change no weight and no state if `not_finite` is one.

    This is the protocol of torch.amp.GradScaler with fused optimizers.

    Args:
        optimizer: The optimizer.
        not_finite: A scalar, float32, on the device.
    """
    optimizer.found_inf = not_finite
