"""Check the model's sizes against tensor parallelism, and find the windows of its flavor."""

import math
from dataclasses import replace

from trainer.config.errors import ConfigError
from trainer.config.schema import JobConfig
from trainer.families.args import ModelArgs
from trainer.families.registry import flavor_args
from trainer.job.degrees import Degrees


def with_windows_of_flavor(config: JobConfig) -> JobConfig:
    """Return the configuration with the flavor's window in words of keys, by which other keys may have an effect.

    Raises:
        ConfigError: no such model or flavor.
    """
    if config.model.sliding_window is not None or config.model.sliding_window_every != 1:
        return config
    args = flavor_args(config.model)
    windows = [args.window_of_layer(layer) for layer in range(args.n_layers)] if config.task == "tokens" else []
    shorter = [window for window in windows if window is not None and window < config.training.seq_len]
    return replace(config, model=replace(config.model, sliding_window=shorter[0])) if shorter else config


def check_tensor_parallel_sizes(args: ModelArgs, flavor: str, degrees: Degrees) -> None:
    """Check that tensor parallelism can shard the model.

    Raises:
        ConfigError: heads, feed-forward width or vocabulary that the degree does not divide.
    """
    sizes = args.tensor_parallel_sizes()
    common = math.gcd(*sizes.values())
    for what, size in sizes.items():
        if size % degrees.tp:
            fitting = [str(degree) for degree in range(1, common + 1) if common % degree == 0]
            raise ConfigError(
                f"parallelism.tensor_parallel_degree = {degrees.tp} must divide the {size} {what} of "
                f"model.flavor = {flavor!r}; degrees that fit this model: {', '.join(fitting)}"
            )
