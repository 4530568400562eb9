"""Convert weights to a Hugging Face folder, or from one, tensor by tensor.

convert to-hf outputs/debug_model exported --dtype bfloat16
"""

import argparse
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

from trainer.commands.finished_run import configuration
from trainer.config.errors import ConfigError
from trainer.config.loader import to_toml
from trainer.config.schema import Checkpoint, Job, JobConfig, Model, Training
from trainer.families.registry import hf_config, hf_family
from trainer.hugging_face.config_json import read_config
from trainer.hugging_face.files import check_output
from trainer.job.tasks import resolve_model
from trainer.runtime.full_disk import full_disk
from trainer.stores.folder import step_to_load

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def to_hf(run: Path, output: Path, *, step: int, dtype: str | None, most_bytes: int) -> None:
    """Write the weights of a run as a Hugging Face folder.

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
    write_hf(output, config, args, getattr(torch, dtype or config.training.dtype), most_bytes)


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


def from_hf(folder: Path, output: Path, *, dtype: str, tokenizer: str | None) -> None:
    """Write the weights of a Hugging Face folder as a run that has not begun: a checkpoint `step-0`, and its settings.

    dtype: in which they are stored; tokenizer: of the run.

    Raises:
        ConfigError: a file is missing or broken, or of a model that is not known here.
        OSError: the run cannot be written.
    """
    name = hf_family(entries := read_config(folder))
    longest = hf_config(name).read(entries).max_seq_len
    from trainer.checkpoint.weights import save_initial
    from trainer.hugging_face.reader import HFReader
    from trainer.hugging_face.writer import carry
    from trainer.models.model_spec import hf_model, model_spec

    check_output(output)
    copied = output.absolute() / "hf"
    config = JobConfig(
        job=Job(dump_folder=str(output.absolute())),
        model=Model(name=name, flavor=str(folder.absolute()), tokenizer_path=tokenizer),
        training=Training(dtype=dtype, seq_len=min(longest, Training.seq_len)),
        checkpoint=Checkpoint(initial_load_path=str(output.absolute() / "checkpoint" / "step-0")),
    )
    reader = HFReader(folder, hf_model(model_spec(name), args := resolve_model(config)))
    try:
        copied.mkdir(parents=True)
        carry(folder, copied, "config.json")
        save_initial(config, args, reader)
        config = replace(config, model=replace(config.model, flavor=str(copied)))
        (output / "config.toml").write_text(to_toml(config), encoding="utf-8")
    except BaseException:
        shutil.rmtree(output, ignore_errors=True)
        raise


def size(text: str) -> int:
    """Return the bytes that a size means, such as 5GB.

    Raises:
        argparse.ArgumentTypeError: it is no size.
    """
    match = re.fullmatch(r"([1-9]\d*) ?(KB|MB|GB)", text, re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write it as 5GB, 500MB or 10KB")
    return int(match[1]) * _UNITS[match[2].upper()]


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    described = argparse.ArgumentParser(prog="lct convert", description=__doc__.splitlines()[0])
    ways = described.add_subparsers(dest="way", required=True)
    out = ways.add_parser("to-hf", help="write the weights of a run as a Hugging Face folder")
    out.add_argument("folder", type=Path, help="job.dump_folder of the run")
    out.add_argument("--step", type=int, default=-1, help="saved step (default: the latest)")
    out.add_argument("--dtype", choices=["float32", "float64", "bfloat16", "float16"], help="default: as it is saved")
    out.add_argument("--max-shard-size", type=size, default=size("5GB"), help="largest file (default: 5GB)")
    adapters = ways.add_parser("to-peft", help="write the adapters of a run for Hugging Face's peft")
    adapters.add_argument("folder", type=Path, help="job.dump_folder of the run")
    adapters.add_argument("--step", type=int, default=-1, help="saved step (default: the latest)")
    into = ways.add_parser("from-hf", help="write a Hugging Face folder as a run that has not begun")
    into.add_argument("folder", type=Path, help="Hugging Face folder: config.json and safetensors")
    into.add_argument("--dtype", choices=["float32", "float64", "bfloat16"], default="float32", help="of the weights")
    into.add_argument("--tokenizer", help="model.tokenizer_path of the run (default: the small shipped one)")
    for way in (out, adapters, into):
        way.add_argument("output", type=Path, help="new folder")
    return described


def main(argv: list[str] | None = None) -> int:
    """Convert, and say what can be done next."""
    args = parser().parse_args(argv)
    try:
        if args.way == "to-hf":
            to_hf(args.folder, args.output, step=args.step, dtype=args.dtype, most_bytes=args.max_shard_size)
            print(f"{args.output} holds the weights; transformers loads it with from_pretrained")
        elif args.way == "to-peft":
            to_peft(args.folder, args.output, step=args.step)
            print(f"{args.output} holds the adapters; peft loads them with PeftModel.from_pretrained(model, folder)")
        else:
            from_hf(args.folder, args.output, dtype=args.dtype, tokenizer=args.tokenizer)
            print(f"{args.output} holds the weights as a run; a training run loads them with")
            print(f"  --model.name {hf_family(read_config(args.folder))} --model.flavor {args.output}/hf")
            print(f"  --checkpoint.initial_load_path {args.output}/checkpoint/step-0")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        reason = full_disk(error, args.output.absolute().parent) or error.strerror or str(error)
        print(f"error: {args.output} could not be written ({reason}); make room, or name another", file=sys.stderr)
        return 2
    return 0
