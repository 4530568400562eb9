"""Fields on a grid: the state some frames later is the target. Ranks of the domain share a field, each its part."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from examples.fields.loader import FieldLoader
from examples.fields.parallelize import field_domain
from examples.fields.spec import fields_of
from longshard.domain.tensor import DomainTensor
from trainer.data.loader import batch_hash
from trainer.job.record import ResolvedJob
from trainer.models.model_spec import Model
from trainer.observer import Observer
from trainer.parallel.parallel_dims import ParallelDims
from trainer.runtime.agreement import raise_on_all_ranks
from trainer.tasks.task import Batch, RankInputs
from trainer.transforms.compile import compiled_loss


class FieldTask:
    """The task of fields: the model predicts the change from inputs to targets.

    A batch has this rank's part of inputs and targets, (B, C, h, w), and the numbers of its samples. Fields are
    normalised by mean and standard deviation of their channel. The loss of a position is the squared error of a channel
    at a point.

    Args:
        job: The resolved job.
        dims: The meshes of the job.
    """

    def __init__(self, job: ResolvedJob, dims: ParallelDims) -> None:
        self.job = job
        self.config = job.config
        self.dims = dims
        self.domain = field_domain(job, dims)
        self.squared_errors = compiled_loss(squared_errors, job.compilation)

    def build_loader(self) -> FieldLoader:
        return raise_on_all_ranks(self._open_loader, self.dims["world"])

    def _open_loader(self) -> FieldLoader:
        training = self.config.training
        model = self.job.model
        return FieldLoader(
            fields_of(self.config),
            lead=self.config.fields.lead,
            held_out=self.config.fields.held_out,
            part=tuple(self.domain.ranges(2 + axis, size) for axis, size in enumerate((model.height, model.width))),
            local_batch_size=training.local_batch_size,
            data_streams=training.data_streams,
            seed=training.seed,
            dp_rank=self.dims.rank("dp"),
            dp_degree=self.dims.size("dp"),
        )

    def observers(self) -> list[Observer]:
        return []

    def batch_hash(self, batch: Batch) -> int:
        return batch_hash({"samples": batch["sample_numbers"]})

    def counts(self, batch: Batch) -> torch.Tensor:
        model = self.job.model
        return torch.full_like(batch["sample_numbers"][:, 0], model.channels * model.height * model.width)

    def size(self, batch: Batch) -> int:
        return batch["sample_numbers"].shape[0] * self.job.positions

    @contextmanager
    def batch_context(self, batch: Batch, model_parts: Sequence[Model]) -> Iterator[RankInputs]:
        dtype = getattr(torch, self.job.compute_dtype)
        inputs, targets = (batch[name].to(torch.promote_types(dtype, torch.float32)) for name in ("inputs", "targets"))
        yield RankInputs(DomainTensor(inputs.to(dtype), self.domain), {}, DomainTensor(targets - inputs, self.domain))

    def losses(self, part: Model, hidden: DomainTensor, targets: DomainTensor) -> torch.Tensor:
        return self.squared_errors(part.output(hidden), targets)


def squared_errors(outputs: DomainTensor, targets: DomainTensor) -> torch.Tensor:
    """Return the squared error of each channel at each point of this rank, (B, positions).

    Args:
        outputs: Predicted change, (B, C, height, width).
        targets: True change, (B, C, height, width).
    """
    # In the layout of the targets; the outputs may have another layout.
    return (targets - outputs.to(targets.dtype)).local.square().flatten(1)
