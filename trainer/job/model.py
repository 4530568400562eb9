"""Resolve the model arguments, and check them against tensor parallelism."""

import math
from dataclasses import replace

from trainer.config.errors import ConfigError, MissingFile
from trainer.config.schema import JobConfig
from trainer.data.tokenizers.tokenizer import vocab_size_of
from trainer.job.degrees import Degrees
from trainer.job.fields import check_task, shape_of_fields
from trainer.models.args import ModelArgs
from trainer.models.registry import flavor_args, is_folder, model_args


def resolve_model(config: JobConfig, missing: list[str] | None = None) -> ModelArgs:
    """Return the arguments of the model that the configuration names, with its tokenizer's vocabulary.

    A Hugging Face folder brings its own vocabulary, which must have room for the tokenizer's.
    missing: takes the message about a tokenizer, or fields, that are not on this machine; the model then has the
    vocabulary of its flavor, or fields of an assumed shape.

    Raises:
        ConfigError: no such model, flavor, tokenizer or fields, or a model of another kind of data.
    """
    # The model's name is checked before the tokenizer.
    flavor = args = flavor_args(config.model)
    check_task(config, args)
    if args.task == "fields":
        return args.of_fields(*shape_of_fields(config, missing))
    args = model_args(config.model, vocab_size=1, max_seq_len=config.training.seq_len)
    if config.model.tokenizer_path == "":
        raise ConfigError("model.tokenizer_path = '' must name a file; leave it out for the shipped tokenizer")
    try:
        tokens = vocab_size_of(config.model.tokenizer_file)
    except MissingFile as error:
        if missing is None:
            raise
        missing.append(str(error))
        tokens = None
    if not is_folder(config.model.flavor):
        return replace(args, vocab_size=flavor.vocab_size if tokens is None else tokens)
    # Embeddings may have more rows than the tokenizer has tokens.
    if tokens is not None and tokens > flavor.vocab_size:
        raise ConfigError(
            f"the tokenizer {config.model.tokenizer_file} has {tokens:,} tokens, and model.flavor = "
            f"{config.model.flavor!r} has embeddings for {flavor.vocab_size:,}; set model.tokenizer_path "
            f"to the model's own"
        )
    return replace(args, vocab_size=flavor.vocab_size)


def with_windows_of_flavor(config: JobConfig) -> JobConfig:
    """Return the configuration with the flavor's window in words of keys, by which other keys may have an effect.

    Raises:
        ConfigError: no such model or flavor.
    """
    if config.model.sliding_window is not None or config.model.sliding_window_every != 1:
        return config
    args = flavor_args(config.model)
    windows = [] if args.task == "fields" else [args.window_of_layer(layer) for layer in range(args.n_layers)]
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
