"""Counts of events, and the comparison of attention's messages with its plan."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from lct_planner.events import Event
from lct_planner.stand_ins import ATTENTION
from lct_planner.tracing import Recorder
from longshard.context.planning.cost import Cost
from tests.fake_cuda.operators import CHECKS


class CheckedRecorder(Recorder):
    """Fails if attention sends other bytes than its plan, or calls a kernel with inputs that its CUDA code refuses."""

    def __init__(self) -> None:
        super().__init__("cuda", CHECKS)

    def compare(self, name: str, cost: Cost, counted: Counter, events: Iterable[Event]) -> None:
        wanted = {kind: size for kind, size in cost.bytes_sent.items() if size}
        assert dict(counted) == wanted, f"{name} counted {dict(counted)}, its plan sends {wanted}"
        sent = sum(e.bytes for e in events if e.kind == "message")
        assert sent == sum(wanted.values()), f"{name} sent {sent} bytes, its plan sends {wanted}"


def counted(events: Iterable[Event]) -> dict[str, Any]:
    """Return the launches except attention's kernels, these kernels, the messages and the copies, and their bytes."""
    events = list(events)
    launches = Counter(e.name for e in events if e.kind == "launch")
    kernels = {name: number for name, number in sorted(launches.items()) if name in ATTENTION}
    result: dict[str, Any] = {"launches": launches.total() - sum(kernels.values()), "kernels": kernels}
    messages = [e for e in events if e.kind == "message"]
    result["messages"] = dict(sorted(Counter(e.name for e in messages).items()))
    result["bytes_sent"] = sum(e.bytes for e in messages)
    if copies := Counter(e.name for e in events if e.kind == "copy"):
        result["copies"] = dict(sorted(copies.items()))
        result["bytes_copied"] = sum(e.bytes for e in events if e.kind == "copy")
    return result
