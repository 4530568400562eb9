"""Names of models and flavors -> model arguments. Torch-free."""

from collections.abc import Mapping

from trainer.config.errors import ConfigError, did_you_mean
from trainer.config.schema import Model
from trainer.models.args import ModelArgs
from trainer.models.llama3.args import FLAVORS

# name -> (flavors, module that holds `SPEC`)
MODELS: dict[str, tuple[Mapping[str, ModelArgs], str]] = {"llama3": (FLAVORS, "trainer.models.llama3.spec")}


def model_args(model: Model, *, vocab_size: int, max_seq_len: int) -> ModelArgs:
    """Return the arguments of the configured model, with the overrides of table `[model]`.

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
    return flavors[model.flavor].configured(model, vocab_size=vocab_size, max_seq_len=max_seq_len)
