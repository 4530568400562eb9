"""Low-rank adapters in files: beside the weights that they adapt, and in the format of Hugging Face's peft."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import LoadPlan, LoadPlanner, StorageReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.futures import Future

from trainer.checkpoint.hf_writer import unfinished_output
from trainer.checkpoint.safetensors import plan_files
from trainer.checkpoint.store import sync
from trainer.config.schema import JobConfig
from trainer.job.lora import adapter_sizes
from trainer.models.args import DecoderArgs
from trainer.models.model_spec import model_spec
from trainer.models.state_dict import pairs
from trainer.transforms.lora import A, B, merged


class AdaptedReader(StorageReader):
    """Reads what a checkpoint of adapters holds from it, and all other tensors from the weights that they adapt."""

    def __init__(self, adapters: StorageReader, base: StorageReader) -> None:
        self.path = adapters.path
        self._readers = (base, adapters)
        self._found: list[Metadata] = []

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        self._found = [reader.read_metadata() for reader in self._readers]
        base, adapters = (found.state_dict_metadata for found in self._found)
        return Metadata(base | adapters)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        for reader, found in zip(self._readers, self._found, strict=True):
            reader.set_up_storage_reader(found, is_coordinator)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        adapters = self._found[1].state_dict_metadata
        for i, reader in enumerate(self._readers):
            items = [item for item in plan.items if (item.storage_index.fqn in adapters) == bool(i)]
            if items:
                reader.read_data(replace(plan, items=items), planner).wait()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return False


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


def write_peft(output: Path, config: JobConfig, args: DecoderArgs, read: ReadTensor) -> None:
    """Write the adapters of a run as a folder that peft's `PeftModel.from_pretrained` loads, in float32.

    Raises:
        ConfigError: the model has no counterpart at Hugging Face.
        OSError: the folder cannot be written.
    """
    tensors, modules = _of_peft(config, args, read)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    (file,), _ = plan_files(shapes, "F32", most_bytes=sum(4 * tensor.numel() for tensor in tensors.values()))
    unfinished = unfinished_output(output)
    unfinished.mkdir(parents=True)
    with (unfinished / "adapter_model.safetensors").open("wb") as opened:
        opened.write(file.header)
        for tensor in map(tensors.get, file.tensors):
            opened.write(memoryview(tensor.view(-1).view(torch.uint8).numpy()))
        opened.flush()
        os.fsync(opened.fileno())
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(Path(config.checkpoint.initial_load_path).absolute()),
        "r": config.lora.rank,
        "lora_alpha": config.lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": modules,
        "inference_mode": True,
    }
    (unfinished / "adapter_config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    sync(unfinished)
    unfinished.rename(output)
    sync(output.parent)


def _of_peft(config: JobConfig, args: DecoderArgs, read: ReadTensor) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Return the tensors by peft's names, and the modules that have adapters; rows of B are ordered as there."""
    found, rank = pairs(model_spec(config.model.name), args), config.lora.rank
    tensors, modules = {}, set()
    for module in adapter_sizes(config, args):
        pair = found[f"{module}.weight"]
        there, (outputs, inputs) = pair.hf.name.removesuffix(".weight"), pair.ours.shape
        modules.add(there.rpartition(".")[2])
        a, b = read(f"{module}.{A}", (rank, inputs)), pair.hf.to_hf(read(f"{module}.{B}", (outputs, rank)))
        for name, tensor in (("lora_A", a), ("lora_B", b)):
            tensors[f"base_model.model.{there}.{name}.weight"] = tensor.float().contiguous()
    return tensors, sorted(modules)
