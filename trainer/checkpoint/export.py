"""The weights of a run as a Hugging Face folder, gathered from all ranks tensor by tensor."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from trainer.checkpoint.adapters import merged_tensor
from trainer.checkpoint.folder import checkpoint_folder
from trainer.checkpoint.hf_writer import HFWriter
from trainer.checkpoint.initial import hf_folder
from trainer.checkpoint.weights import model_tensors, names_of
from trainer.config.errors import ConfigError
from trainer.distributed.parallel_dims import ParallelDims
from trainer.distributed.sharding.exchange import Transfer, all_gather, send_receive
from trainer.job.record import ResolvedJob
from trainer.models.model_spec import model_spec
from trainer.models.state_dict import pairs
from trainer.runtime.agreement import raise_on_all_ranks
from trainer.runtime.full_disk import full_disk


def export(job: ResolvedJob, dims: ParallelDims, model_parts: Sequence[nn.Module], step: int) -> Path:
    """Write the weights to the folder `step-N-hf` beside the checkpoints, and return it. A collective; rank 0 writes.

    A rank has one whole tensor at a time in memory, rank 0 at most two.

    Raises:
        SharedConfigError: on every rank, if the folder cannot be written.
    """
    config, writes = job.config, dims.rank("world") == 0
    output = checkpoint_folder(config).path / f"step-{step}-hf"
    dtype = getattr(torch, config.checkpoint.export_dtype)
    gathered, error, writer = _Gathered(job, dims, model_parts), None, None

    def make() -> HFWriter | None:
        try:
            return HFWriter(output, config, job.model, dtype) if writes else None
        except OSError as failure:
            raise _not_written(output, failure) from None

    def finish() -> None:
        if not writes:
            return
        try:
            if error is not None:
                raise error
            writer.finish(hf_folder(config))
        except OSError as failure:
            cause = _not_written(output, failure)
            writer.discard()
            raise cause from None

    writer = raise_on_all_ranks(make, dims["world"])
    for name in gathered.names:
        whole = gathered.whole(name)
        if writes and error is None:
            try:
                writer.put(name, whole)
            except OSError as failure:  # the other ranks go on, and hear of it at the end
                error = failure
        del whole
    raise_on_all_ranks(finish, dims["world"])
    return output


def _not_written(output: Path, error: OSError) -> ConfigError:
    reason = full_disk(error, output.parent) or error.strerror or str(error)
    return ConfigError(
        f"the Hugging Face folder {output} could not be written ({reason}); make room there, and make it from the "
        f"checkpoint with lct convert to-hf"
    )


class _Gathered:
    """Whole tensors of the model, of which a rank holds parts; of a pipeline's other stages rank 0 receives them."""

    def __init__(self, job: ResolvedJob, dims: ParallelDims, model_parts: Sequence[nn.Module]) -> None:
        shapes = {name: pair.ours.shape for name, pair in pairs(model_spec(job.config.model.name), job.model).items()}
        self.names = tuple(shapes)
        self._config, self._args = job.config, job.model
        self._shapes, self._dtype = shapes, getattr(torch, job.config.training.dtype)
        self._tensors = model_tensors(names_of(model_parts))
        self._stages = dims["pp"]
        self._device = self._stages.device_type
        self._receives = self._stages.mesh[0].item() == 0
        """Whether rank 0 is the first stage of this rank's pipeline."""
        held = torch.tensor([f"model.{name}" in self._tensors for name in self.names], device=self._device)
        self._owners = dict(zip(self.names, all_gather(held.int(), self._stages).argmax(0).tolist(), strict=True))

    def _own(self, name: str) -> torch.Tensor | None:
        """Return the whole tensor of a parameter of this stage, with its adapter added; a collective of the stage."""
        if f"model.{name}" not in self._tensors:
            return None

        def read(name: str, _: tuple[int, ...] = ()) -> torch.Tensor:
            tensor = self._tensors[f"model.{name}"]
            return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

        return merged_tensor(self._config, self._args, name, read(name), read)

    def whole(self, name: str) -> torch.Tensor | None:
        """Return the whole tensor, on rank 0 and where the rank has a part of it; a collective."""
        owner, stage = self._owners[name], self._stages.get_local_rank()
        tensor = self._own(name)
        if owner == 0 or not self._receives or stage not in (0, owner):
            return tensor
        if stage == owner:
            tensor = tensor.to(self._device).contiguous()
        else:
            tensor = torch.empty(self._shapes[name], dtype=self._dtype, device=self._device)
        transfer = Transfer(tensor, 0 if stage == owner else owner, is_send=stage == owner)
        send_receive([transfer], self._stages.get_group(), kind="export").wait()
        return tensor
