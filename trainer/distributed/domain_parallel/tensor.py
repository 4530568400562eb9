"""`DomainTensor` with all its rules; see dispatch.py for what it is."""

from trainer.distributed.domain_parallel import rules, views
from trainer.distributed.domain_parallel.dispatch import DomainOperatorError, DomainTensor, rule

__all__ = ["DomainOperatorError", "DomainTensor", "rule", "rules", "views"]
