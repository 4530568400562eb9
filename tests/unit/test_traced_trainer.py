"""Laws of the trainer that the planner traces: what it replaces is there to be replaced."""

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

import lct_planner
from lct_planner.device import machine
from longshard.sharding.exchange import has_peers
from trainer.config.errors import ConfigError, SharedConfigError
from trainer.runtime.agreement import check_same, gather_values, raise_on_all_ranks

pytestmark = pytest.mark.about(
    "lct_planner/traced_trainer.py", "trainer/parallel/machine.py", "trainer/runtime/agreement.py"
)
_OURS = ("trainer.", "longshard.")


def added_methods(module: ModuleType) -> Iterator[str]:
    """Public methods of a module's classes that no base class of ours has, or has with other parameters."""
    for owner in vars(module).values():
        if not inspect.isclass(owner) or owner.__module__ != module.__name__:
            continue
        bases = [base for base in owner.__mro__[1:] if base.__module__.startswith(_OURS)]
        for name, method in vars(owner).items():
            if bases and not name.startswith("_") and inspect.isfunction(method):
                original = next((vars(base)[name] for base in bases if name in vars(base)), None)
                if original is None or [*inspect.signature(original).parameters] != [
                    *inspect.signature(method).parameters
                ]:
                    yield f"{owner.__name__}.{name}"


def test_methods_of_the_planner_replace_methods_of_the_trainer() -> None:
    """A method that is renamed there would be called no more, and the trace would take the device at its word."""
    names = [f"lct_planner.{each.name}" for each in pkgutil.iter_modules(lct_planner.__path__)]
    assert [added for name in names for added in added_methods(importlib.import_module(name))] == []


def test_the_test_sees_a_method_that_replaces_nothing() -> None:
    module = ModuleType("lct_planner.wrong")
    text = "from trainer.trainer import Trainer\nclass Wrong(Trainer):\n"
    text += "    def build_metric(self): ...\n    def region(self): ...\n    def build_task(self): ..."
    exec(text, vars(module))
    assert [*added_methods(module)] == ["Wrong.build_metric", "Wrong.region"]


def test_a_rank_without_peers_agrees_with_itself() -> None:
    """No message is sent, and no value of the device is read."""
    with machine(1, 4, None):
        assert not has_peers(torch.distributed.group.WORLD)
        assert gather_values({1: "a"}) == [{"1": "a"}] * 4
        check_same({"a": 1}, "data")
        assert raise_on_all_ranks(lambda: 3) == 3

        def wrong() -> None:
            raise ConfigError("wrong")

        with pytest.raises(SharedConfigError, match="wrong"):
            raise_on_all_ranks(wrong)
