"""Names of models and flavors -> model arguments. Torch-free."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from trainer.config.errors import ConfigError, did_you_mean
from trainer.config.registry import Registry
from trainer.config.schema import JobConfig, Model
from trainer.hugging_face.config_json import Entries, HFConfig, folder_hint, read_config
from trainer.models.args import DecoderArgs, ModelArgs
from trainer.models.gpt_oss import args as gpt_oss
from trainer.models.llama3 import args as llama3
from trainer.models.mistral import args as mistral
from trainer.models.qwen2 import args as qwen2
from trainer.models.qwen3 import args as qwen3
from trainer.models.qwen3_moe import args as qwen3_moe

MODELS: Registry[tuple[Mapping[str, ModelArgs], str]] = Registry(
    "model",
    {
        "llama3": (llama3.FLAVORS, "trainer.models.llama3.spec"),
        "qwen3": (qwen3.FLAVORS, "trainer.models.qwen3.spec"),
        "qwen2": (qwen2.FLAVORS, "trainer.models.qwen2.spec"),
        "qwen3_moe": (qwen3_moe.FLAVORS, "trainer.models.qwen3_moe.spec"),
        "gpt_oss": (gpt_oss.FLAVORS, "trainer.models.gpt_oss.spec"),
        "mistral": (mistral.FLAVORS, "trainer.models.mistral.spec"),
    },
)
"""Name -> (flavors, module that holds `SPEC`)."""

HF_CONFIGS: Registry[HFConfig] = Registry(
    "family of transformers",
    {
        "llama3": llama3.HF.config(),
        "qwen3": qwen3.HF.config(),
        "qwen3_moe": qwen3_moe.HF.config(),
        "qwen2": qwen2.HF.config(),
        "gpt_oss": gpt_oss.HF.config(),
        "mistral": mistral.HF.config(),
    },
)
"""Families that transformers has too."""


def is_folder(flavor: str) -> bool:
    """Return whether a flavor is the path of a Hugging Face folder, which has a slash in it."""
    return "/" in flavor


def hf_config(name: str) -> HFConfig:
    """Return how a family reads and writes `config.json`.

    Raises:
        ConfigError: transformers does not have the family.
    """
    if name not in HF_CONFIGS:
        raise ConfigError(
            f"model.name = {name!r} has no counterpart in Hugging Face's transformers; families that have one: "
            f"{', '.join(HF_CONFIGS)}"
        )
    return HF_CONFIGS[name]


def hf_family(entries: Entries) -> str:
    """Return the name of the family that a `config.json` is of.

    Raises:
        ConfigError: it is of none.
    """
    names = {known.model_type: name for name, known in HF_CONFIGS.items()}
    found = entries.content.get("model_type")
    if found not in names:
        raise ConfigError(f"{entries.file}: model_type = {found!r} is not supported; it must be {' or '.join(names)}")
    return names[found]


def from_path(config: JobConfig) -> JobConfig:
    """Return the configuration with `model.path` written out: family, sizes, and weights if no others are named.

    Raises:
        ConfigError: the folder is missing, of no known family, or beside another model.
    """
    model = config.model
    if model.path is None:
        return config
    folder = Path(model.path)
    if not folder.is_dir():
        raise ConfigError(f"model.path = {model.path!r} is no folder here; {folder_hint(folder)}")
    if model.flavor != Model().flavor:
        raise ConfigError(
            f"model.path = {model.path!r} and model.flavor = {model.flavor!r} both give the sizes of the model; leave "
            "one of them out"
        )
    family = hf_family(read_config(folder))
    if model.name not in (Model().name, family):
        raise ConfigError(f"model.path = {model.path!r} holds a model of {family!r}; leave out model.name")
    path = model.path if is_folder(model.path) else f"./{model.path}"
    checkpoint = config.checkpoint
    if checkpoint.initial_load_path is None:
        checkpoint = replace(checkpoint, initial_load_path=path)
    return replace(config, model=replace(model, path=None, name=family, flavor=path), checkpoint=checkpoint)


def flavor_args(model: Model) -> ModelArgs:
    """Return the arguments of the configured flavor, without what the data and table `[model]` add.

    Raises:
        ConfigError: no model, flavor or Hugging Face folder of that name.
    """
    flavors, _ = MODELS.find("model.name", model.name)
    if is_folder(model.flavor):
        there, entries = hf_config(model.name), read_config(Path(model.flavor))
        if (family := hf_family(entries)) != model.name:
            raise ConfigError(
                f"model.flavor = {model.flavor!r} is of another family than model.name = {model.name!r}; use {family!r}"
            )
        return there.read(entries)
    if model.flavor not in flavors:
        experts = f"{model.name}_moe"
        beside = f"; mixtures of experts are of model.name = {experts!r}" * (experts in MODELS)
        raise ConfigError(
            f"model.flavor = {model.flavor!r} is not a flavor of {model.name}"
            f"{did_you_mean(model.flavor, flavors)}{beside}"
        )
    return flavors[model.flavor]


def model_args(model: Model, *, vocab_size: int, max_seq_len: int) -> DecoderArgs:
    """Return the arguments of the configured language model, with the overrides of table `[model]`.

    Raises:
        ConfigError: no model or flavor of that name, or a setting that it does not have.
    """
    return flavor_args(model).configured(model, vocab_size=vocab_size, max_seq_len=max_seq_len)
