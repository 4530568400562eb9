"""Makes the profile of a step from a trace."""

import bisect
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from lct_planner.events import AFTER, BEFORE, Block, Event, Events
from lct_planner.profile import Amounts, Profile
from lct_planner.stand_ins import ATTENTION

_SMALL = 1 << 20
_PAGE = 2 << 20
_GRAIN = 512
"""PyTorch's allocator on GPUs: below a mebibyte another pool, in pages of two; sizes are multiples of 512."""
_POINTS = 400
"""Number of points of the curve of memory."""


def added_up(events: Events, step: int, layers: Iterable[int]) -> Profile:
    """Return the profile of a step.

    Args:
        events: The events of a trace.
        step: Number of the step. Memory of an earlier step counts while this step still holds it.
        layers: Indices of the rank's layers in the model, in order.
    """
    numbers = list(layers)
    live, at, curve, reserved = _memory(events, step, numbers)
    work: Amounts = defaultdict(lambda: defaultdict(float))
    messages: Amounts = defaultdict(lambda: defaultdict(float))
    for event in events.all:
        if event.step != step:
            continue
        amounts = work[event.phase]
        if event.kind == "launch":
            amounts["launches"] += 1
            if event.flops:
                name = _product(event)
                amounts[name] += event.flops
                if event.tails:
                    amounts[name.replace("attention", "tails")] += event.tails
            elif event.name not in ATTENTION:
                amounts[
                    "optimizer"
                    if event.phase in ("optimizer", "clip", "grad_norm")
                    else "moved"
                ] += event.moved
        elif event.kind == "operator" and event.flops:
            direction = "backward" if event.name.endswith("backward") else "forward"
            amounts[f"attention_{direction} {event.kernel}"] += event.flops
            amounts[f"tails_{direction} {event.kernel}"] += event.tails
        elif event.kind in ("copy", "host"):
            amounts["copied" if event.kind == "copy" else "host"] += event.bytes or event.moved
        elif event.kind == "message":
            mesh = "fsdp" if event.is_sharding else events.names.get(event.ranks, "world")
            totals_of_message = messages[f"{event.phase} {mesh} {event.name}"]
            totals_of_message["calls"] += 1
            totals_of_message["bytes"] += event.bytes
            totals_of_message["ranks"] = len(event.ranks)
            totals_of_message["span"] = max(event.ranks) - min(event.ranks) + 1
    totals = {"fragments": 0.0, "host": float(events.host_bytes)}
    plain = [
        {key: dict(inner) for key, inner in amounts.items()}
        for amounts in (live, work, messages)
    ]
    profile = Profile(len(numbers), *plain, totals, at, curve)
    return replace(profile, totals=totals | {"fragments": reserved - profile.peak})


def _product(event: Event) -> str:
    if event.name in ATTENTION:
        return (
            f"attention_{'backward' if 'backward' in event.name else 'forward'} {event.kernel}"
        )
    return "float8" if event.name == "_scaled_mm" else "products"


def _place(phase: str, layer: int, numbers: list[int]) -> str:
    """Return the part of the step and the role of the layer, such as "backward/last layer".

    A deeper model has the same roles. numbers: the indices of the rank's layers, in order.
    """
    if layer in (BEFORE, AFTER) or layer not in numbers:
        return f"{phase}/{'embedding' if layer == BEFORE else 'output'}"
    number = numbers.index(layer)
    last = len(numbers) - 1
    roles = {
        0: "first layer",
        last: "last layer",
        1: "second layer",
        last - 1: "last layer but one",
    }
    return f"{phase}/{roles.get(number, 'other layers')}"


def _memory(events: Events, step: int, numbers: list[int]) -> tuple[Amounts, dict, list, int]:
    """Follow all changes of memory, and return `live`, `at` and `curve` of a `Profile`, and the reserved bytes.

    step: the step whose places and curve are returned. numbers: the indices of the rank's layers, in order.
    """
    alive: dict[int, tuple[int, Block]] = {}
    purposes: dict[str, int] = defaultdict(int)
    live: Amounts = {}
    most: dict[str, int] = {}
    at: dict[str, str] = {}
    curve: list[tuple[int, str, dict[str, int]]] = []
    allocator = _Allocator()
    total = 0
    for change in events.memory:
        block = change.block
        before = alive.get(id(change.block), (0, None))[0]
        total += change.size - before
        purposes[block.kind] += change.size - before
        alive[id(block)] = change.size, block
        allocator.resize(id(block), change.size)
        if change.step == step:
            place = _place(change.phase, change.layer, numbers)
            curve.append((total, place, dict(purposes)))
            if total > most.get(place, 0):
                most[place] = total
                at[place] = f"{block.operator} in {block.where}"
                live[place] = dict(purposes)
    each = max(len(curve) // _POINTS, 1)
    points = [
        max(curve[i : i + each], key=lambda point: point[0])[1:]
        for i in range(0, len(curve), each)
    ]
    return live, at, points, allocator.reserved


class _Allocator:
    """PyTorch's caching allocator with expandable segments: the best fit in one growing range, and small blocks apart.

    One range has small blocks, the other one large blocks. A freed block is joined with free neighbours. All blocks are
    of one stream.
    """

    def __init__(self) -> None:
        self._ends = {"small": 0, "large": 0}
        # (begin, size), by begin
        self._free: dict[str, list[tuple[int, int]]] = {"small": [], "large": []}
        self._of: dict[int, tuple[str, int, int]] = {}

    @property
    def reserved(self) -> int:
        """The bytes that both ranges have grown to."""
        return sum(-(-end // _PAGE) * _PAGE for end in self._ends.values())

    def resize(self, name: int, size: int) -> None:
        """Free a block if it exists, and allocate it again if it has a size.

        Args:
            name: Id of the block.
            size: Its size in bytes.
        """
        if name in self._of:
            self._release(*self._of.pop(name))
        if size:
            size = -(-size // _GRAIN) * _GRAIN
            pool = "small" if size <= _SMALL else "large"
            self._of[name] = pool, self._place(pool, size), size

    def _place(self, pool: str, size: int) -> int:
        free = self._free[pool]
        fits = [(length, number) for number, (_, length) in enumerate(free) if length >= size]
        if fits:
            length, number = min(fits)
            begin, _ = free.pop(number)
            if length > size:
                free.insert(number, (begin + size, length - size))
            return begin
        begin = self._ends[pool]
        if free and sum(free[-1]) == begin:  # the free end of the range grows
            begin = free.pop()[0]
        self._ends[pool] = begin + size
        return begin

    def _release(self, pool: str, begin: int, size: int) -> None:
        free = self._free[pool]
        number = bisect.bisect(free, (begin, 0))
        if number < len(free) and free[number][0] == begin + size:
            size += free.pop(number)[1]
        if number and sum(free[number - 1]) == begin:
            before, length = free.pop(number - 1)
            begin = before
            size = size + length
            number = number - 1
        free.insert(number, (begin, size))
