"""Tied parameters, such as embedding and output, while PyTorch replaces parameters one by one."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def preserve_ties(module: nn.Module) -> Iterator[None]:
    """Tie again, at the end, the parameters that modules shared at the start.

    Inside, parameters may be replaced (`parallelize_module`, `to_empty`).
    """
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            owners.setdefault(parameter, []).append((owner, name))
    yield
    for (first, first_name), *others in owners.values():
        for owner, name in others:
            setattr(owner, name, getattr(first, first_name))
