"""Ask torch about whole tensors: the shapes of a call's results, and which of them may share memory.

The call runs on contiguous tensors of the global shapes without data, so every rank gets the same answer. If torch
refuses the call, it is refused on every rank before anything is sent.

State of the process: The answers of torch for calls with whole tensors, by shapes and types, at most 4,096, so that a
plan is computed once.
"""

import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from longshard.sharding.tensors import version_of


class Seen(NamedTuple):
    """A result.

    Attributes:
        shape: Its global shape.
        is_view: Whether it shares memory with an argument.
    """

    shape: tuple[int, ...]
    is_view: bool


class Base(NamedTuple):
    """The shard that another tensor may be a view of, and its version when the view was made.

    With rows 5 + 3, the slice of the first six is everything that rank 0 has, and a part of the rows of rank 1. So a
    shard may be a view on one rank and a copy on another one.

    Attributes:
        shard: A weak reference to the shard.
        version: The version of the shard.
    """

    shard: weakref.ref
    version: int

    @classmethod
    def of(cls, shard: Tensor) -> "Base":
        """Return the note for a view that is made now.

        Args:
            shard: The viewed shard, any shape.
        """
        return cls(weakref.ref(shard), version_of(shard))

    def has_changed(self) -> bool:
        """Return whether the shard was changed in place after the view was made: a copy does not show the change."""
        shard = self.shard()
        return shard is not None and version_of(shard) != self.version


_CACHE: dict[Any, tuple[Seen, ...] | None] = {}


def results(
    function: Callable, args: tuple, kwargs: dict, kinds: tuple[type, ...]
) -> tuple[Seen, ...] | None:
    """Return the results that torch has for whole tensors; cached.

    None if they cannot be known without data, and in compiled code.

    Args:
        function: The function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        kinds: The classes of tensors, which have a global `shape` and a `dtype`.

    Raises:
        Exception: Any error of torch for the whole tensors, such as RuntimeError for shapes that do not fit.
    """
    if torch.compiler.is_compiling():
        return None

    described = mapped(
        lambda x: (tuple(x.shape), x.dtype) if isinstance(x, kinds) else x, (args, kwargs)
    )
    key = function, repr(described)  # 0 and False differ in it, and lists have no hash
    if key not in _CACHE:
        if len(_CACHE) >= 4096:
            _CACHE.clear()
        _CACHE[key] = _results(function, args, kwargs, kinds)
    return _CACHE[key]


def _results(
    function: Callable, args: tuple, kwargs: dict, kinds: tuple[type, ...]
) -> tuple[Seen, ...] | None:
    tensors = []

    def whole(x: Any) -> Any:
        if isinstance(x, kinds):
            tensors.append(torch.empty(x.shape, dtype=x.dtype, device="meta"))
            return tensors[-1]
        return x

    # Modes, such as the mode of selective checkpointing, must not count these calls.
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        args, kwargs = mapped(whole, (args, kwargs))
        try:
            outputs = [x for x in flat(function(*args, **kwargs)) if isinstance(x, Tensor)]
        except NotImplementedError:  # it depends on data, or on a device
            return None
        except RuntimeError as error:
            if "meta tensor" in str(error):  # it depends on data
                return None
            raise
    return tuple(
        Seen(tuple(x.shape), any(torch._C._is_alias_of(x, tensor) for tensor in tensors))
        for x in outputs
    )


def flat(value: Any) -> Iterator[Any]:
    """Yield the leaves of nested tuples, lists and dictionaries.

    Args:
        value: The nested value.
    """
    if isinstance(value, tuple | list | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from flat(part)
    else:
        yield value


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Return nested arguments, or results, with a function applied to each leaf.

    Args:
        function: The function.
        value: The nested value.
    """
    # the last kind: several results that have names
    if type(value) in (tuple, list) or hasattr(value, "n_sequence_fields"):
        return type(value)([mapped(function, part) for part in value])
    return (
        {name: mapped(function, part) for name, part in value.items()}
        if type(value) is dict
        else function(value)
    )
