"""What a device of a job is given, and its memory: records of a trace. Torch-free."""

from dataclasses import dataclass, field

BEFORE = -1
AFTER = 10**6
"""Numbers of what comes before the first layer of a model part, and after the last."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that a device is given.

    step: of training, 0 while the trainer is made; place: the operator of this project in which it happens, or "";
    kind: `launch`, `host` for a kernel on the host, `copy`, `message`, or `operator` for the start of an operator of
    this project; name: of PyTorch's operator, of a copy its direction, of a message its collective; bytes: of a copy,
    or what a message sends to other ranks; phase: the part of the step; layer: its number, `BEFORE` or `AFTER`.
    """

    step: int
    place: str
    kind: str
    name: str
    bytes: int
    phase: str
    layer: int
    where: str = ""
    """Of a copy for which the host waits: the line of this project."""
    flops: int = 0
    """Of a launch, or of all kernels of an operator of attention."""
    kernel: str = ""
    """Of a launch or an operator of attention: the kernel that computes it, see `stand_ins.kernel_of`."""
    tails: float = 0.0
    """Of the same: FLOPs of a row of a head, summed over its kernels, as each spreads over rows and heads (queries, in
    the backward keys). While a kernel ends, a GPU is not full."""
    moved: int = 0
    """Bytes that a launch reads and writes."""
    ranks: tuple[int, ...] = ()
    """Of a message: the ranks of its group."""
    is_sharding: bool = False
    """Of a message: whether FSDP sends it."""


@dataclass(slots=True)
class Block:
    """Device memory of one storage. kind: what it is for; where: the line of this project that made it."""

    size: int
    kind: str
    where: str
    operator: str


@dataclass(frozen=True, slots=True)
class Change:
    """A block that is made, freed (size 0) or resized."""

    step: int
    phase: str
    layer: int
    block: Block
    size: int


@dataclass(frozen=True)
class Events:
    """All events of a traced job in their order, and all changes of device memory."""

    all: tuple[Event, ...]
    memory: tuple[Change, ...]
    names: dict[tuple[int, ...], str] = field(default_factory=dict)
    """Ranks of a mesh -> its name."""
    host_bytes: int = 0
    """Of page-locked memory for what is offloaded."""

    def layer(self, step: int, operator: str) -> list[Event]:
        """Return the events of a layer: from one run of an operator to the next one, the first two of a step."""
        starts = [
            i
            for i, e in enumerate(self.all)
            if e.step == step and e.kind == "operator" and e.name == operator
        ]
        return list(self.all[starts[0] : starts[1]]) if len(starts) > 1 else []

    def peak(self, step: int) -> tuple[int, str]:
        """Return the most bytes alive in a step, and the operation that reached them."""
        live, most, at = 0, 0, ""
        alive: dict[int, int] = {}
        for change in self.memory:
            live += change.size - alive.get(id(change.block), 0)
            alive[id(change.block)] = change.size
            if change.step == step and live > most:
                most = live
                at = change.block.operator
        return most, at
