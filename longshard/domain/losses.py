"""Rules of losses. A mean is over all elements, labels or weights of the whole tensor."""

import math
from collections.abc import Callable
from inspect import signature
from typing import Any

import torch

from longshard.domain.dispatch import (
    AnyTensor,
    DomainTensor,
    is_sharded,
    refuse_unless,
    rule,
    wrapped,
)
from longshard.domain.elementwise import elementwise, merged, own_part

_BY_ELEMENT = """
mse_loss l1_loss smooth_l1_loss huber_loss kl_div binary_cross_entropy binary_cross_entropy_with_logits
poisson_nll_loss soft_margin_loss
"""


@rule(*_BY_ELEMENT.split())
def _by_element(function, x, target, *args, **kwargs) -> DomainTensor:
    options, reduction, weight = _arguments(function, x, target, *args, **kwargs)
    each = elementwise(function, x, target, reduction="none", **options)
    each = each if weight is None else each * weight
    if reduction == "batchmean":
        return each.sum() / each.shape[0]
    if (
        reduction == "mean"
        and weight is not None
        and function.__name__ in ("mse_loss", "l1_loss")
    ):
        return each.sum() / (torch.ones_like(each) * weight).sum()
    return each if reduction == "none" else getattr(each, reduction)()


@rule("gaussian_nll_loss")
def _gaussian_loss(
    function, x, target, var, full=False, eps=1e-6, reduction="mean"
) -> DomainTensor:
    """Compute the loss. The variance is at least eps; its gradient ignores this bound."""
    refuse_unless(reduction in ("none", "mean", "sum"), f"reduction {reduction!r}")
    var = var if isinstance(var, AnyTensor) else torch.full_like(x, var)
    var = var.unsqueeze(-1) if var.ndim < x.ndim else var
    var = var + (var.clamp(min=eps) - var).detach()
    each = (var.log() + (x - target).square() / var) / 2 + (
        math.log(2 * math.pi) / 2 if full else 0
    )
    return each if reduction == "none" else getattr(each, reduction)()


@rule("cross_entropy", "nll_loss")
def _class_loss(function, x, target, *args, **kwargs) -> DomainTensor:
    """Compute the loss of x, (N, C, ...), whose classes are whole.

    target: (N, ...), or probabilities (N, C, ...). weight: (C,), a plain tensor.
    """
    options, reduction, weight = _arguments(function, x, target, *args, **kwargs)
    classes = min(x.ndim - 1, 1)
    has_labels = target.ndim < x.ndim
    refuse_unless(not is_sharded(weight), "weights that are sharded")
    target_domain = wrapped(target).domain.moved(int(has_labels), first=classes)
    domain = merged([wrapped(x).domain.axes, target_domain.axes])
    refuse_unless(classes not in domain.axes, "sharded classes")
    result = domain.reduced([classes], keepdim=False)
    labels = own_part(target, result if has_labels else domain, target.shape)
    local = function(
        own_part(x, domain, x.shape), labels, weight=weight, reduction="none", **options
    )
    each = DomainTensor(local, result)
    if reduction != "mean" or not has_labels:
        return each if reduction == "none" else getattr(each, reduction)()
    counts = labels != options.get("ignore_index", -100)
    label_weights = (
        counts.to(local.dtype) if weight is None else weight[labels.where(counts, 0)] * counts
    )
    return each.sum() / DomainTensor(label_weights, result).sum()


def _arguments(
    function: Callable, *args: Any, **kwargs: Any
) -> tuple[dict, str, torch.Tensor | None]:
    """Return the arguments of a loss after input and target, its reduction, and its weights."""
    options = dict([*signature(function).bind(*args, **kwargs).arguments.items()][2:])
    reduction = options.pop("reduction", "mean")
    weight = options.pop("weight", None)
    old = (
        options.pop("size_average", None) is not None or options.pop("reduce", None) is not None
    )
    known = ("none", "mean", "sum", *["batchmean"][: function.__name__ == "kl_div"])
    why = "`reduce`, `size_average`, or a reduction that is none of " + ", ".join(known)
    refuse_unless(not old and reduction in known, why)
    return options, reduction, weight
