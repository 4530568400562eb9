"""Convert the weights of a run to a Hugging Face folder, tensor by tensor. All commands read such a folder unconverted.

convert to-hf outputs/debug_model exported --dtype bfloat16
convert add-tokens Qwen3-0.6B with-tools --tokens '<|tool|>' '<|result|>'
"""

import argparse
import re
from pathlib import Path

from trainer.commands.finished_run import configuration, imports_option, weights_of
from trainer.config.errors import ConfigError
from trainer.config.schema import JobConfig
from trainer.config.writable import full_disk
from trainer.hugging_face.files import check_output
from trainer.job.resolution import resolve_model
from trainer.stores.folder import checkpoint_folder, step_to_load

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def to_hf(options: argparse.Namespace) -> str:
    """Write the weights of a run as a Hugging Face folder.

    Args:
        options: The options of the command line.

    Returns:
        What to do next, in words.

    Raises:
        ConfigError: The source cannot be read, or the output cannot be made.
    """
    config = _configuration(options)
    args = resolve_model(config)
    import torch  # after the check that the run exists

    from trainer.checkpoint.export import write_hf

    check_output(options.output)
    dtype = getattr(torch, options.dtype or config.training.dtype)
    left_out = write_hf(options.output, config, args, dtype, options.max_shard_size)
    exported = f"the weights of {weights_of(config)}{left_out}"
    return f"{options.output} holds {exported}; transformers loads it with from_pretrained"


def _configuration(options: argparse.Namespace) -> JobConfig:
    return configuration(
        options.folder, options.step, command="lct convert", allow_imports=options.allow_imports
    )


def to_peft(options: argparse.Namespace) -> str:
    """Write the adapters of a run in the format of Hugging Face's peft.

    Args:
        options: The options of the command line.

    Returns:
        What to do next, in words.

    Raises:
        ConfigError: The run has no adapters, or the output cannot be made.
    """
    config = _configuration(options)
    if not config.lora.rank:
        raise ConfigError(
            f"the run in {options.folder} has no adapters (lora.rank = 0); use convert to-hf for its weights"
        )
    saved = step_to_load(config)
    args = resolve_model(config)
    from trainer.checkpoint.export import write_peft

    check_output(options.output)
    write_peft(options.output, config, args, saved)
    return (
        f"{options.output} holds the adapters of {checkpoint_folder(config).step(saved)}; peft loads "
        "them with PeftModel.from_pretrained(model, folder)"
    )


def add_tokens(options: argparse.Namespace) -> str:
    """Write a copy of a Hugging Face folder with further special tokens.

    Args:
        options: The options of the command line.

    Returns:
        What to do next, in words.

    Raises:
        ConfigError: The source cannot be read, or the output cannot be made.
    """
    from trainer.hugging_face.writer import add_tokens

    output = options.output
    check_output(output)
    ids, rows = add_tokens(options.folder, output, options.tokens)
    return f"{output} has the tokens {ids[0]:,} to {ids[-1]:,} and {rows:,} rows; name it in model.path to train them"


def size(text: str) -> int:
    """Return the number of bytes of a size, such as 5GB = 5 * 10**9.

    Args:
        text: The size.

    Raises:
        argparse.ArgumentTypeError: It is no size.
    """
    match = re.fullmatch(r"([1-9]\d*) ?(KB|MB|GB)", text, re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write it as 5GB, 500MB or 10KB")
    return int(match[1]) * _UNITS[match[2].upper()]


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    described = argparse.ArgumentParser(prog="lct convert", description=__doc__.splitlines()[0])
    ways = described.add_subparsers(dest="way")
    out = ways.add_parser("to-hf", help="write the weights of a run as a Hugging Face folder")
    out.add_argument(
        "--dtype",
        choices=["float32", "float64", "bfloat16", "float16"],
        help="data type of the weights (default: the saved one)",
    )
    out.add_argument(
        "--max-shard-size", type=size, default=size("5GB"), help="largest file (default: 5GB)"
    )
    adapters = ways.add_parser(
        "to-peft", help="write the adapters of a run for Hugging Face's peft"
    )
    extended = ways.add_parser(
        "add-tokens", help="copy a Hugging Face folder, with more special tokens"
    )
    for way, run in ((out, to_hf), (adapters, to_peft), (extended, add_tokens)):
        source = "Hugging Face folder" if way is extended else "job.dump_folder of the run"
        way.add_argument("folder", type=Path, help=source)
        way.add_argument("output", type=Path, help="new folder")
        way.set_defaults(run=run)
        if way is not extended:
            way.add_argument(
                "--step", type=int, default=-1, help="saved step (default: the latest)"
            )
            imports_option(way)
    extended.add_argument(
        "--tokens", nargs="+", required=True, help="names of the tokens, such as '<|tool|>'"
    )
    return described


def main(argv: list[str] | None = None) -> int:
    """Convert, and print what can be done next.

    Args:
        argv: The words of the command line, without the command.

    Returns:
        The exit code, 0.

    Raises:
        ConfigError: The command line is wrong, the output cannot be made, or the disk is full.
        OSError: A file cannot be read or written for another reason.
    """
    args = parser().parse_args(argv)
    if args.way is None:
        raise ConfigError(
            "lct convert needs one of to-hf, to-peft, add-tokens, such as lct convert to-hf RUN FOLDER"
        )
    try:
        print(args.run(args))
    except OSError as error:
        reason = full_disk(error, args.output.absolute().parent)
        if not reason:
            raise
        raise ConfigError(
            f"{args.output} could not be written ({reason}); make room, or name another folder"
        ) from None
    return 0
