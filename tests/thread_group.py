"""A process group whose ranks are threads of one process: a mailbox that hides no mistake with asynchronous operations.

    a missing wait              At the post, receive buffers are filled with 0xFF bytes, NaN in floating point. A rank
                                gets its data in its own `wait`, and not before.
    a wait on another stream    On a GPU, the copy runs on a side stream, after a delay; `wait` makes the current
                                stream wait for it, and the host never waits for the device.
    an overwritten send buffer  At the post, the sender copies its message. In its `wait`, it compares.

See `thread_ranks.py` for the threads.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import reduce

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllreduceOptions, ReduceScatterOptions

_CYCLES = 2_000_000  # of a GPU's clock before a copy: about a millisecond
_REDUCTIONS = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.MIN: torch.minimum,
}


class LostRankError(RuntimeError):
    """Another rank failed, so this rank waits in vain."""


@dataclass
class _Posted:
    """Data of a rank for an operation.

    description: all ranks must post the same. parts: of a copy of the tensor that the rank sends.
    """

    description: str
    parts: Sequence[torch.Tensor] = ()
    event: torch.cuda.Event | None = None


class Mailbox:
    """The operations of all groups of one run, by rank of the run.

    limit: seconds after which every wait ends.
    """

    def __init__(self, device: torch.device, limit: float) -> None:
        self.device = device
        self.failure: tuple[int, BaseException] | None = None
        self._deadline = time.monotonic() + limit
        self._changed = threading.Condition()
        self._ended: set[int] = set()
        self._posted: dict[tuple, dict[object, _Posted]] = {}  # operation -> role -> what it brought
        self._left: Counter[tuple] = Counter()

    def remaining(self) -> float:
        """Return the seconds until the limit."""
        return max(self._deadline - time.monotonic(), 0)

    def end(self, rank: int, error: BaseException | None = None) -> None:
        """Note that a rank posts nothing more. The first error ends all waits."""
        with self._changed:
            self._ended.add(rank)
            if error is not None and self.failure is None:
                self.failure = rank, error
            self._changed.notify_all()

    def post(self, key: tuple, role: object, posted: _Posted) -> None:
        with self._changed:
            self._posted.setdefault(key, {})[role] = posted
            self._changed.notify_all()

    def all_posted(self, work: "Work") -> list[_Posted]:
        """Block until all parties of an operation have posted it; return their posts in their order.

        Raises:
            LostRankError: Another rank failed.
            TimeoutError: A rank did not post the operation in time.
            AssertionError: A rank ended without posting it, or the ranks posted different operations.
        """
        posted = self._posted[work.key]

        def missing() -> list[int]:
            return [rank for role, rank in work.parties.items() if role not in posted]

        def lost() -> bool:
            return self.failure is not None or not self._ended.isdisjoint(missing())

        with self._changed:
            self._changed.wait_for(lambda: not missing() or lost(), timeout=self.remaining())
            if missing() and self.failure is not None:
                raise LostRankError(f"{work.name}: rank {self.failure[0]} failed")
            if missing() and lost():
                raise AssertionError(f"{work.name}: of rank(s) {missing()}, some returned and never posted it")
            if missing():
                raise TimeoutError(f"{work.name}: rank(s) {missing()} did not post it in time")
        kinds = {each.description for each in posted.values()}
        assert len(kinds) == 1, f"{work.name}: the ranks differ: {sorted(kinds)}"
        return [posted[role] for role in work.parties]

    def leave(self, work: "Work") -> None:
        """Note that a party has its data; forget the operation after the last one."""
        with self._changed:
            self._left[work.key] += 1
            if self._left[work.key] == len(work.parties):
                del self._left[work.key], self._posted[work.key]


class Work(dist.Work):
    """An operation of one rank.

    parties: role -> rank of the run, for all ranks that must post it. deliver: fills the receive buffers from the posts
    of all parties, in their order. sent: the tensor that must not change before `wait`, and a copy of it.
    """

    def __init__(
        self,
        group: "ThreadGroup",
        key: tuple,
        parties: Mapping[object, int],
        deliver: Callable[[list[_Posted]], None],
        sent: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> None:
        super().__init__()
        self.name, self.key, self.parties = f"{key[1]} {key[2:]} in {key[0]}", key, parties
        self.is_done = False
        self.overwritten: torch.Tensor | None = None  # a bool on the device, to be read at the end
        self._group, self._deliver, self._sent = group, deliver, sent

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until all parties have posted, within the time limit of the mailbox, and get the data."""
        if self.is_done:
            return True
        if self._sent is not None:
            now, then = map(_bytes, self._sent)
            self.overwritten = (now != then).any()
        posted = self._group.mailbox.all_posted(self)
        with torch.no_grad(), self._group.late(posted):
            self._deliver(posted)
        self._group.mailbox.leave(self)
        self.is_done, self._deliver, self._sent = True, None, None
        return True


class ThreadGroup(dist.ProcessGroup):
    """A process group whose ranks are threads. Sums are made in the order of ranks.

    name: the same on all its ranks. ranks: numbers of its ranks in the run. own: the rank of this thread.
    """

    def __init__(self, mailbox: Mailbox, name: str, ranks: Sequence[int], own: int) -> None:
        super().__init__(list(ranks).index(own), len(ranks))
        self.mailbox, self.ranks, self.own = mailbox, tuple(ranks), own
        self._name, self._numbers = name, Counter()
        self._works: list[Work] = []
        self._side = torch.cuda.Stream() if mailbox.device.type == "cuda" else None

    def getBackendName(self) -> str:
        return "threads"

    # torch 2.14 asks the backend of a device whether it takes messages together
    supports_coalescing = False

    def _get_backend(self, device: torch.device) -> "ThreadGroup":
        return self

    def all_gather_single(self, output: torch.Tensor, x: torch.Tensor, opts: object = None) -> dist.Work:
        return self._collective("all_gather", x, lambda x: [x], 0, self._split(output))

    def reduce_scatter_single(self, output: torch.Tensor, x: torch.Tensor, opts: ReduceScatterOptions) -> dist.Work:
        return self._collective("reduce_scatter", x, self._split, self.rank(), [output], opts.reduceOp.op)

    def all_to_all_single(
        self, output: torch.Tensor, x: torch.Tensor, output_sizes: list[int], sizes: list[int], opts: object = None
    ) -> dist.Work:
        targets = self._split(output, output_sizes)
        return self._collective("all_to_all", x, lambda x: self._split(x, sizes), self.rank(), targets)

    def allreduce(self, tensors: list[torch.Tensor], opts: AllreduceOptions) -> dist.Work:
        return self._collective("all_reduce", tensors[0], lambda x: [x], 0, tensors, opts.reduceOp.op)

    # the names before torch 2.13
    _allgather_base, _reduce_scatter_base, alltoall_base = all_gather_single, reduce_scatter_single, all_to_all_single

    def send(self, tensors: list[torch.Tensor], target: int, tag: int) -> dist.Work:
        return self._message(tensors[0], self.rank(), target, tag, is_send=True)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> dist.Work:
        return self._message(tensors[0], source, self.rank(), tag, is_send=False)

    def check_waits(self) -> None:
        """Raise AssertionError if this rank did not wait for an operation, or changed a sent tensor before its wait."""
        forgotten = [work.name for work in self._works if not work.is_done]
        assert not forgotten, f"rank {self.own}: no wait for {', '.join(forgotten)}"
        overwritten = [work.name for work in self._works if work.overwritten is not None and work.overwritten.item()]
        assert not overwritten, (
            f"rank {self.own}: what was sent was overwritten before the wait for {', '.join(overwritten)}"
        )

    def _split(self, x: torch.Tensor, sizes: Sequence[int] = ()) -> Sequence[torch.Tensor]:
        """Return a part for each rank; by default the parts are equal."""
        return x.split(sizes) if sizes else x.view(-1).tensor_split(self.size())

    def _collective(
        self,
        kind: str,
        x: torch.Tensor,
        cut: Callable[[torch.Tensor], Sequence[torch.Tensor]],
        index: int,
        targets: Sequence[torch.Tensor],
        op: dist.ReduceOp.RedOpType | None = None,
    ) -> dist.Work:
        """Post a collective: part `index` of each rank goes to its target or, with `op`, reduced to the only target."""

        def deliver(posted: list[_Posted]) -> None:
            parts = [each.parts[index] for each in posted]
            for target, sources in zip(targets, [parts] if op is not None else [[x] for x in parts], strict=True):
                self._put(target, sources, op)

        copy, description = x.detach().clone(), f"{kind} {op or ''} of {x.dtype}"
        sent = None if kind == "all_reduce" else (x, copy)
        parties = dict(enumerate(self.ranks))
        return self._post(
            ("collective",), _Posted(description, cut(copy)), targets, parties, self.rank(), deliver, sent
        )

    def _message(self, x: torch.Tensor, source: int, target: int, tag: int, *, is_send: bool) -> dist.Work:
        """Post one side of a message. The n-th send to a rank meets its n-th receive."""
        route, description = ("message", source, target, tag), f"{x.numel()} elements of {x.dtype}"
        parties = {"source": self.ranks[source], "target": self.ranks[target]}
        if is_send:
            copy = x.detach().clone()
            return self._post(route, _Posted(description, [copy]), (), parties, "source", lambda _: None, (x, copy))
        return self._post(
            route, _Posted(description), [x], parties, "target", lambda posted: self._put(x, posted[0].parts)
        )

    def _post(
        self,
        route: tuple,
        posted: _Posted,
        targets: Sequence[torch.Tensor],
        parties: Mapping[object, int],
        role: object,
        deliver: Callable[[list[_Posted]], None],
        sent: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> dist.Work:
        """Fill the receive buffers with NaN, and post the operation."""
        key = (self._name, *route, self._numbers[route, role])
        self._numbers[route, role] += 1
        for target in targets:
            _bytes(target).fill_(0xFF)
        if self._side is not None:
            posted.event = torch.cuda.Event()
            posted.event.record()
        work = Work(self, key, parties, deliver, sent)
        self._works.append(work)
        self.mailbox.post(key, role, posted)
        return work

    @contextmanager
    def late(self, posted: list[_Posted]) -> Iterator[None]:
        """Run the body; on a GPU on the side stream, after all posts and a delay. The current stream waits for it."""
        if self._side is None:
            yield
            return
        for each in posted:
            self._side.wait_event(each.event)
        with torch.cuda.stream(self._side):
            torch.cuda._sleep(_CYCLES)
            yield
        torch.cuda.current_stream().wait_stream(self._side)

    def _put(
        self, target: torch.Tensor, sources: Sequence[torch.Tensor], op: dist.ReduceOp.RedOpType | None = None
    ) -> None:
        """Copy the reduction of the sources, or the only source, to the target."""
        for source in sources:
            same = (target.numel(), target.dtype) == (source.numel(), source.dtype)
            assert same, f"{source.numel()} of {source.dtype} sent to {target.numel()} of {target.dtype}"
            if self._side is not None:
                source.record_stream(self._side)  # memory of another stream, kept until this one has read it
        total = reduce(_REDUCTIONS.get(op, torch.add), (source.reshape(-1) for source in sources))
        target.detach().view(-1).copy_(total)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.detach().view(-1).view(torch.uint8)
