"""Marks of modules whose attention is context parallel, counted by group."""

from weakref import WeakSet

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


class Mark:
    """A mark of a module that is parallelised over a group: copied with the module, but saved without the group."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        _marks.add(self)

    def __deepcopy__(self, _: dict) -> "Mark":
        return Mark(self.group)

    def __reduce__(self) -> tuple:
        return Mark, (None,)  # a group belongs to its process


_marks: WeakSet[Mark] = WeakSet()


def parallelised_modules(mesh: DeviceMesh) -> int:
    """Return how many modules of this process run their attention over `mesh`."""
    # Compared by group: slicing a mesh again makes another object, and the mesh of an earlier job may be equal.
    return sum(mark.group is mesh.get_group() for mark in _marks)
