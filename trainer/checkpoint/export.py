"""The weights of a run in the formats of Hugging Face, read from its checkpoint tensor by tensor."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint.dcp_files import Reader
from trainer.checkpoint.peft_table import peft_model
from trainer.checkpoint.text_files import text_files
from trainer.checkpoint.weights import RunWeights, WeightsReader, load_tensors
from trainer.config.errors import ConfigError
from trainer.config.schema import JobConfig
from trainer.families.args import DecoderArgs
from trainer.families.decoder_tensors import STACKED
from trainer.families.registry import ModelFolder, base_weights, hf_config, start_folder
from trainer.grouping import grouped
from trainer.hugging_face.config_json import CONFIG_FILE
from trainer.hugging_face.folder import PEFT_FILE, QUANTISED, SHARED, adapted_and_whole
from trainer.hugging_face.pairs import LEFT_ASIDE, HFModel, Shape
from trainer.hugging_face.parts import wider_types
from trainer.hugging_face.stored import Stored
from trainer.hugging_face.writer import MOST_BYTES, NewFolder
from trainer.job.lora import adapter_names, adapter_shapes
from trainer.models.model_spec import hf_model, model_spec
from trainer.runtime.console import logger
from trainer.transforms.lora import merged

_LONGEST = {"max_position_embeddings", "model_max_length"}
"""Entries of config.json with the longest sequence of the model."""
_BLOCK = 2**20  # elements whose rounding is measured at once


def write_hf(
    output: Path,
    config: JobConfig,
    args: DecoderArgs,
    dtype: torch.dtype,
    most_bytes: int = MOST_BYTES,
) -> str:
    """Write the weights of a run to a Hugging Face folder. Memory holds at most twice the bytes of the largest tensor.

    Args:
        output: The folder. It replaces an earlier one of this name.
        config: Names the checkpoint. If the run has none, its initial weights are written.
        args: The arguments of the model.
        dtype: Dtype of the files, except for tensors that keep a wider one, see `kept_types`.
        most_bytes: Largest number of bytes of the tensors of one file.

    Returns:
        Which layers the folder lacks, as words that end a sentence; empty if it lacks none.

    Raises:
        ConfigError: transformers does not have the model, or the weights are damaged, or of another model.
        OSError: The folder cannot be written.
    """
    source = start_folder(config)
    stored = _stored(source)
    images = {name: x for name, x in stored.items() if name.startswith(LEFT_ASIDE)}
    content = _config_json(config, args, dtype, source)
    model = hf_model(model_spec(config.model.name), args).in_folder(stored)
    readers = RunWeights(config, args).latest()
    shapes = {name: ours.shape for name, (ours, _) in model.pairs.items()}
    text = text_files(
        config, next(content[longest] for longest in _LONGEST if longest in content), source
    )
    own = [reader for reader in readers[:1] if isinstance(reader, Reader)]
    kept = kept_types(config, model, dtype, _saved_types(own), stored)
    with NewFolder(
        output, model.shapes(), dtype, other_types=kept, most_bytes=most_bytes, copied=images
    ) as folder:
        rounding = Rounding(dtype)
        for name, whole in _whole_tensors(config, args, shapes, readers, rounding):
            for there, part in model.pairs[name][1].tensors(whole).items():
                folder.put(there, part)
            del whole, part  # before the next ones are read
        files = {CONFIG_FILE: content | text.ids, **text.files}
        folder.finish(_with_images(files, source) if images else files, text.carried)
    rounding.tell()
    if model.has_further and not model.further:
        return f", without the layers of model.mtp_layers, which have no names in {config.model.name}"
    return ""


def kept_types(
    config: JobConfig,
    model: HFModel,
    dtype: torch.dtype,
    saved: Mapping[str, torch.dtype] | None = None,
    stored: Mapping[str, Stored] | None = None,
) -> dict[str, torch.dtype]:
    """Return the dtype of each tensor of the folder that keeps a wider dtype than `dtype`, by its Hugging Face name.

    Float32 at least are buffers (biases that choose experts) and, for float16, tensors that transformers keeps in
    float32. A dtype in the checkpoint is kept if it is wider than `training.dtype`. A dtype in the folder from which
    the run started is kept if it is wider than the most frequent one there.

    Args:
        config: The configuration.
        model: The tensors of the model.
        dtype: Dtype of the files.
        saved: Dtypes in the checkpoint, by our names.
        stored: The tensors of the folder from which the run started.
    """
    usual = getattr(torch, config.training.dtype)
    family = hf_config(config.model.name)
    kept = {}
    parts = {*getattr(family, "float32_in_float16", ())} if dtype == torch.float16 else set()
    for name, (ours, hf) in model.pairs.items():
        for there in hf.names:
            if not isinstance(ours, torch.nn.Parameter) or parts & {*there.split(".")}:
                kept[there] = torch.float32
            elif (own := (saved or {}).get(name, usual)).itemsize > usual.itemsize:
                kept[there] = own
    kept |= wider_types(stored or {})
    return {
        there: torch.promote_types(dtype, kept[there])
        for there in model.shapes()
        if there in kept
    }


def _stored(source: ModelFolder | None) -> Mapping[str, Stored]:
    """Return the tensors of the folder from which the run started, by name. If unreadable, warn and return none."""
    if source is not None and source.has_tensors:
        try:
            return source.tensors
        except ConfigError as error:
            logger.warning(
                f"tensors that {source.path} has in a wider type are written in the usual type, and tensors that read "
                f"images are left out: {error}"
            )
    return {}


def _with_images(files: dict[str, Any], source: ModelFolder) -> dict[str, Any]:
    """Return `files` plus the files for images of `source`.

    The new config.json is the config.json of `source`, with the entries of `files` for the text.
    """
    content = files[CONFIG_FILE]
    whole = source.whole_entries.content
    before = {name: x for name, x in whole["text_config"].items() if name != QUANTISED}
    rope = {**(before.get("rope_parameters") or {}), **content["rope_parameters"]}
    text = before | content | {"rope_parameters": rope}
    shared = {name: content[name] for name in SHARED if name in content}
    others = {name: x for name, x in whole.items() if name != QUANTISED}
    del text["architectures"]
    images = source.path.glob("*processor_config.json")
    return {
        **files,
        CONFIG_FILE: others | shared | {"text_config": text},
        **{file.name: file.read_text("utf-8") for file in images},
    }


def _config_json(
    config: JobConfig, args: DecoderArgs, dtype: torch.dtype, source: ModelFolder | None
) -> dict[str, Any]:
    content = hf_config(config.model.name).write(args)
    name = str(dtype).removeprefix("torch.")
    content |= {"dtype": name, "torch_dtype": name}  # transformers 4 uses the second name
    if source is not None:
        for longest in _LONGEST & {*content}:
            content[longest] = max(source.entries.whole(longest, 1), content[longest])
    return content


def _whole_tensors(
    config: JobConfig,
    args: DecoderArgs,
    shapes: Mapping[str, Shape],
    readers: list[WeightsReader],
    rounding: "Rounding",
) -> Iterator[tuple[str, Tensor]]:
    """Yield whole weights with their adapters added, in batches of about the bytes of the largest weight.

    A checkpoint's file is opened once for a batch: there may be thousands. rounding: takes the changes of the adapters.
    """
    adapted = adapter_shapes(config, args)
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    for names in grouped(sizes, max(sizes.values())):
        modules = [name.removesuffix(".weight") for name in names]
        adapters = {
            name: shape
            for module in modules
            for name, shape in zip(adapter_names(module), adapted.get(module, ()), strict=False)
        }
        tensors = _read({name: shapes[name] for name in names} | adapters, readers)
        for name, module in zip(names, modules, strict=True):
            if module in adapted:
                a, b = map(tensors.pop, adapter_names(module))
                before = tensors[name]
                tensors[name] = merged(before, a, b, config.lora)
                rounding.add(before, tensors[name])
                del before
            yield name, tensors.pop(name)


@dataclass
class Rounding:
    """How much of the adapters' change is lost when the sums are rounded to `dtype`."""

    dtype: torch.dtype
    moved: int = 0
    """Weights that the adapters change."""
    lost: int = 0
    """Weights that the adapters change, but that rounding changes back."""
    update: float = 0.0
    """Sum of squares of the changes."""
    error: float = 0.0
    """Sum of squares of the rounding errors."""

    def add(self, before: Tensor, after: Tensor) -> None:
        """Count a weight before and after its adapters were added. Nothing is counted if `dtype` has 32 bits or more.

        Args:
            before: A weight of any shape.
            after: The same shape, in float32 or wider.
        """
        if self.dtype.itemsize >= torch.float32.itemsize:
            return
        for old, new in zip(
            before.reshape(-1).split(_BLOCK), after.reshape(-1).split(_BLOCK), strict=True
        ):
            rounded = new.to(self.dtype)
            change = new - old
            self.moved += int(change.count_nonzero())
            self.lost += int(((rounded == old.to(self.dtype)) & (change != 0)).sum())
            self.update += float(change.double().square().sum())
            self.error += float((rounded.double() - new).square().sum())

    def tell(self) -> None:
        """Log the share of the adapters' change that rounding loses."""
        if self.moved:
            name = str(self.dtype).removeprefix("torch.")
            logger.warning(
                f"rounded to {name}, {self.lost / self.moved:.1%} of the weights that the adapters change are as "
                f"before. The rounding error is {math.sqrt(self.error / self.update):.2f} of the norm "
                "of the change; float32 keeps all of it, and so does lct convert to-peft"
            )


def _saved_types(readers: Sequence[WeightsReader]) -> dict[str, torch.dtype]:
    """Return the dtypes in which weights are saved, by our names; the first reader that has a weight decides."""
    return {
        name.removeprefix("model."): entry.properties.dtype
        for reader in reversed(readers)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
    }


def _read(shapes: Mapping[str, Shape], readers: list[WeightsReader]) -> dict[str, Tensor]:
    """Return tensors in the dtypes in which they are saved."""
    saved = _saved_types(readers)
    tensors = {
        name: torch.empty(shape, dtype=saved.get(name)) for name, shape in shapes.items()
    }
    load_tensors({f"model.{name}": x for name, x in tensors.items()}, *readers)
    return tensors


def write_peft(output: Path, config: JobConfig, args: DecoderArgs, step: int) -> None:
    """Write the adapters of a saved step as a folder that peft's `PeftModel.from_pretrained` loads, in float32.

    Args:
        output: The folder.
        config: The configuration.
        args: The arguments of the model.
        step: Number of the step.

    Raises:
        ConfigError: The model or an adapter has no counterpart at Hugging Face, or the checkpoint is damaged.
        OSError: The folder cannot be written.
    """
    model = peft_model(config, args)
    shapes = {name: x.shape for name, (x, _) in model.pairs.items()}
    ours = _read(shapes, [RunWeights(config, args).saved(step)])
    modules, whole = adapted_and_whole(hf.name for _, hf in model.pairs.values())
    stacked = {
        f"mlp.experts.{STACKED[module.rpartition('.')[2]]}"
        for module in adapter_shapes(config, args)
        if ".experts." in module
    }
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(Path(base_weights(config)).absolute()),
        "r": config.lora.rank,
        "lora_alpha": config.lora.alpha,
        "lora_dropout": config.lora.dropout,
        "bias": "none",
        "target_modules": modules,
        **({"target_parameters": sorted(stacked)} if stacked else {}),
        **({"modules_to_save": whole} if whole else {}),
        "inference_mode": True,
    }
    with NewFolder(
        output, model.shapes(), torch.float32, most_bytes=math.inf, stem="adapter_model"
    ) as folder:
        for name, (_, hf) in model.pairs.items():
            for there, part in hf.tensors(ours[name]).items():
                folder.put(there, part)
        folder.finish({PEFT_FILE: content})
