"""Inner modules of layers, whose work a cache may do: generation keeps the keys, states and inputs that they see."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

Step = Callable[..., torch.Tensor]
"""(the module, its inputs) -> its output, from the inputs and from what a cache keeps."""


class Cached(nn.Module):
    """A module without parameters that a layer calls by `run`."""

    cache: Step | None = None
    """What does its work. None: its own forward."""

    def run(self, *inputs: object, **settings: object) -> torch.Tensor:
        """Return the output of the cache, if there is one, else of the module."""
        if self.cache is None:
            return self(*inputs, **settings)
        return self.cache(self, *inputs, **settings)


@contextmanager
def cached(model: nn.Module, steps: Mapping[type[Cached], Step]) -> Iterator[None]:
    """Give the modules of these kinds a cache inside.

    Raises:
        RuntimeError: at the end, no module has used it: layers call their inner modules without `run`.
    """
    modules = {
        module: step
        for module in model.modules()
        for kind, step in steps.items()
        if isinstance(module, kind)
    }
    used: set[nn.Module] = set()

    def noted(module: nn.Module, *inputs: object, **settings: object) -> torch.Tensor:
        used.add(module)
        return modules[module](module, *inputs, **settings)

    try:
        for module in modules:
            module.cache = noted
        yield
    finally:
        for module in modules:
            del module.cache
    if modules and not used:
        raise RuntimeError(
            f"no {type(next(iter(modules))).__name__} of the model used its cache; let each layer call its inner "
            "modules by `run`, as trainer/models/attention.py does"
        )
