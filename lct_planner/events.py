"""Records of a trace: the work that a device gets in a job, and its memory. Torch-free."""

from dataclasses import dataclass, field

BEFORE = -1
AFTER = 10**6
"""Numbers for the work before the first layer of a model part, and after the last."""


@dataclass(frozen=True, slots=True)
class Event:
    """Some work of a device.

    Attributes:
        step: Step of training, 0 while the trainer is made.
        place: The operator of this project in which it happens, or "".
        kind: `launch`, `host` for a kernel on the host, `copy`, `message`, or `operator` for the start of an operator
            of this project.
        name: PyTorch's operator, the direction of a copy, or the collective of a message.
        bytes: Bytes of a copy, or bytes that a message sends to other ranks.
        phase: The part of the step.
        layer: Number of the layer, `BEFORE` or `AFTER`.
    """

    step: int
    place: str
    kind: str
    name: str
    bytes: int
    phase: str
    layer: int
    where: str = ""
    """If the host waits for a copy: the line of this project."""
    flops: int = 0
    """FLOPs of a launch, or of all kernels of an operator of attention."""
    kernel: str = ""
    """The kernel of a launch or of an operator of attention, see `stand_ins.kernel_of`."""
    tails: float = 0.0
    """FLOPs of a row of a head, summed over the kernels: each kernel spreads over rows and heads (queries, in the
    backward keys). At the end of a kernel, a GPU is not full."""
    moved: int = 0
    """Bytes that a launch reads and writes."""
    ranks: tuple[int, ...] = ()
    """The ranks of a message's group."""
    is_sharding: bool = False
    """Whether FSDP sends the message."""


@dataclass(slots=True)
class Block:
    """Device memory of one storage. kind: its purpose; where: the line of this project that made it."""

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
    """Bytes of page-locked memory for offloaded tensors."""

    def layer(self, step: int, operator: str) -> list[Event]:
        """Return the events of a layer: from the first run of an operator in a step to the second; [] without two runs.

        Args:
            step: Number of the step.
            operator: Name of the operator.
        """
        starts = [
            i
            for i, e in enumerate(self.all)
            if e.step == step and e.kind == "operator" and e.name == operator
        ]
        return list(self.all[starts[0] : starts[1]]) if len(starts) > 1 else []

    def peak(self, step: int) -> tuple[int, str]:
        """Return the most bytes alive in a step, and the operation that reached them.

        Args:
            step: Number of the step.
        """
        live = 0
        most = 0
        at = ""
        alive: dict[int, int] = {}
        for change in self.memory:
            live += change.size - alive.get(id(change.block), 0)
            alive[id(change.block)] = change.size
            if change.step == step and live > most:
                most = live
                at = change.block.operator
        return most, at
