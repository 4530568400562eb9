"""Continue a text with the weights of a run, on one device.

generate outputs/debug_model --prompt 'def main(' --tokens 60
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from trainer.checkpoint.folder import checkpoint_folder, step_to_load
from trainer.config.errors import ConfigError
from trainer.config.loader import parse_command_line
from trainer.config.schema import ActivationCheckpoint, Checkpoint, Compile, JobConfig, Parallelism
from trainer.job import ResolvedJob, resolve
from trainer.runtime.devices import this_machine


def configuration(folder: Path, step: int) -> JobConfig:
    """Return the configuration of the run in `folder`, changed for one device, whole weights and any text.

    Raises:
        ConfigError: there is no run, or no such step.
    """
    file = folder / "config.toml"
    if not file.is_file():
        raise ConfigError(f"{folder} holds no run: {file} is missing; give a folder that a run had as job.dump_folder")
    config = parse_command_line(["--job.config_file", str(file)]).config
    config = replace(
        config,
        job=replace(config.job, dump_folder=str(folder)),
        parallelism=Parallelism(),
        training=replace(config.training, local_batch_size=1, global_batch_size=-1, attention_mask="causal"),
        activation_checkpoint=ActivationCheckpoint(),
        compile=Compile(),
        checkpoint=Checkpoint(enable=True, folder=config.checkpoint.folder, load_step=step),
    )
    if step_to_load(config) is None:
        raise ConfigError(
            f"{checkpoint_folder(config)} holds no checkpoint; train with --checkpoint.enable to save the last step"
        )
    return config


def text(job: ResolvedJob, prompt: str, *, tokens: int, temperature: float, seed: int) -> str:
    """Return the prompt and what the model of the run writes after it, up to the end of the text."""
    import torch

    from trainer.checkpoint.checkpointer import load_weights
    from trainer.components.generation import continued
    from trainer.data.tokenizer import Tokenizer
    from trainer.distributed.parallel_dims import ParallelDims
    from trainer.models.initialization import initialize
    from trainer.models.model_spec import model_spec
    from trainer.runtime.process_group import Process, process_group

    process = Process(0, 0, 1, job.config.job.device)
    job, spec = job.on(process.device.type), model_spec(job.config.model.name)
    with process_group(process, job.config.comm):
        dims = ParallelDims(job.degrees, process.device.type)
        with torch.device("meta"):
            model = spec.build(job.model).to(getattr(torch, job.config.training.dtype))
        spec.parallelize(model, dims, job)
        initialize(model, seed=0, device=process.device)
        load_weights(job.config, job.model, model, step_to_load(job.config))
        tokenizer, generator = Tokenizer(job.config.model.tokenizer_file), torch.Generator().manual_seed(seed)
        ids = tokenizer.encode(prompt, bos=True)
        written: list[int] = []
        for token in continued(model, job, dims, ids, temperature=temperature, generator=generator):
            if token == tokenizer.eos_id or len(written) == tokens:
                break
            written.append(token)
    return tokenizer.decode([*ids[1:], *written])


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    described = argparse.ArgumentParser(prog="lct generate", description=__doc__.splitlines()[0])
    add = described.add_argument
    add("folder", type=Path, help="job.dump_folder of the run")
    add("--prompt", default="", help="text to continue (default: the start of a document)")
    add("--tokens", type=int, default=64, help="most tokens to write (default: 64)")
    add(
        "--temperature",
        type=float,
        default=0.7,
        help="0: the likeliest token; 1: as the model says (default: 0.7)",
    )
    add("--seed", type=int, default=0, help="of the drawn tokens (default: 0)")
    add("--step", type=int, default=-1, help="saved step (default: the latest)")
    return described


def main(argv: list[str] | None = None) -> int:
    """Print a text that the model of a run has continued."""
    args = parser().parse_args(argv)
    try:
        if args.tokens < 1 or args.temperature < 0:
            raise ConfigError(
                f"--tokens {args.tokens} must be at least 1 and --temperature {args.temperature} at least 0"
            )
        config = configuration(args.folder, args.step)
        job = resolve(config, 1, this_machine().device_type(config.job.device))
        print(text(job, args.prompt, tokens=args.tokens, temperature=args.temperature, seed=args.seed))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
