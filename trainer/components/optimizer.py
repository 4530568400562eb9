"""The optimizer, and which parameters decay."""

from collections import defaultdict
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from trainer.components.rounded_adam import RoundedAdam, initial_state
from trainer.config.registry import OPTIMIZERS
from trainer.config.schema import JobConfig
from trainer.models.experts import Experts


def ensure_state(optimizer: torch.optim.Optimizer) -> None:
    """Give parameters that were never updated the initial state of Adam.

    Another optimizer that has no state yet makes it in a step with gradients of zero, at a learning rate of zero.
    """
    if not isinstance(optimizer, torch.optim.Adam):
        if not optimizer.state:
            _step_without_effect(optimizer)
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                dtype, fused = getattr(optimizer, "state_dtype", None), bool(group["fused"])
                optimizer.state[parameter] = initial_state(parameter, dtype=dtype, fused=fused)


def _step_without_effect(optimizer: torch.optim.Optimizer) -> None:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients, rates = [p.grad for p in parameters], [group["lr"] for group in optimizer.param_groups]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def build_optimizer(model_parts: Sequence[nn.Module], config: JobConfig) -> torch.optim.Optimizer:
    """Return the configured optimizer over all that is trained: AdamW, Adam, or one that a package has added."""
    settings = config.optimizer
    if settings.name in OPTIMIZERS:
        module, _, name = OPTIMIZERS[settings.name].partition(":")
        return getattr(import_module(module), name)(model_parts, config)
    whole = nn.ModuleList(model_parts)
    implementation = settings.implementation_on(next(whole.parameters()).device.type)
    groups = parameter_groups(whole, settings.weight_decay)
    how = {"lr": settings.lr, "betas": (settings.beta1, settings.beta2), "eps": settings.eps}
    how |= {name: implementation == name for name in ("foreach", "fused")}
    stored = {str(group["params"][0].dtype).removeprefix("torch.") for group in groups}
    if "bfloat16" in stored or settings.state_dtype not in (None, *stored):
        names = {parameter: name for part in model_parts for name, parameter in part.named_parameters()}
        return RoundedAdam(groups, config, names, **how)
    return getattr(torch.optim, settings.name)(groups, **how)


def parameter_groups(whole: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return the groups of an optimizer, those that decay first.

    Norms, biases and embeddings (also tied) do not decay. A group has parameters of one mesh, as its kernels need.
    """
    embeddings = {m.weight for m in whole.modules() if isinstance(m, nn.Embedding)}
    biases = {bias for m in whole.modules() if isinstance(m, Experts) for bias in (m.b13, m.b2) if bias is not None}
    groups: dict[tuple[bool, DeviceMesh | None], list[nn.Parameter]] = defaultdict(list)
    for p in (p for p in whole.parameters() if p.requires_grad):
        decays = p.ndim > 1 and p not in embeddings and p not in biases
        groups[decays, p.device_mesh if isinstance(p, DTensor) else None].append(p)
    ordered = sorted(groups.items(), key=lambda group: not group[0][0])
    return [{"params": group, "weight_decay": weight_decay * decays} for (decays, _), group in ordered]


def can_mask_update(optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    """Return whether `mask_update` works: fused kernels, and all gradients of full precision on the device of the job.

    Then the host launches the update before it knows the gradient norm. Gradients of half precision would be scaled by
    a factor that is rounded to it.
    """
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return all(group.get("fused") for group in optimizer.param_groups) and all(
        p.device.type == device.type and p.dtype in (torch.float32, torch.float64) for p in parameters
    )


def mask_update(optimizer: torch.optim.Optimizer, not_finite: torch.Tensor) -> None:
    """Let the next step change no weight and no state if `not_finite`, () float32 on the device, is one.

    This is the protocol of torch.amp.GradScaler with fused optimizers.
    """
    optimizer.found_inf = not_finite
