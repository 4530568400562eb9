"""Continue a text with the weights of a run, on one device.

generate outputs/debug_model --prompt 'def main(' --tokens 60
"""

import argparse
import sys
from pathlib import Path

from trainer.commands.finished_run import configuration, opened_model
from trainer.config.errors import ConfigError
from trainer.job import ResolvedJob, resolve
from trainer.runtime.devices import this_machine


def text(job: ResolvedJob, prompt: str, *, tokens: int, temperature: float, seed: int) -> str:
    """Return the prompt and what the model of the run writes after it, up to the end of the text."""
    import torch

    from trainer.components.generation import continued
    from trainer.data.tokenizer import open_tokenizer

    with opened_model(job) as (model, dims, job):
        tokenizer, generator = open_tokenizer(job.config.model.tokenizer_file), torch.Generator().manual_seed(seed)
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
        config = configuration(args.folder, args.step, command="generate")
        job = resolve(config, 1, this_machine().device_type(config.job.device))
        print(text(job, args.prompt, tokens=args.tokens, temperature=args.temperature, seed=args.seed))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
