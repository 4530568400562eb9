"""Names of models and flavors -> model arguments. Torch-free."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from trainer.config.errors import ConfigError, did_you_mean
from trainer.config.registry import Registry
from trainer.config.schema import JobConfig, Model
from trainer.config.toml import load_toml
from trainer.families import combinations, dense, hybrid, sparse, sparse_attention
from trainer.families.args import ModelArgs
from trainer.families.decoder_args import sizes
from trainer.families.decoder_config_json import HFDecoder
from trainer.hugging_face.config_json import HFConfig
from trainer.hugging_face.folder import HFFolder


@dataclass(frozen=True)
class Family:
    """A model family: its sizes by name, where its modules are, and how it reads and writes `config.json`."""

    flavors: Mapping[str, ModelArgs]
    spec: str = "trainer.models.parallelize"
    """The module that holds `SPEC`, a `ModelSpec`; it needs PyTorch."""
    hugging_face: HFConfig | None = None
    """None: transformers does not have the family. With an `HFDecoder` the spec also gets the names of tensors."""


_DECODERS = dense.FAMILIES | sparse.FAMILIES | sparse_attention.FAMILIES | hybrid.FAMILIES
_DECODERS |= combinations.FAMILIES
MODELS: Registry[Family] = Registry(
    "model",
    {name: Family(sizes(name), hugging_face=decoder) for name, decoder in _DECODERS.items()},
)


def hf_families() -> dict[str, HFConfig]:
    """Return how each family of transformers reads and writes `config.json`, by our name."""
    return {
        name: family.hugging_face
        for name, family in MODELS.items()
        if family.hugging_face is not None
    }


def hf_config(name: str) -> HFConfig:
    """Return how a family reads and writes `config.json`.

    Args:
        name: Name of the family.

    Raises:
        ConfigError: transformers does not have the family.
    """
    if name not in (families := hf_families()):
        raise ConfigError(
            f"model.name = {name!r} has no counterpart in Hugging Face's transformers; families that have one: "
            f"{', '.join(families)}"
        )
    return families[name]


def refused() -> dict[str, list[str]]:
    """Return the mechanisms that no family has -> `model_type` of the architectures of transformers that need them."""
    return load_toml(Path(__file__).with_name("refused.toml"))


@dataclass(frozen=True)
class ModelFolder(HFFolder):
    """A Hugging Face folder, and the meaning of its `config.json` to the families."""

    @cached_property
    def family(self) -> str:
        """Name of the family; ConfigError if no family has this `model_type`."""
        families = hf_families()
        names = {known.model_type: name for name, known in families.items()}
        if self.reads_images:
            names = {
                known.images_type: name
                for name, known in families.items()
                if isinstance(known, HFDecoder) and known.images_type
            }
        model_type = self.whole_entries.content.get("model_type")
        if model_type not in names:
            lacking = next((x for x, types in refused().items() if model_type in types), None)
            reason = f", which needs {lacking}," if lacking else ""
            raise ConfigError(
                f"{self.entries.file}: model_type = {model_type!r}{reason} is not supported; it must be "
                f"{' or '.join(names)}"
            )
        return names[model_type]

    @cached_property
    def args(self) -> ModelArgs:
        """Model arguments, with `max_seq_len` as the longest sequence; ConfigError if the family lacks a feature."""
        return hf_config(self.family).read(self.entries)


def model_folder(model: Model) -> ModelFolder | None:
    """Open the folder that gives the sizes of a model. None: a flavor by name gives them.

    Args:
        model: Table `[model]`.

    Returns:
        The folder.
    """
    path = model.folder if model.path is None else Path(model.path)
    return None if path is None else ModelFolder(path)


def opened_at(path: Path, folder: ModelFolder | None) -> ModelFolder:
    """Return the folder at a path: the open one if it has this path, otherwise another one.

    Args:
        path: The path.
        folder: An open folder.
    """
    return folder if folder is not None and folder.path == path else ModelFolder(path)


def start_folder(config: JobConfig) -> ModelFolder | None:
    """Open the folder from which a run has its weights or sizes, and so its tokenizer.

    Args:
        config: The configuration.

    Returns:
        The folder. None if there is none.
    """
    named = (config.checkpoint.initial_load_path, config.model.folder)
    folders = (ModelFolder(Path(path)) for path in named if path)
    return next((folder for folder in folders if folder.has_config), None)


def base_weights(config: JobConfig) -> str | None:
    """Return the path of the weights from which a run starts, without adapters; None for random weights.

    If the run starts from adapters of peft, this is the folder of the model that they adapt.


    Args:
        config: The configuration.
    """
    start = config.checkpoint.initial_load_path
    has_adapters = start is not None and HFFolder(Path(start)).has_adapters
    return config.model.flavor if has_adapters else start


def from_path(config: JobConfig, folder: ModelFolder | None = None) -> JobConfig:
    """Return the configuration with `model.path` written out: family, sizes, and weights if no others are named.

    Without `model.path`, the configuration is returned unchanged. Else the result has `model.path` None.

    Args:
        config: The configuration.
        folder: The result of `model_folder`. None: it is opened here.

    Raises:
        ConfigError: The folder is missing, of no known family, or given together with another model.
    """
    model = config.model
    if model.path is None:
        return config
    folder = folder or model_folder(model)
    if not folder.path.is_dir():
        raise ConfigError(f"model.path = {model.path!r} is no folder here; {folder.hint}")
    if model.flavor != Model().flavor:
        raise ConfigError(
            f"model.path = {model.path!r} and model.flavor = {model.flavor!r} both give the sizes of the model; leave "
            "one of them out"
        )
    if model.name not in (Model().name, folder.family):
        raise ConfigError(
            f"model.path = {model.path!r} holds a model of {folder.family!r}; leave out model.name"
        )
    path = model.path if "/" in model.path else f"./{model.path}"
    checkpoint = config.checkpoint
    if checkpoint.initial_load_path is None:
        checkpoint = replace(checkpoint, initial_load_path=path)
    return replace(
        config,
        model=replace(model, path=None, name=folder.family, flavor=path),
        checkpoint=checkpoint,
    )


def flavor_args(model: Model, folder: ModelFolder | None = None) -> ModelArgs:
    """Return the arguments of the configured flavor, without the changes by the data and by table `[model]`.

    Args:
        model: Table `[model]`.
        folder: As in `from_path`.

    Raises:
        ConfigError: No model, flavor or Hugging Face folder has this name.
    """
    flavors = MODELS.find("model.name", model.name).flavors
    if model.folder is not None:
        folder = opened_at(model.folder, folder)
        hf_config(model.name)  # refuses a family that transformers does not have
        if folder.family != model.name:
            raise ConfigError(
                f"model.flavor = {model.flavor!r} is of another family than model.name = "
                f"{model.name!r}; use {folder.family!r}"
            )
        return folder.args
    if model.flavor not in flavors:
        experts = f"{model.name}_moe"
        beside = f"; mixtures of experts are of model.name = {experts!r}" * (experts in MODELS)
        raise ConfigError(
            f"model.flavor = {model.flavor!r} is not a flavor of {model.name}"
            f"{did_you_mean(model.flavor, flavors)}{beside}"
        )
    return flavors[model.flavor]
