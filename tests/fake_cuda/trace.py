"""What a GPU of a job would be given: `trace(job, rank)` runs the trainer's own steps and returns each event.

An event is a kernel, a copy between host and device, or a message of a collective, with the bytes of device memory that
are alive after it. Nothing is computed, so that a step of a million tokens takes seconds.
"""

import gc
import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch._C._distributed_c10d import ProcessGroup
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from tests.fake_cuda.machine import FakeCuda, Gpu, is_pinned, machine
from tests.fake_cuda.operators import ATTENTION, CHECKS, stand_ins
from tests.fake_cuda.traced_trainer import TracedTrainer, patches
from trainer.components.optimizer import ensure_state
from trainer.distributed.context_parallel.execution.build import Execution
from trainer.distributed.context_parallel.live import LivePlan
from trainer.distributed.context_parallel.live import resolve as resolve_plan
from trainer.distributed.context_parallel.planning.cost import AttentionShape, attention_cost
from trainer.distributed.sharding import exchange
from trainer.job.record import ResolvedJob


@dataclass(frozen=True, slots=True)
class Event:
    """Something that a GPU is given.

    step: of training, 0 while the trainer is made; place: the operator of this project in which it happens, or "";
    kind: `launch`, `copy`, `message`, or `operator` for the start of an operator of this project; name: of PyTorch's
    operator, of a copy its direction, of a message its collective; bytes: of a copy, or what a message sends to other
    ranks; live: bytes of device memory that are alive.
    """

    step: int
    place: str
    kind: str
    name: str
    bytes: int
    live: int
    where: str = ""
    """Of a copy for which the host waits: the line of this project."""


@dataclass(frozen=True)
class Events:
    """All events of a traced job in their order. peak: the most bytes alive in each step."""

    all: tuple[Event, ...]
    peak: dict[int, int]
    peak_at: dict[int, str]

    def layer(self, step: int, operator: str) -> list[Event]:
        """Return the events of a layer: from one run of an operator to the next one, the first two of a step."""
        starts = [i for i, e in enumerate(self.all) if e.step == step and e.kind == "operator" and e.name == operator]
        return list(self.all[starts[0] : starts[1]]) if len(starts) > 1 else []


def trace(job: ResolvedJob, rank: int, gpu: Gpu = Gpu(), steps: int = 1) -> Events:  # noqa: B008 (frozen)
    """Build the trainer of one rank and do some steps, on a GPU that does not exist.

    Raises:
        AssertionError: an operator returned something else than it promises, or sent other bytes than its plan.
        Exception: whatever a GPU path does wrong: a host read, a shape, a device.
    """
    recorder = Recorder()
    mode = FakeCuda(recorder.observe, recorder.around)
    mode.checks, mode.stand_ins = CHECKS, stand_ins()
    with entered(machine(rank, job.degrees.world_size, gpu), *patches(gpu), *recorder.patches(), mode):
        trainer = TracedTrainer(job, torch.device("cuda", 0))
        ensure_state(trainer.optimizer)  # which PyTorch makes in the first step, after the peak
        collecting = gc.isenabled()
        gc.collect()
        gc.disable()  # so that the peak is the same each time
        try:
            for step in range(1, steps + 1):
                recorder.start(step)
                trainer.train_step(step)
        finally:
            if collecting:
                gc.enable()
            trainer.metrics.close()
        return recorder.events()


@contextmanager
def entered(*contexts: Any) -> Iterator[None]:
    """Enter all of these contexts, in this order."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


class Recorder:
    """Collects the events of one job."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._place, self._step = "", 0
        self._live, self._peak, self._at = 0, Counter(), {}
        self._execution: Execution | None = None
        self._paused = False
        self._seen: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def start(self, step: int) -> None:
        self._step = step
        self._peak[step] = self._live

    def events(self) -> Events:
        return Events(tuple(self._events), dict(self._peak), dict(self._at))

    def inside(self, operator: str) -> list[Event]:
        """Return the events in runs of an operator."""
        return [event for event in self._events if event.place == operator]

    def observe(self, func: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any], result: Any) -> None:
        """Take one operation of PyTorch."""
        if self._paused:
            return
        name = func._schema.name.removeprefix("aten::")
        self._alive(tree_leaves(result), name)
        if name.startswith(("c10d::", "_c10d_functional::")):
            self._message(name.partition("::")[2], args, result)
        elif name in ("_to_copy", "copy_") and (direction := _direction(name, args, kwargs, result)):
            moved = args[1] if name == "copy_" else args[0]
            self._add("copy", direction, moved.nbytes, _where() if "," in direction else "")
        elif not (func.is_view or name in _NO_KERNEL or name.startswith(("empty", "new_empty"))):
            self._add("launch", name, 0)

    def around(self, name: str, args: tuple, run: Any) -> Any:
        """Run one operator of this project."""
        name = name.removeprefix("trainer::")
        self._add("operator", name, 0)
        outer, self._place, first = self._place, name, len(self._events)
        counted = exchange.bytes_sent.copy()
        try:
            result = run()
        finally:
            self._place = outer
        if name in _DIRECTIONS:
            self._check_bytes(name, args, exchange.bytes_sent - counted, self._events[first:])
        return result

    def _check_bytes(self, name: str, args: tuple, counted: Counter, events: Iterable[Event]) -> None:
        """Compare the bytes of attention's messages, and those that the program counts, with the cost of its plan."""
        plan, direction = next(x for x in args if _is_handle(x)), _DIRECTIONS[name]
        live, _ = resolve_plan(plan)
        execution, (q, k) = self._execution, _shapes(name, args)
        sent = 2 if live.options.gradient_dtype == "bfloat16" else 0
        shape = AttentionShape(q[0], q[1], k[1], q[3], args[0].itemsize, sent)
        keep = live.options.keep_exchanged
        cost = attention_cost(execution.plan, shape, direction, live.options.heads_per_pass, keep_exchanged=keep)
        wanted = {kind: size for kind, size in cost.bytes_sent.items() if size}
        assert dict(counted) == wanted, f"{name} counted {dict(counted)}, its plan sends {wanted}"
        found = sum(e.bytes for e in events if e.kind == "message")
        assert found == sum(wanted.values()), f"{name} sent {found} bytes, its plan sends {wanted}"

    def _message(self, name: str, args: tuple, result: Any) -> None:
        if name in _NO_MESSAGE:
            return
        self._add("message", name, _sent(name, args))

    def _add(self, kind: str, name: str, size: int, where: str = "") -> None:
        self._events.append(Event(self._step, self._place, kind, name, size, self._live, where))

    # ---- memory

    def _alive(self, tensors: Iterable[Any], name: str) -> None:
        for x in tensors:
            if isinstance(x, torch.Tensor) and x.device.type == "cuda":
                storage = x.untyped_storage()
                if storage not in self._seen:
                    self._seen[storage] = size = [storage.nbytes()]
                    weakref.finalize(storage, self._changed, size, 0)
                    self._grown(size[0], name)

    def _changed(self, size: list[int], now: int) -> None:
        before, size[0] = size[0], now
        self._grown(now - before, "resize")

    def _grown(self, by: int, name: str) -> None:
        self._live += by
        if self._live > self._peak[self._step]:
            self._peak[self._step], self._at[self._step] = self._live, f"{self._place} {name}".strip()

    def patches(self) -> Iterator[Any]:
        """Yield what follows memory that FSDP frees without an operator, finds the plan that runs, and leaves out what
        no GPU is given."""
        real = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> None:
            real(storage, size)
            if storage in self._seen:
                self._changed(self._seen[storage], size)

        yield mock.patch.object(torch.UntypedStorage, "resize_", resize, create=True)

        of_call = LivePlan.execution

        def execution(live: LivePlan, *args: Any) -> Execution:
            self._execution = of_call(live, *args)
            return self._execution

        yield mock.patch.object(LivePlan, "execution", execution)

        of_shapes = ShardingPropagator._propagate_tensor_meta_non_cached

        def shapes_alone(*args: Any) -> Any:  # of a DTensor's results, which PyTorch finds on a fake device itself
            self._paused = True
            try:
                return of_shapes(*args)
            finally:
                self._paused = False

        yield mock.patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", shapes_alone)


_NO_KERNEL = frozenset(
    {"detach", "alias", "lift_fresh", "lift_fresh_copy", "_unsafe_view", "_reshape_alias", "set_", "resize_"}
    | {"is_pinned", "record_stream"}
)
_NO_MESSAGE = frozenset({"wait_tensor", "recv_", "barrier"})
_DIRECTIONS = {
    "context_parallel_attention": "forward",
    "context_parallel_attention_backward": "backward",
}


def _is_handle(x: object) -> bool:
    return isinstance(x, torch.Tensor) and x.dtype == torch.int64 and x.device.type == "cpu"


def _shapes(name: str, args: tuple) -> tuple[torch.Size, torch.Size]:
    """Return the shapes of q and k of an attention operator."""
    if not name.endswith("backward"):
        return tuple(x.shape for x in args[:2])
    dout, saved, kv_heads, *_ = args
    b, _, s, d = dout.shape
    return dout.shape, saved[1].shape if len(saved) > 2 else torch.Size((b, kv_heads, s, d))


def _direction(name: str, args: tuple, kwargs: dict[str, Any], result: torch.Tensor) -> str:
    """Return the direction of a copy between host and device, with what makes the host wait; "" within a device."""
    source, target = (args[1], args[0]) if name == "copy_" else (args[0], result)
    kinds = source.device.type, target.device.type
    if kinds[0] == kinds[1]:
        return ""
    on_host = source if kinds[0] == "cpu" else target
    waits = not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
    pageable = kinds[0] == "cpu" and not is_pinned(on_host)
    return f"{kinds[0]} to {kinds[1]}" + ", blocking" * waits + ", pageable" * pageable


def _where() -> str:
    """Return the innermost line of the package that is running."""
    frame = sys._getframe()
    while frame is not None:
        _, found, file = frame.f_code.co_filename.partition("/trainer/")
        if found:
            return f"trainer/{file}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _sent(name: str, args: tuple) -> int:
    """Return the bytes that this rank sends to others in a collective."""
    tensors = [x for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
    if name == "send":
        return sum(x.nbytes for x in tensors)
    if not name.startswith(("alltoall", "_allgather", "_reduce_scatter")):
        return tensors[0].nbytes
    group = next(ProcessGroup.unbox(x) for x in tree_leaves(args) if isinstance(x, torch.ScriptObject) and _is_group(x))
    if name == "_allgather_base_":
        return tensors[1].nbytes * (group.size() - 1)
    if name == "_reduce_scatter_base_":
        return tensors[0].nbytes * (group.size() - 1)
    sizes = args[4] or [tensors[1].numel() // group.size()] * group.size()
    return (sum(sizes) - sizes[group.rank()]) * tensors[1].itemsize


def _is_group(x: torch.ScriptObject) -> bool:
    return "ProcessGroup" in str(x._type())


def counted(events: Iterable[Event]) -> dict[str, Any]:
    """Return the launches beside attention's kernels, these kernels, the messages and their bytes, and the copies."""
    events = list(events)
    launches = Counter(e.name for e in events if e.kind == "launch")
    kernels = {name: number for name, number in sorted(launches.items()) if name in ATTENTION}
    found: dict[str, Any] = {"launches": launches.total() - sum(kernels.values()), "kernels": kernels}
    messages = [e for e in events if e.kind == "message"]
    found["messages"] = dict(sorted(Counter(e.name for e in messages).items()))
    found["bytes_sent"] = sum(e.bytes for e in messages)
    if copies := Counter(e.name for e in events if e.kind == "copy"):
        found["copies"] = dict(sorted(copies.items()))
    return found
