"""Inner modules of layers that a cache can replace: generation keeps their keys, states and inputs.

`lct_inference/generation_cache.py` has the caches.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

Step = Callable[..., Tensor]
"""(the module, its inputs) -> its output, computed from the inputs and the contents of a cache."""


class Cached(nn.Module):
    """A module without parameters. Its layer calls it by `run`."""

    cache: Step | None = None
    """Replaces the forward. None: the module's own forward runs."""

    def run(self, *inputs: object, **settings: object) -> Tensor:
        """Return the output of the cache. Without a cache, return the output of the module.

        Args:
            *inputs: Inputs of the module.
            **settings: Keyword arguments of the module.
        """
        if self.cache is None:
            return self(*inputs, **settings)
        return self.cache(self, *inputs, **settings)


@contextmanager
def cached(model: nn.Module, steps: Mapping[type[Cached], Step]) -> Iterator[None]:
    """Give the modules of these kinds a cache while the context is open.

    Args:
        model: The model.
        steps: The function that replaces the forward, by kind of module.

    Yields:
        None, once the modules have their caches.

    Raises:
        RuntimeError: At the end, there are such modules, and none has used its cache: the layers call their inner
            modules without `run`.
    """
    modules = {
        module: step
        for module in model.modules()
        for kind, step in steps.items()
        if isinstance(module, kind)
    }
    used = set()

    def noted(module: nn.Module, *inputs: object, **settings: object) -> Tensor:
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
