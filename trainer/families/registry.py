"""Names of models and flavors -> model arguments. Torch-free."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from trainer.config.errors import ConfigError, did_you_mean
from trainer.config.registry import Registry
from trainer.config.schema import JobConfig, Model
from trainer.families import dense, hybrid, sparse
from trainer.families.args import DecoderArgs, ModelArgs
from trainer.families.decoder_args import sizes
from trainer.hugging_face.config_json import Entries, HFConfig, folder_hint, read_config


@dataclass(frozen=True)
class Family:
    """A model family: its sizes by name, where its modules are, and how it reads and writes `config.json`."""

    flavors: Mapping[str, ModelArgs]
    spec: str = "trainer.models.parallelize"
    """The module that holds `SPEC`, a `ModelSpec`: what needs PyTorch."""
    hugging_face: HFConfig | None = None
    """None: transformers does not have the family. Of an `HFDecoder` the spec gets the names of tensors, too."""


_DECODERS = dense.FAMILIES | sparse.FAMILIES | hybrid.FAMILIES
MODELS: Registry[Family] = Registry(
    "model",
    {name: Family(sizes(name), hugging_face=decoder) for name, decoder in _DECODERS.items()},
)


def hf_families() -> dict[str, HFConfig]:
    """Return how each family that transformers has reads and writes `config.json`, by our name."""
    return {
        name: family.hugging_face
        for name, family in MODELS.items()
        if family.hugging_face is not None
    }


def is_folder(flavor: str) -> bool:
    """Return whether a flavor is the path of a Hugging Face folder, which has a slash in it."""
    return "/" in flavor


def hf_config(name: str) -> HFConfig:
    """Return how a family reads and writes `config.json`; ConfigError if transformers does not have it."""
    if name not in (families := hf_families()):
        raise ConfigError(
            f"model.name = {name!r} has no counterpart in Hugging Face's transformers; families that have one: "
            f"{', '.join(families)}"
        )
    return families[name]


def hf_family(entries: Entries) -> str:
    """Return the name of the family that a `config.json` is of; ConfigError if it is of none."""
    names = {known.model_type: name for name, known in hf_families().items()}
    found = entries.content.get("model_type")
    if found not in names:
        raise ConfigError(
            f"{entries.file}: model_type = {found!r} is not supported; it must be {' or '.join(names)}"
        )
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
        raise ConfigError(
            f"model.path = {model.path!r} is no folder here; {folder_hint(folder)}"
        )
    if model.flavor != Model().flavor:
        raise ConfigError(
            f"model.path = {model.path!r} and model.flavor = {model.flavor!r} both give the sizes of the model; leave "
            "one of them out"
        )
    family = hf_family(read_config(folder))
    if model.name not in (Model().name, family):
        raise ConfigError(
            f"model.path = {model.path!r} holds a model of {family!r}; leave out model.name"
        )
    path = model.path if is_folder(model.path) else f"./{model.path}"
    checkpoint = config.checkpoint
    if checkpoint.initial_load_path is None:
        checkpoint = replace(checkpoint, initial_load_path=path)
    return replace(
        config, model=replace(model, path=None, name=family, flavor=path), checkpoint=checkpoint
    )


def flavor_args(model: Model) -> ModelArgs:
    """Return the arguments of the configured flavor, without what the data and table `[model]` add.

    Raises:
        ConfigError: no model, flavor or Hugging Face folder of that name.
    """
    flavors = MODELS.find("model.name", model.name).flavors
    if is_folder(model.flavor):
        there = hf_config(model.name)
        entries = read_config(Path(model.flavor))
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
