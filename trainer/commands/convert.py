"""Convert the weights of a run to a Hugging Face folder, tensor by tensor; all commands read such a folder as it is.

convert to-hf outputs/debug_model exported --dtype bfloat16
convert add-tokens Qwen3-0.6B with-tools --tokens '<|tool|>' '<|result|>'
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from trainer.commands.finished_run import configuration
from trainer.config.errors import ConfigError
from trainer.hugging_face.files import check_output
from trainer.job.tasks import resolve_model
from trainer.runtime.full_disk import full_disk
from trainer.stores.folder import step_to_load

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def to_hf(run: Path, output: Path, *, step: int, dtype: str | None, most_bytes: int) -> str:
    """Write the weights of a run as a Hugging Face folder; say what is left out.

    dtype: of the files; None: as they are saved.

    Raises:
        ConfigError: there is no such run or step, it is damaged, or transformers does not have its model.
        OSError: the folder cannot be written.
    """
    config = configuration(run, step, command="lct convert")
    args = resolve_model(config)
    import torch  # when the run is known to be there

    from trainer.checkpoint.export import write_hf

    check_output(output)
    return write_hf(output, config, args, getattr(torch, dtype or config.training.dtype), most_bytes)


def to_peft(run: Path, output: Path, *, step: int) -> None:
    """Write the adapters of a run in the format of Hugging Face's peft.

    Raises:
        ConfigError: there is no such run or step, it has no adapters, or transformers does not have its model.
        OSError: the folder cannot be written.
    """
    config = configuration(run, step, command="lct convert")
    if not config.lora.rank:
        raise ConfigError(f"the run in {run} has no adapters (lora.rank = 0); use convert to-hf for its weights")
    if (saved := step_to_load(config)) is None:
        raise ConfigError(f"{run} holds no adapters; train with --checkpoint.enable to save the last step")
    args = resolve_model(config)
    from trainer.checkpoint.export import write_peft

    check_output(output)
    write_peft(output, config, args, saved)


def add_tokens(folder: Path, output: Path, tokens: Sequence[str]) -> str:
    """Write a copy of a Hugging Face folder with more special tokens, and return what it has now.

    Raises:
        ConfigError: see `hugging_face.new_tokens.add_tokens`.
        OSError: the folder cannot be written.
    """
    from trainer.hugging_face import new_tokens

    check_output(output)
    ids, rows = new_tokens.add_tokens(folder, output, tokens)
    return f"{output} has the tokens {ids[0]:,} to {ids[-1]:,} and {rows:,} rows; name it in model.path to train them"


def size(text: str) -> int:
    """Return the bytes that a size means, such as 5GB; argparse.ArgumentTypeError if it is no size."""
    match = re.fullmatch(r"([1-9]\d*) ?(KB|MB|GB)", text, re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write it as 5GB, 500MB or 10KB")
    return int(match[1]) * _UNITS[match[2].upper()]


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    described = argparse.ArgumentParser(prog="lct convert", description=__doc__.splitlines()[0])
    ways = described.add_subparsers(dest="way", required=True)
    out = ways.add_parser("to-hf", help="write the weights of a run as a Hugging Face folder")
    out.add_argument("--dtype", choices=["float32", "float64", "bfloat16", "float16"], help="default: as it is saved")
    out.add_argument("--max-shard-size", type=size, default=size("5GB"), help="largest file (default: 5GB)")
    adapters = ways.add_parser("to-peft", help="write the adapters of a run for Hugging Face's peft")
    more = ways.add_parser("add-tokens", help="copy a Hugging Face folder, with more special tokens")
    more.add_argument("folder", type=Path, help="Hugging Face folder")
    more.add_argument("output", type=Path, help="new folder")
    more.add_argument("--tokens", nargs="+", required=True, help="names of the tokens, such as '<|tool|>'")
    for way in (out, adapters):
        way.add_argument("folder", type=Path, help="job.dump_folder of the run")
        way.add_argument("output", type=Path, help="new folder")
        way.add_argument("--step", type=int, default=-1, help="saved step (default: the latest)")
    return described


def main(argv: list[str] | None = None) -> int:
    """Convert, and say what can be done next."""
    args = parser().parse_args(argv)
    try:
        if args.way == "to-hf":
            how = {"step": args.step, "dtype": args.dtype, "most_bytes": args.max_shard_size}
            left_out = to_hf(args.folder, args.output, **how)
            print(f"{args.output} holds the weights{left_out}; transformers loads it with from_pretrained")
        elif args.way == "add-tokens":
            print(add_tokens(args.folder, args.output, args.tokens))
        else:
            to_peft(args.folder, args.output, step=args.step)
            print(f"{args.output} holds the adapters; peft loads them with PeftModel.from_pretrained(model, folder)")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        reason = full_disk(error, args.output.absolute().parent) or error.strerror or str(error)
        print(f"error: {args.output} could not be written ({reason}); make room, or name another", file=sys.stderr)
        return 2
    return 0
