"""`DomainTensor` with all its rules; see dispatch.py for its description."""

from longshard.domain import (  # noqa: F401 (each registers its rules, or hooks)
    along,
    attention,
    gradients,
    grid_sample,
    hooks,
    indexing,
    interpolation,
    losses,
    masking,
    noise,
    norms,
    products,
    reductions,
    shifts,
    views,
    windows,
)
from longshard.domain.dispatch import DomainOperatorError, DomainTensor, rule

__all__ = ["DomainOperatorError", "DomainTensor", "rule"]
