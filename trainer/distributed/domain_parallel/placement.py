"""Which mesh and which layout the axes of a job's fields have."""

from trainer.distributed.domain_parallel.domain import Axis, Domain
from trainer.distributed.parallel_dims import ParallelDims
from trainer.job.record import ResolvedJob


def field_domain(job: ResolvedJob, dims: ParallelDims) -> Domain:
    """Return the domain of the job's fields, (B, C, height, width)."""
    groups = [dims[name].get_group() for name in dims.degrees.domain_axes]
    return Domain({2 + i: Axis(*pair) for i, pair in enumerate(zip(job.field_layouts, groups, strict=True))})
