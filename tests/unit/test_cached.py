"""Laws of caches of inner modules: a cache does the work of its module inside, and is gone afterwards."""

import pytest
import torch
from torch import nn

from trainer.models.cached import Cached, cached

pytestmark = pytest.mark.about("trainer/models/cached.py")


class Doubled(Cached):
    def forward(self, x: torch.Tensor, *, added: float = 0.0) -> torch.Tensor:
        return 2 * x + added


class Layer(nn.Module):
    def __init__(self, *, by_run: bool = True) -> None:
        super().__init__()
        self.inner = Doubled()
        self.by_run = by_run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner.run(x, added=1.0) if self.by_run else self.inner(x, added=1.0)


def negated(module: Doubled, x: torch.Tensor, *, added: float) -> torch.Tensor:
    return -module(x, added=added)


def test_a_cache_does_the_work_inside_and_is_gone_afterwards() -> None:
    layer = Layer()
    with cached(layer, {Doubled: negated}):
        assert layer(torch.tensor(3.0)) == -7
    assert layer(torch.tensor(3.0)) == 7
    with pytest.raises(ZeroDivisionError), cached(layer, {Doubled: negated}):
        raise ZeroDivisionError
    assert layer.inner.cache is None


def test_a_layer_that_passes_its_cache_by_is_an_error() -> None:
    layer = Layer(by_run=False)
    with pytest.raises(RuntimeError, match="no Doubled of the model used its cache"), cached(layer, {Doubled: negated}):
        layer(torch.tensor(3.0))


def test_a_model_without_such_modules_is_none() -> None:
    with cached(nn.Linear(2, 2), {Doubled: negated}):
        pass
