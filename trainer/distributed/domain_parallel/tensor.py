"""`DomainTensor` with all its rules; see dispatch.py for what it is."""

from trainer.distributed.domain_parallel import products, reductions, resample, views, windows
from trainer.distributed.domain_parallel.dispatch import DomainOperatorError, DomainTensor, rule

__all__ = ["DomainOperatorError", "DomainTensor", "products", "reductions", "resample", "rule", "views", "windows"]
