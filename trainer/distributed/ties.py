"""Parameters that several modules share (tied embeddings) stay shared when PyTorch replaces parameters one by one."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def ties_kept(module: nn.Module) -> Iterator[None]:
    """Inside, parameters may be replaced (`parallelize_module`, `to_empty`); afterwards, what was one is one again."""
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            owners.setdefault(parameter, []).append((owner, name))
    yield
    for (first, first_name), *others in owners.values():
        for owner, name in others:
            setattr(owner, name, getattr(first, first_name))
