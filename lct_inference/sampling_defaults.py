"""Default sampling of a model, from its `generation_config.json`. Torch-free."""

import argparse
import math

from trainer.config.errors import ConfigError
from trainer.config.schema import JobConfig
from trainer.families.registry import start_folder
from trainer.hugging_face.config_json import Entries

USUAL: dict[str, float] = {"temperature": 0.7, "top_k": 0, "top_p": 1.0}
"""The values if neither the command line nor the model sets them."""


def set_sampling(args: argparse.Namespace, config: JobConfig) -> None:
    """Replace None as temperature, top_k or top_p by the value of the model's folder, or the usual value.

    Args:
        args: The options of the command line, changed in place.
        config: The configuration of the run.

    Raises:
        ConfigError: A value of the model's file is out of bounds.
    """
    folder = start_folder(config)
    named = {} if folder is None else _named(folder.generation)
    for name, usual in USUAL.items():
        if getattr(args, name) is None:
            setattr(args, name, named.get(name, usual))


def _named(entries: Entries) -> dict[str, float]:
    content = entries.content
    # Without sampling the other entries have no effect: the likeliest token is taken.
    if content.get("do_sample") is False:
        return {"temperature": 0.0}
    values = {name: content[name] for name in USUAL if content.get(name) is not None}
    for name, value in values.items():
        kinds = int if name == "top_k" else (int, float)
        right = (
            isinstance(value, kinds) and not isinstance(value, bool) and 0 <= value < math.inf
        )
        if not right or (name == "top_p" and not 0 < value <= 1):
            rule = {"top_k": "a whole number from 0", "top_p": "a number above 0, at most 1"}
            raise ConfigError(
                f"{entries.file}: {name} = {value!r} must be "
                f"{rule.get(name, 'a number from 0')}; correct it"
            )
    return values
