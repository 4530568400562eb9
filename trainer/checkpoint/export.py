"""The weights of a run in the formats of Hugging Face: of its checkpoint, or gathered from all ranks."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from trainer.checkpoint.folder import checkpoint_folder
from trainer.checkpoint.initial import hf_folder
from trainer.checkpoint.weights import model_tensors, names_of
from trainer.config.errors import ConfigError
from trainer.config.schema import JobConfig
from trainer.data.tokenizer import open_tokenizer
from trainer.distributed.parallel_dims import ParallelDims
from trainer.distributed.sharding.exchange import Transfer, all_gather, send_receive
from trainer.hugging_face.config_json import CONFIG_FILE, read_config
from trainer.hugging_face.writer import MOST_BYTES, NewFolder
from trainer.job.lora import adapter_sizes
from trainer.job.record import ResolvedJob
from trainer.models.args import DecoderArgs
from trainer.models.model_spec import hf_model, model_spec
from trainer.models.registry import hf_config
from trainer.runtime.agreement import raise_on_all_ranks
from trainer.runtime.full_disk import full_disk
from trainer.transforms.lora import A, B, merged

_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
ReadTensor = Callable[[str, tuple[int, ...]], torch.Tensor]
"""(our name, shape) -> the whole tensor."""


def merged_tensor(
    config: JobConfig, args: DecoderArgs, name: str, weight: torch.Tensor, read: ReadTensor
) -> torch.Tensor:
    """Return a whole weight with its adapter added, or itself if it has none; read: gives the adapter's tensors."""
    module = name.removesuffix(".weight")
    if not name.endswith(".weight") or module not in adapter_sizes(config, args):
        return weight
    rank, (outputs, inputs) = config.lora.rank, weight.shape
    return merged(weight, read(f"{module}.{A}", (rank, inputs)), read(f"{module}.{B}", (outputs, rank)), config.lora)


class HFWriter:
    """Writes the weights of a run as a Hugging Face folder: `put` each tensor of `pairs` in order, then `finish`."""

    def __init__(
        self, output: Path, config: JobConfig, args: DecoderArgs, dtype: torch.dtype, most_bytes: int = MOST_BYTES
    ) -> None:
        """output: the folder; dtype: data type of the files; most_bytes: of the tensors of one file.

        Raises:
            ConfigError: transformers does not have the model.
            OSError: nothing can be written.
        """
        self._content = hf_config(config.model.name).write(args)
        self._config, self._dtype = config, str(dtype).removeprefix("torch.")
        model = hf_model(model_spec(config.model.name), args)
        self.pairs = model.pairs
        self._folder = NewFolder(output, model.shapes(), dtype, most_bytes=most_bytes)

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Write a whole tensor of ours. Beside it at most its like is in memory.

        Raises:
            OSError: it cannot be written.
        """
        for there, part in self.pairs[name][1].tensors(tensor.cpu()).items():
            self._folder.put(there, part)

    def finish(self) -> None:
        """Write the small files, and give the folder its name; what had it before is replaced.

        Raises:
            OSError: something cannot be written.
        """
        # The second name is that of transformers 4.
        content, carried = self._content | {"dtype": self._dtype, "torch_dtype": self._dtype}, hf_folder(self._config)
        if carried is None:
            tokenizer = open_tokenizer(self._config.model.tokenizer_file)
            content |= {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
        else:
            there, longest = read_config(carried), "max_position_embeddings"
            content |= {key: there.content[key] for key in _TOKENS if key in there.content}
            content[longest] = max(there.whole(longest, 1), content[longest])
        self._folder.finish(CONFIG_FILE, content, carried)

    def discard(self) -> None:
        """Remove what was written."""
        self._folder.discard()


def write_peft(output: Path, config: JobConfig, args: DecoderArgs, read: ReadTensor) -> None:
    """Write the adapters of a run as a folder that peft's `PeftModel.from_pretrained` loads, in float32.

    Raises:
        ConfigError: the model has no counterpart at Hugging Face.
        OSError: the folder cannot be written.
    """
    pairs, rank = hf_model(model_spec(config.model.name), args).pairs, config.lora.rank
    tensors, modules = {}, set()
    for module in adapter_sizes(config, args):
        ours, hf = pairs[f"{module}.weight"]
        there, (outputs, inputs) = hf.name.removesuffix(".weight"), ours.shape
        modules.add(there.rpartition(".")[2])
        a, b = read(f"{module}.{A}", (rank, inputs)), hf.to_hf(read(f"{module}.{B}", (outputs, rank)))  # rows as there
        tensors |= {f"base_model.model.{there}.lora_{name}.weight": x for name, x in (("A", a), ("B", b))}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    folder = NewFolder(output, shapes, torch.float32, most_bytes=float("inf"), stem="adapter_model")
    for name, tensor in tensors.items():
        folder.put(name, tensor)
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(Path(config.checkpoint.initial_load_path).absolute()),
        "r": rank,
        "lora_alpha": config.lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(modules),
        "inference_mode": True,
    }
    folder.finish("adapter_config.json", content)


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
            writer.finish()
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
        pairs = hf_model(model_spec(job.config.model.name), job.model).pairs
        self.names = tuple(pairs)
        self._config, self._args = job.config, job.model
        self._pairs, self._dtype = pairs, getattr(torch, job.config.training.dtype)
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
            tensor = torch.empty(self._pairs[name][0].shape, dtype=self._dtype, device=self._device)
        transfer = Transfer(tensor, 0 if stage == owner else owner, is_send=stage == owner)
        send_receive([transfer], self._stages.get_group(), kind="export").wait()
        return tensor
