"""Laws of garbage collection: Python's own is off inside, and all ranks collect at the same steps."""

import gc
from unittest import mock

import pytest

from trainer.runtime import garbage

pytestmark = pytest.mark.about("trainer/runtime/garbage.py")


def test_young_objects_are_collected_every_fifty_steps_and_all_of_them_first() -> None:
    calls: list[tuple] = []
    counted = mock.Mock(wraps=gc, collect=lambda *generation: calls.append(generation))
    with mock.patch.object(garbage, "gc", counted), garbage.manual_garbage_collection() as collect:
        assert not gc.isenabled()
        for step in range(1, 151):
            collect(step)
    assert gc.isenabled()
    assert calls == [(), (1,), (1,), (1,)]
