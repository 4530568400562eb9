"""Checks of the weights from which a run starts, before the run starts. Torch-free."""

import math
from dataclasses import fields, replace
from pathlib import Path

from trainer.config.errors import ConfigError, MissingFile
from trainer.config.schema import JobConfig, LoRA
from trainer.families.args import ModelArgs
from trainer.families.registry import ModelFolder, base_weights, hf_config, opened_at
from trainer.hugging_face.config_json import CONFIG_FILE, read_settings
from trainer.hugging_face.folder import PEFT_FILE, adapted_and_whole
from trainer.hugging_face.stored import PEFT_TENSORS
from trainer.stores.addresses import named_step, saved_step
from trainer.stores.folder import read_state, step_to_load
from trainer.stores.state import check_same_model
from trainer.stores.store import STATE_FILE

_KEY = "checkpoint.initial_load_path"
_READ = {
    "r",
    "lora_alpha",
    "use_rslora",
    "target_modules",
    "target_parameters",
    "modules_to_save",
    "exclude_modules",
    "task_type",
    "auto_mapping",
    "peft_version",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "lora_dropout",
    "megatron_core",
    "qalora_group_size",
}
"""Options of peft that are read, or have no effect on the weights."""
_USUAL = (None, False, {}, [], "LORA", "none", "gaussian")
"""Values that switch an option off; the last ones of `peft_type`, `bias` and `init_lora_weights`."""


def check_initial_weights(
    config: JobConfig, model: ModelArgs, opened: ModelFolder | None = None
) -> None:
    """Check that the weights in `checkpoint.initial_load_path` belong to this model, if the run reads any.

    Args:
        config: The configuration.
        model: The arguments of the model.
        opened: See `opened_at`.

    Raises:
        ConfigError: They are damaged, of another model, or neither a Hugging Face folder nor a checkpoint.
        MissingFile: The path does not exist.
    """
    start = config.checkpoint.initial_load_path
    if start is None:
        return
    if config.checkpoint.enable and step_to_load(config) is not None and not config.lora.rank:
        return  # a run with checkpoints resumes from them; only checkpoints of adapters need the weights, too
    if (address := base_weights(config)) != start:
        _check_adapters(config, model, Path(start))
    path = Path(address)
    step = saved_step(_KEY, address)
    if step is None and not path.is_dir():
        raise MissingFile(
            f"{_KEY} = {address!r} is no folder here, and no checkpoint in a store; name a folder with weights (for a "
            "finished run, in its config.toml)"
        )
    if not config.checkpoint.initial_load_model_only:
        _check_branch(config, address, step)
    if step is not None:
        state = read_state(named_step(_KEY, address)[0], step)
        if state.model.get("lora.rank"):
            raise ConfigError(
                f"{_KEY} = {address!r} holds adapters only; merge them into a Hugging Face folder with lct convert "
                "to-hf, and name that"
            )
        plain = replace(config, lora=LoRA())
        check_same_model(state, plain, model, address, remedy="take that model", dtype=False)
        return
    folder = opened_at(path, opened)
    if not folder.has_config:
        raise ConfigError(
            f"{_KEY} = {address!r} holds neither a {CONFIG_FILE} of a Hugging Face model nor a {STATE_FILE} of a "
            "checkpoint. Name a Hugging Face folder on this machine, or a folder step-N of "
            "a run's checkpoints"
        )
    _check_hf(config, model, folder)
    _ = folder.tensors  # checks that all files are there, and whole


def _check_branch(config: JobConfig, address: str, step: int | None) -> None:
    key = "checkpoint.initial_load_model_only = false"
    if step is None:
        raise ConfigError(
            f"{key} continues another run, and {_KEY} = {address!r} holds weights alone; name a "
            "folder step-N of a run's checkpoints, or leave the key out"
        )
    if config.lora.rank:
        raise ConfigError(
            f"{key} has no optimizer for the adapters of lora.rank = {config.lora.rank}, which are new; leave it out"
        )


def _check_hf(config: JobConfig, model: ModelArgs, folder: ModelFolder) -> None:
    """Check that the model is the model of `config.json`, except for the changes of table [model]."""
    family = hf_config(config.model.name)
    family.check_start(model)
    args = family.read(folder.entries)
    theirs = args.configured(
        config.model, vocab_size=args.vocab_size, max_seq_len=model.max_seq_len
    )
    balance = {"router_aux_loss_coef"}  # of training, not of the weights
    different = [
        f"{field.name} = {getattr(model, field.name)} (there {getattr(theirs, field.name)})"
        for field in fields(model)
        if field.name not in balance
        and getattr(model, field.name) != getattr(theirs, field.name)
    ]
    if different:
        name = (
            f"the model in {str(config.model.folder)!r}"
            if config.model.folder
            else f"model.flavor = {config.model.flavor!r}"
        )
        raise ConfigError(
            f"{name} is not the model in {_KEY} = {str(folder.path)!r}: {', '.join(different)}; use a folder with the "
            f"{CONFIG_FILE} of these weights as model.flavor, such as {str(folder.path.absolute())!r}"
        )


def _check_adapters(config: JobConfig, model: ModelArgs, path: Path) -> None:
    """Check that the run has the adapters of a folder of peft: options, rank, scale and modules."""
    if config.model.folder is None:
        raise ConfigError(
            f"{_KEY} = {str(path)!r} holds adapters of peft, and not the weights that they adapt; "
            "name the folder of these in model.path"
        )
    content = read_settings(path / PEFT_FILE)
    for name, value in content.items():
        is_default = value in _USUAL or (name, value) == ("init_lora_weights", True)
        if name not in _READ and not is_default:
            raise ConfigError(
                f"{path / PEFT_FILE}: {name} = {value!r} is an option of peft that is not read; "
                "merge the adapters into the model with peft (merge_and_unload), and train new ones"
            )
    if not (path / PEFT_TENSORS).is_file():
        raise ConfigError(
            f"{path} lacks {PEFT_TENSORS}, and a pickle (.bin) is not read; load the adapters with "
            "peft, and write them with save_pretrained"
        )
    tensor_of = hf_config(config.model.name).tensor
    layers = [name for name in model.linear_shapes() if name.startswith("layers.")]
    ours = {}
    for name in ("tok_embeddings", "output", *layers):
        if hf := tensor_of(model, f"{name}.weight"):
            ours[hf.name.split(".")[-2]] = name.rpartition(".")[2]
    modules, whole = adapted_and_whole(ModelFolder(path).tensors)
    lora = config.lora
    adapted = {name.rpartition(".")[2] for name in layers if lora.adapts(name)}
    alpha = content.get("lora_alpha")
    if content.get("use_rslora") and alpha is not None:
        alpha *= math.sqrt(lora.rank)
    own = vars(lora) | {"modules": sorted(adapted), "whole": sorted(lora.whole)}
    for key, value in (
        ("rank", content.get("r")),
        ("alpha", alpha),
        ("modules", sorted(ours.get(name, name) for name in modules)),
        ("whole", sorted(ours.get(name, name) for name in whole)),
    ):
        if value != own[key]:
            raise ConfigError(
                f"{_KEY} = {str(path)!r} has adapters with lora.{key} = {value!r}, and this run "
                f"has {own[key]!r}; write lora.{key} = {value!r}"
            )
