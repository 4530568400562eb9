"""Law: batches that are made ahead change nothing that is seen: order, position, state, and when an error is raised."""

from collections.abc import Iterator, Mapping
from types import SimpleNamespace

import pytest
import torch

from trainer.components.device_clock import DeviceClock
from trainer.components.metrics import MetricsLogger
from trainer.data.loader import BatchesAhead


class Numbers:
    """Batches 0, 1, 2, ...; the fifth cannot be made."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[dict[str, int]]:
        while True:
            if self.place == 4:
                raise OSError("the file is gone")
            self.place += 1
            yield {"number": self.place - 1}

    @property
    def epoch(self) -> float:
        return self.place / 10

    def state_dict(self) -> dict[int, dict[str, int]]:
        return {0: {"place": self.place}}

    def load_state_dict(self, states: Mapping[int, Mapping[str, int]]) -> None:
        self.place = states[0]["place"]


def numbers(batches: list[dict[str, int]]) -> list[int]:
    return [batch["number"] for batch in batches]


def ahead() -> BatchesAhead:
    return BatchesAhead(Numbers(), 2, lambda batch: batch | {"moved": True})


def test_batches_come_in_order_with_and_without_being_made_ahead() -> None:
    data = ahead()
    assert numbers(data.take()) == [0, 1]
    data.make()
    data.make()
    batches = data.take()
    assert numbers(batches) == [2, 3]
    assert all(batch["moved"] for batch in batches)


def test_the_position_is_that_of_the_batches_that_were_taken() -> None:
    data = ahead()
    data.take()
    before = data.state_dict(), data.epoch
    data.make()
    assert (data.state_dict(), data.epoch) == before == ({0: {"place": 2}}, 0.2)
    data.take()
    assert (data.state_dict(), data.epoch) == ({0: {"place": 4}}, 0.4)


def test_a_resume_forgets_what_was_made() -> None:
    data = ahead()
    data.take()
    data.make()
    data.load_state_dict({0: {"place": 1}})
    assert numbers(data.take()) == [1, 2]


def test_an_error_waits_for_the_step_that_needs_the_batch() -> None:
    data = ahead()
    data.take()
    data.take()
    data.make()
    assert data.state_dict() == {0: {"place": 4}}, "what was trained until then can be saved"
    with pytest.raises(OSError, match="the file is gone"):
        data.take()


def test_a_record_has_the_position_of_the_batches_that_were_taken() -> None:
    """A later step logs a step, so its record must have its own position, not the position of batches made since."""
    data = ahead()
    data.take()
    data.make()
    settings = {"due": lambda _step: True, "dims": {"cp": SimpleNamespace(size=lambda: 1)}, "data_seconds": 0.0}
    metrics = SimpleNamespace(**settings, _clock=DeviceClock(torch.device("cpu")))
    sums, counts = torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.int64)
    record = MetricsLogger.record(metrics, 1, sums, counts, lr=0.1, data=data, late=True)
    assert record.positions == {0: {"place": 2}}
    assert record.epoch == 0.2
