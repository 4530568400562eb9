"""What torch does with whole tensors: the shapes and strides of a call's results, and which of them are views.

A shard cannot tell. Of rows 5 + 3 the slice of the first six is everything that rank 0 has, so its shard is contiguous,
and a part of what rank 1 has, so its shard is not. The call runs on tensors of the global shapes and strides without
data, so every rank gets the same answer, and what torch refuses is refused on every rank before anything is sent.
"""

import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from trainer.distributed.sharding.tensors import version_of

Strides = tuple[int, ...] | None
"""Strides of a whole tensor, in elements; None: contiguous."""


class Seen(NamedTuple):
    """A result: its global shape and strides, and whether it shares memory with an argument."""

    shape: tuple[int, ...]
    strides: Strides
    is_view: bool


class Copied(NamedTuple):
    """The shard of which a tensor is a copy, where torch has a view, and the version of the shard at that time."""

    source: weakref.ref
    version: int

    @classmethod
    def of(cls, source: torch.Tensor) -> "Copied":
        """Return the note for a copy that is made now."""
        return cls(weakref.ref(source), version_of(source))

    def is_stale(self) -> bool:
        """Return whether the shard was changed in place since then, which the copy does not show."""
        source = self.source()
        return source is not None and version_of(source) != self.version


_CACHE: dict[Any, tuple[Seen, ...] | None] = {}


def results(function: Callable, args: tuple, kwargs: dict, kinds: tuple[type, ...]) -> tuple[Seen, ...] | None:
    """Return what torch gives for whole tensors, one entry for each tensor; None if it cannot be known without data.

    kinds: the classes of tensors, which have `shape`, `dtype` and a global `stride()`.

    Raises:
        Exception: as torch does for the whole tensors, such as RuntimeError for shapes that do not fit.
    """
    if torch.compiler.is_compiling():
        return None
    try:
        key = function, _key(args, kinds), _key(kwargs, kinds)
        if key in _CACHE:
            return _CACHE[key]
    except TypeError:  # an argument without a hash
        key = None
    found = _results(function, args, kwargs, kinds)
    if key is not None:
        if len(_CACHE) >= 4096:
            _CACHE.clear()
        _CACHE[key] = found
    return found


def _results(function: Callable, args: tuple, kwargs: dict, kinds: tuple[type, ...]) -> tuple[Seen, ...] | None:
    tensors: list[torch.Tensor] = []

    def whole(x: Any) -> Any:
        if isinstance(x, kinds):
            tensors.append(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta"))
            return tensors[-1]
        if isinstance(x, tuple | list):
            return type(x)(map(whole, x)) if type(x) in (tuple, list) else x
        return {name: whole(part) for name, part in x.items()} if type(x) is dict else x

    # Modes, such as that of selective checkpointing, must not count these calls.
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        args, kwargs = whole(args), whole(kwargs)
        try:
            found = [x for x in flat(function(*args, **kwargs)) if isinstance(x, torch.Tensor)]
        except NotImplementedError:  # it depends on data, or on a device
            return None
    return tuple(
        Seen(
            tuple(x.shape),
            None if x.is_contiguous() else x.stride(),
            any(is_alias(x, tensor) for tensor in tensors),
        )
        for x in found
    )


def is_alias(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors share memory."""
    return torch._C._is_alias_of(a, b)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _key(x: Any, kinds: tuple[type, ...]) -> Any:
    """Return what the answer depends on, hashable; the type belongs to it, because 0 equals False."""
    if isinstance(x, kinds):
        return "tensor", tuple(x.shape), tuple(x.stride()), x.dtype
    if isinstance(x, tuple | list):
        return type(x), tuple(_key(part, kinds) for part in x)
    if isinstance(x, dict):
        return tuple((name, _key(part, kinds)) for name, part in x.items())
    return (slice, x.start, x.stop, x.step) if isinstance(x, slice) else (type(x), x)


def flat(value: Any) -> Iterator[Any]:
    """Yield the leaves of nested tuples, lists and dictionaries."""
    if isinstance(value, tuple | list | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from flat(part)
    else:
        yield value
