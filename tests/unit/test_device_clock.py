"""Laws of the clock of a device: when it reached a point, whenever the host asks, without waiting for later work."""

import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from trainer.components.device_clock import DeviceClock


class Machine:
    """A simulated GPU. The host queues work of known seconds in advance, and does not wait."""

    def __init__(self) -> None:
        self.host, self.busy_until, self.log = 100.0, 7.0, []  # the device has a clock of its own, 93 behind
        machine = self

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = max(machine.busy_until, machine.host - 93)

            def synchronize(self) -> None:
                machine.host = max(machine.host, self.at + 93)

            def elapsed_time(self, later: "Event") -> float:
                return 1e3 * (later.at - self.at)

        self.event = Event

    def work(self, seconds: float) -> None:
        self.busy_until = max(self.busy_until, self.host - 93) + seconds


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    simulated = Machine()

    @contextmanager
    def stream(which: object):
        simulated.log.append(("enter", which))
        yield
        simulated.log.append("leave")

    beside = SimpleNamespace(wait_event=lambda event: simulated.log.append(("waits", event)))
    monkeypatch.setattr(torch.cuda, "Event", simulated.event)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: beside)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(time, "perf_counter", lambda: simulated.host)
    simulated.beside = beside
    return simulated


def test_a_step_ends_when_the_device_ends_it_although_the_host_asks_later(machine: Machine) -> None:
    machine.work(5)  # weights are drawn
    clock = DeviceClock(torch.device("cuda"))
    assert machine.host == 105
    ends = []
    for _ in range(3):
        machine.work(2.0)
        mark = clock.mark()
        machine.work(1.5)  # of the next step
        machine.host += 0.1
        ends.append((mark, machine.busy_until - 1.5 + 93))
    for mark, end in ends:
        assert clock.time_of(mark) == pytest.approx(end)
    assert machine.host < machine.busy_until + 93, "the host waited for work behind the last mark"


def test_the_host_sees_the_same_time_if_it_waits(machine: Machine) -> None:
    clock = DeviceClock(torch.device("cuda"))
    machine.work(3)
    assert clock.time_of(clock.mark()) == pytest.approx(103) == machine.host


def test_readings_go_beside_the_work_behind_a_mark(machine: Machine) -> None:
    clock = DeviceClock(torch.device("cuda"))
    mark = clock.mark()
    with clock.after(mark):
        machine.log.append("read")
    assert machine.log == [("waits", mark), ("enter", machine.beside), "read", "leave"]


def test_on_a_cpu_work_is_done_when_it_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, now = DeviceClock(torch.device("cpu")), time.perf_counter()
    mark = clock.mark()
    monkeypatch.setattr(time, "perf_counter", lambda: now + 60)
    with clock.after(mark):
        assert now <= clock.time_of(mark) < now + 30
