"""Names of models and flavors -> model arguments. Torch-free."""

from collections.abc import Mapping

from trainer.config.errors import ConfigError, did_you_mean
from trainer.config.schema import Model
from trainer.models.args import DecoderArgs, ModelArgs
from trainer.models.llama3 import args as llama3
from trainer.models.nat import args as nat
from trainer.models.unet import args as unet

# name -> (flavors, module that holds `SPEC`)
MODELS: dict[str, tuple[Mapping[str, ModelArgs], str]] = {
    "llama3": (llama3.FLAVORS, "trainer.models.llama3.spec"),
    "unet": (unet.FLAVORS, "trainer.models.unet.spec"),
    "nat": (nat.FLAVORS, "trainer.models.nat.spec"),
}


def flavor_args(model: Model) -> ModelArgs:
    """Return the arguments of the configured flavor, without what the data and table `[model]` add.

    Raises:
        ConfigError: no model or flavor of that name.
    """
    if model.name not in MODELS:
        raise ConfigError(f"model.name = {model.name!r} is not a known model{did_you_mean(model.name, MODELS)}")
    flavors = MODELS[model.name][0]
    if model.flavor not in flavors:
        raise ConfigError(
            f"model.flavor = {model.flavor!r} is not a flavor of {model.name}{did_you_mean(model.flavor, flavors)}"
        )
    return flavors[model.flavor]


def model_args(model: Model, *, vocab_size: int, max_seq_len: int) -> DecoderArgs:
    """Return the arguments of the configured language model, with the overrides of table `[model]`.

    Raises:
        ConfigError: no model or flavor of that name, or a setting that it does not have.
    """
    return flavor_args(model).configured(model, vocab_size=vocab_size, max_seq_len=max_seq_len)
