"""Functions of plain data that are computed once, and are constants of compiled code."""

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import TypeVar

import torch

F = TypeVar("F", bound=Callable)


def planned(function: F) -> F:
    """Cache a function of hashable plain data. torch.compile calls it and keeps the result, instead of tracing it.

    Arguments are numbers, strings and tuples of them: of other objects a compiled function would check the identity.
    The result is no tensor: torch.compile gives all constants of one name one source.
    """
    cached = lru_cache(maxsize=1024)(function)

    @torch.compiler.assume_constant_result
    @wraps(function)
    def call(*args: object) -> object:
        return cached(*args)

    return call
