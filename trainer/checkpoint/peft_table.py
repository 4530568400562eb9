"""The trained tensors of a run with adapters, and their counterparts in the files of Hugging Face's peft."""

from collections.abc import Collection, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from trainer.config.errors import ConfigError
from trainer.config.schema import JobConfig
from trainer.families.args import DecoderArgs
from trainer.families.registry import hf_config
from trainer.hugging_face.pairs import HFModel, HFTensor
from trainer.job.lora import adapter_names, adapter_shapes, whole_sizes
from trainer.models.model_spec import hf_model, model_spec

_BEFORE = "base_model.model."


def peft_model(config: JobConfig, args: DecoderArgs) -> HFModel:
    """Return the trained tensors of a run with adapters, and their counterparts in the files of peft.

    Args:
        config: The configuration.
        args: The arguments of the model.

    Raises:
        ConfigError: The model or an adapter has no counterpart at Hugging Face.
    """
    hf_config(config.model.name).check_start(args)
    pairs = hf_model(model_spec(config.model.name), args).pairs
    adapters = adapter_shapes(config, args)
    trained = {}
    for module, shapes in adapters.items():
        counterparts = _counterparts(module, adapters, pairs)
        for name, shape, hf in zip(adapter_names(module), shapes, counterparts, strict=True):
            trained[name] = torch.empty(shape, device="meta"), hf
    for name in (f"{module}.weight" for module in whole_sizes(config, args)):
        x, hf = pairs[name]
        trained[name] = x, replace(hf, name=f"{_BEFORE}{hf.name}")
    return HFModel(trained, {})


def _counterparts(
    module: str,
    adapters: Collection[str],
    pairs: Mapping[str, tuple[Tensor, HFTensor]],
) -> tuple[HFTensor, HFTensor]:
    """Return the tensors of peft for LoRA's A and B of a module, or of a stacked weight of experts.

    Raises:
        ConfigError: Hugging Face has the module's weight only as rows of a larger tensor, and peft adapts whole ones.
    """
    if ".experts." not in module:
        _, hf = pairs[f"{module}.weight"]
        if hf.all_rows:
            raise ConfigError(
                f"lora.modules: {module.rpartition('.')[2]!r} is a part of {hf.name} there, and peft "
                "has adapters of whole tensors; use lct convert to-hf, which adds the adapters to the "
                "weights"
            )
        there = _BEFORE + hf.name.removesuffix("weight")
        return HFTensor(f"{there}lora_A.weight"), replace(hf, name=f"{there}lora_B.weight")
    weight, hf = pairs[module]
    experts = len(weight)
    # peft wraps an adapted weight of experts around the one before it.
    is_inner = module.endswith("w13") and module.replace("w13", "w2") in adapters
    there = (
        f"{_BEFORE}{hf.names[0].partition('.experts.')[0]}.experts.{'base_layer.' * is_inner}"
    )

    return (
        HFTensor(
            f"{there}lora_A.weight",
            lambda a: a.flatten(0, 1),
            lambda a: a.unflatten(0, (experts, -1)),
        ),
        HFTensor(
            f"{there}lora_B.weight",
            # rows as there; (outputs, rank * E)
            lambda b: (b if hf.stacked else hf.to_hf(b).mT).permute(1, 2, 0).flatten(1),
            lambda b: _rows_here(hf, b.unflatten(1, (-1, experts)).permute(2, 0, 1)),
        ),
    )


def _rows_here(hf: HFTensor, b: Tensor) -> Tensor:
    return b if hf.stacked else hf.from_hf(b.mT)
