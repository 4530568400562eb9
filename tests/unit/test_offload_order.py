"""The order of the copies of offloaded inputs, on a simulated device that works late and in random order.

Kernels and copies read and write memory when they run, not when they are queued. A stream runs in order, and streams
interleave at random. As in PyTorch's allocator, freed memory goes to the next tensor of its stream at once. The test
sees a value that is read before it is written, or overwritten too early, where it is used.
"""

import random
from collections import deque
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from trainer.transforms import offload
from trainer.transforms.offload import CopyStream, HostInputs, KeptInput


class WrongValueError(AssertionError):
    """A kernel read another value than its program says."""


class Event:
    def __init__(self) -> None:
        self.is_done = False


class Stream:
    """A queue of a device's work, with the methods of `torch.Stream`."""

    def __init__(self, device: "Device") -> None:
        self.device, self.queue, self.free = device, deque(), []
        device.streams.append(self)

    def record_event(self) -> Event:
        event = Event()
        self.queue.append(lambda: setattr(event, "is_done", True))
        return event

    def wait_event(self, event: Event) -> None:
        self.queue.append(event)

    def __enter__(self) -> None:
        self.device.entered.append(self)

    def __exit__(self, *_: object) -> None:
        self.device.entered.pop()

    def step(self) -> bool:
        """Carry out the first entry; False: it waits for an event."""
        if isinstance(self.queue[0], Event):
            if not self.queue[0].is_done:
                return False
            self.queue.popleft()
        else:
            self.queue.popleft()()
        return True


class Tensor:
    """Memory of a device; its address is free for the next tensor of the stream as soon as nobody holds it."""

    shape, dtype = (2,), torch.float32

    def __init__(self, device: "Device", on_host: bool = False) -> None:
        self.device, self.stream = device, None if on_host else device.current()
        if self.stream is not None and self.stream.free:
            self.address = self.stream.free.pop(device.random.randrange(len(self.stream.free)))
        else:
            self.address = len(device.memory)
            device.memory.append(None)

    def stride(self) -> tuple[int, ...]:
        return (1,)

    def copy_(self, source: "Tensor", non_blocking: bool) -> None:
        assert non_blocking
        memory, target, source = self.device.memory, self.address, source.address
        self.device.current().queue.append(lambda: memory.__setitem__(target, memory[source]))

    def __del__(self) -> None:
        if self.stream is not None:
            self.stream.free.append(self.address)


class Device:
    """Streams and memory. `random` chooses the order in which streams go ahead."""

    def __init__(self, seed: int) -> None:
        self.random, self.memory, self.streams, self.entered = random.Random(seed), [], [], []
        self.entered.append(Stream(self))
        self.haste = self.random.choice((0, 1, 2, 20))  # how far the device may go between two calls of the host

    def current(self) -> Stream:
        return self.entered[-1]

    def kernel(self, write: Tensor, value: object, read: Tensor | None = None, expected: object = None) -> None:
        """Queue a kernel on the current stream, and let the device work for a while."""
        source, target, memory = read and read.address, write.address, self.memory

        def run() -> None:
            if source is not None and memory[source] != expected:
                raise WrongValueError(f"{expected} is {memory[source]}")
            memory[target] = value

        self.current().queue.append(run)
        for _ in range(self.random.randint(0, self.haste)):
            self.step()

    def step(self) -> bool:
        busy = [stream for stream in self.streams if stream.queue]
        self.random.shuffle(busy)
        return any(stream.step() for stream in busy)

    def finish(self) -> None:
        while self.step():
            pass
        assert not any(stream.queue for stream in self.streams), "streams wait for each other"


class SimulatedCopies(CopyStream):
    """The copies of the program, on a simulated stream."""

    def __init__(self, device: Device) -> None:
        super().__init__("cpu")
        self.simulated, self._stream = device, Stream(device)

    def host_like(self, tensor: Tensor) -> Tensor:
        return Tensor(self.simulated, on_host=True)

    def device_like(self, buffer: Tensor) -> Tensor:
        return Tensor(self.simulated)


def schedule(seed: int, copies: Callable[[Device], CopyStream] = SimulatedCopies) -> int:
    """Run a program of random sizes: micro-batches in flight, some on a second stream, some without a backward.

    Returns: how many inputs and results of attention came back from the host.
    """
    device, came_back = Device(seed), 0
    chance = device.random
    streams = device.current(), Stream(device)
    with mock.patch.object(torch.accelerator, "current_stream", device.current):
        stream_of_copies = copies(device)
        chains = [HostInputs(stream_of_copies) for _ in range(3)]  # inputs, attention's outputs, log-sum-exps
        layers, to_host = chance.randint(1, 4), chance.randint(0, 4)
        in_flight, left, number = deque(), chance.randint(2, 6), 0
        while left or in_flight:
            if left and (not in_flight or (len(in_flight) < 3 and chance.random() < 0.5)):
                left, number = left - 1, number + 1
                stream = chance.choice(streams)
                with stream:
                    in_flight.append((stream, number, forward(device, chains, number, layers, to_host)))
                continue
            stream, batch, kept = in_flight.popleft()
            with stream:
                if chance.random() < 0.9:
                    came_back += len(chains) * min(to_host, layers)
                    backward(device, batch, kept)
                kept.clear()
        device.finish()
    return came_back


def forward(
    device: Device, chains: list[HostInputs], batch: int, layers: int, to_host: int
) -> list[tuple[KeptInput, ...]]:
    kept, x = [], Tensor(device)
    device.kernel(x, (batch, 0))
    for layer in range(layers):
        how = {"is_first": layer == 0, "to_host": layer < to_host}
        layer_kept = [chains[0].keep(x, **how)]
        for name, chain in zip(RESULTS, chains[1:], strict=True):
            result = Tensor(device)
            device.kernel(result, (batch, layer, name), x, (batch, layer))
            layer_kept.append(chain.keep(result, **how))
            del result
        kept.append(tuple(layer_kept))
        between, y = Tensor(device), Tensor(device)
        device.kernel(between, "activations", x, (batch, layer))
        device.kernel(y, (batch, layer + 1), between, "activations")
        x = y
    return kept


RESULTS = ("output", "log-sum-exp")


def backward(device: Device, batch: int, kept: list[tuple[KeptInput, ...]]) -> None:
    while kept:
        for _ in range(device.random.choice((1, 1, 2))):  # a backward in parts recomputes twice
            x, between = kept[-1][0].take(), Tensor(device)
            device.kernel(between, "recomputed", x, (batch, len(kept) - 1))
            del x
            for name, result in zip(RESULTS, kept[-1][1:], strict=True):
                taken = result.take()
                device.kernel(between, "recomputed", taken, (batch, len(kept) - 1, name))
                del taken
            gradient = Tensor(device)
            device.kernel(gradient, "gradient", between, "recomputed")
        kept.pop()


@pytest.mark.parametrize("seeds", [range(1_500), pytest.param(range(1_500, 12_000), marks=pytest.mark.slow)])
def test_every_input_comes_back_in_every_schedule(seeds: range) -> None:
    assert sum(schedule(seed) for seed in seeds) > 15 * len(seeds)


def chunks_schedule(seed: int, copies: Callable[[Device], CopyStream] = SimulatedCopies) -> None:
    """Read tensors again and again, fetched ahead, and add to others meanwhile, as chunks of a sequence do."""
    device = Device(seed)
    chance, number = device.random, device.random.randint(2, 5)
    with mock.patch.object(torch.accelerator, "current_stream", device.current):
        inputs, kept, sums = HostInputs(copies(device)), [], [0] * number
        for i in range(number):
            tensor = Tensor(device)
            device.kernel(tensor, (i, 0))
            kept.append(inputs.keep(tensor, is_first=True, to_host=True))
        for _ in range(12):
            i, j = chance.sample(range(number), 2)
            fetched, between = kept[i].fetch(), Tensor(device)
            device.kernel(between, "a tile")
            if chance.random() < 0.5:
                total = kept[j].take()
                device.kernel(total, (j, sums[j] + 1), total, (j, sums[j]))
                sums[j] += 1
                kept[j] = inputs.keep(total, is_first=True, to_host=True)
                del total
            kept[i].take()
            device.kernel(between, "the next tile", fetched, (i, sums[i]))
            del fetched
        device.finish()


def chunks_schedules(copies: Callable[[Device], CopyStream]) -> None:
    for seed in range(1_500):
        chunks_schedule(seed, copies)


def test_what_waits_for_chunks_is_read_as_it_was_written_in_every_schedule() -> None:
    chunks_schedules(SimulatedCopies)


def test_the_device_of_a_job_has_one_stream_of_copies() -> None:
    with mock.patch.object(offload.torch, "Stream") as stream:
        CopyStream("cuda")
    stream.assert_called_once_with(torch.device("cuda"))


# ---- mistakes that are found


def schedules(copies: Callable[[Device], CopyStream]) -> None:
    for seed in range(1_500):
        schedule(seed, copies)


class NoWaitForTheProducer(SimulatedCopies):
    def copy(self, target: Tensor, source: Tensor) -> tuple[Stream, Event]:
        with mock.patch.object(self._stream, "wait_event"):
            return super().copy(target, source)


class EventBeforeTheLastProducer(SimulatedCopies):
    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self.earlier = Event()
        self.earlier.is_done = True

    def copy(self, target: Tensor, source: Tensor) -> tuple[Stream, Event]:
        stream, now = self.simulated.current(), self.simulated.current().record_event()
        with mock.patch.object(stream, "record_event", return_value=self.earlier):
            copied = super().copy(target, source)
        self.earlier = now
        return copied


class StreamOfTheBeginning(SimulatedCopies):
    def copy(self, target: Tensor, source: Tensor) -> tuple[Stream, Event]:
        with mock.patch.object(torch.accelerator, "current_stream", return_value=self.simulated.streams[0]):
            return super().copy(target, source)


class StreamOfTheMoment(SimulatedCopies):
    """Lets the current stream wait, in place of the stream of the memory."""

    def wait(self, copied: tuple[Stream, Event]) -> None:
        self.simulated.current().wait_event(copied[1])


class NoWaitForTheCopy(SimulatedCopies):
    def wait(self, copied: tuple[Stream, Event]) -> None:
        pass


class EventBeforeTheCopy(SimulatedCopies):
    def copy(self, target: Tensor, source: Tensor) -> tuple[Stream, Event]:
        event = self._stream.record_event()
        return super().copy(target, source)[0], event


class OneStreamEachWay(SimulatedCopies):
    """Without an order between them, a buffer is written again while it is read."""

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self.out, self.back = self._stream, Stream(device)

    def copy(self, target: Tensor, source: Tensor) -> tuple[Stream, Event]:
        self._stream = self.back if source.stream is None else self.out
        return super().copy(target, source)


MISTAKES = (
    *(NoWaitForTheProducer, EventBeforeTheLastProducer, EventBeforeTheCopy, NoWaitForTheCopy),
    *(StreamOfTheBeginning, StreamOfTheMoment, OneStreamEachWay),
)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_order_of_copies_is_seen(mistake: type[CopyStream]) -> None:
    with pytest.raises(WrongValueError):
        schedules(mistake)


def freed_early(self: KeptInput) -> None:
    if self.buffer is not None:
        self.tensor = None


def taken_early(self: KeptInput) -> Any:
    self.fetch()
    return self.tensor


@pytest.mark.parametrize(("method", "mistake"), [("release", freed_early), ("take", taken_early)])
def test_memory_that_is_used_too_early_is_seen(method: str, mistake: Callable) -> None:
    with mock.patch.object(KeptInput, method, mistake), pytest.raises(WrongValueError):
        schedules(SimulatedCopies)


@pytest.mark.parametrize("mistake", [NoWaitForTheProducer, NoWaitForTheCopy])
def test_a_mistake_in_the_order_of_chunks_is_seen(mistake: type[CopyStream]) -> None:
    with pytest.raises(WrongValueError):
        chunks_schedules(mistake)


def test_a_view_of_another_dtype_is_another_tensor() -> None:
    """A layer may keep its input, and the bits of its input."""
    x = torch.rand(4)
    assert offload._is_same(x, x.view(4))
    assert not offload._is_same(x, x.view(torch.int32))
