"""Law: classes that stand for one another have the same methods with the same arguments, without a base that says so.

A caller takes any of them, and asks for no class.
"""

import inspect
from typing import Any

import pytest

from trainer.data.iterable_data import IterableData, IterableDocuments
from trainer.data.mixture import Mixture, MixtureStream
from trainer.data.order.streams import ItemStream, Shuffled
from trainer.data.text_data import TextData
from trainer.stores.remote_store import RemoteStore
from trainer.stores.store import Store

DATA_SET = ("items", "check", "streams_with_text", "streams", "describe", "items_of", "contents")
ORDER = ("__len__", "item", "passes", "restart", "state")
STREAM = ("state", "passes", "restart", "next_sample")


def arguments(cls: type, name: str) -> int | None:
    """Return how many arguments a method takes; None for an attribute, or for any number of them."""
    member = inspect.getattr_static(cls, name)
    if not inspect.isfunction(member):
        return None
    taken = inspect.signature(member).parameters.values()
    is_open = any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in taken)
    return None if is_open else len(taken)


def differing(classes: tuple[type, ...], names: tuple[str, ...]) -> list[str]:
    """Return the names that a class lacks, or that take other arguments than in another class."""
    wrong = [f"{cls.__name__} lacks {name}" for cls in classes for name in names if not hasattr(cls, name)]
    for name in () if wrong else names:
        counts = {cls.__name__: arguments(cls, name) for cls in classes}
        if len({count for count in counts.values() if count is not None}) > 1:
            wrong.append(f"{name}: {counts}")
    return wrong


@pytest.mark.parametrize(
    ("classes", "names"),
    [
        ((TextData, IterableData, Mixture), DATA_SET),
        ((Shuffled, IterableDocuments), ORDER),
        ((ItemStream, MixtureStream), STREAM),
    ],
)
def test_each_kind_has_the_methods(classes: tuple[type, ...], names: tuple[str, ...]) -> None:
    assert not differing(classes, names)


def test_a_missing_method_and_another_argument_are_seen() -> None:
    class Other:
        items = 0

        def check(self, seed: int) -> Any:
            return seed

    assert differing((TextData, Other), ("items", "check")) == ["check: {'TextData': 3, 'Other': 2}"]
    assert differing((TextData, Other), ("contents",)) == ["Other lacks contents"]


def test_a_remote_store_does_nothing_as_a_local_folder_does_it() -> None:
    """`step` and `write` call other methods alone."""
    methods = {name for name, member in vars(Store).items() if inspect.isfunction(member) and name[0] != "_"}
    assert methods - vars(RemoteStore).keys() == {"step", "write"}
