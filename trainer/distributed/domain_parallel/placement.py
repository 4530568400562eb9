"""Which mesh and which layout the axes of a job's fields have."""

from collections.abc import Sequence
from typing import Any, Protocol

from torch.distributed.device_mesh import DeviceMesh

from trainer.distributed.domain_parallel.domain import Axis, Domain
from trainer.distributed.sharding.layout import AxisLayout


class FieldJob(Protocol):
    """A job whose fields are sharded: the layout of each axis, the height first."""

    @property
    def field_layouts(self) -> Sequence[AxisLayout]: ...


class Meshes(Protocol):
    """The meshes of a job by name; `degrees.domain_axes` are the names of those that share the axes of a field."""

    degrees: Any

    def __getitem__(self, name: str) -> DeviceMesh: ...


def field_domain(job: FieldJob, dims: Meshes) -> Domain:
    """Return the domain of the job's fields, (B, C, height, width)."""
    groups = [dims[name].get_group() for name in dims.degrees.domain_axes]
    return Domain({2 + i: Axis(*pair) for i, pair in enumerate(zip(job.field_layouts, groups, strict=True))})
