"""Continue texts with the weights of a run, on one device.

generate outputs/debug_model --prompt 'def main(' --prompt 'class ' --tokens 60 --top-p 0.9
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.commands.finished_run import configuration, opened_model
from trainer.config.errors import ConfigError
from trainer.job import ResolvedJob, resolve
from trainer.runtime.devices import this_machine

if TYPE_CHECKING:
    from trainer.components.generation import Sampling


def texts(job: ResolvedJob, prompts: Sequence[str], *, tokens: int, sampling: "Sampling", seed: int) -> list[str]:
    """Return each prompt and what the model of the run writes after it, up to the end of the text.

    Raises:
        ConfigError: an empty prompt, and a tokenizer without a token that begins a text.
    """
    from trainer.components.generation import generate
    from trainer.data.tokenizer import open_tokenizer

    tokenizer = open_tokenizer(job.config.model.tokenizer_file)
    encoded = [tokenizer.encode(prompt) for prompt in prompts]
    begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    if not begin and not all(encoded):
        raise ConfigError("--prompt '' needs a token that begins a text, and this tokenizer has none; give some text")
    ends = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    with opened_model(job) as (model, dims, job):
        given = [[*begin, *ids] for ids in encoded]
        written = generate(model, job, dims, given, tokens=tokens, sampling=sampling, seed=seed, ends=ends)
    return [tokenizer.decode([*ids, *more]) for ids, more in zip(encoded, written, strict=True)]


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    described = argparse.ArgumentParser(prog="lct generate", description=__doc__.splitlines()[0])
    add = described.add_argument
    add("folder", type=Path, help="job.dump_folder of the run")
    add("--prompt", action="append", help="text to continue; may be given again (default: the start of a document)")
    add("--prompts", type=Path, metavar="FILE", help="texts to continue, one a line")
    add("--tokens", type=int, default=64, help="most tokens to write (default: 64)")
    add(
        "--temperature",
        type=float,
        default=0.7,
        help="0: the likeliest token; 1: as the model says (default: 0.7)",
    )
    add("--top-k", type=int, default=0, help="draw among the k likeliest tokens (default: 0, all)")
    add("--top-p", type=float, default=1.0, help="draw among the likeliest tokens of this probability (default: 1)")
    add("--seed", type=int, default=0, help="of the drawn tokens (default: 0)")
    add("--step", type=int, default=-1, help="saved step (default: the latest)")
    return described


def prompts_of(args: argparse.Namespace) -> list[str]:
    """Return the prompts of the command line and of the file.

    Raises:
        ConfigError: the file cannot be read, or is empty.
    """
    prompts = list(args.prompt or ())
    if args.prompts is not None:
        try:
            lines = args.prompts.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--prompts {args.prompts} cannot be read ({error}); name a text file") from None
        if not lines:
            raise ConfigError(f"--prompts {args.prompts} is empty; give a text a line")
        prompts += lines
    return prompts or [""]


def main(argv: list[str] | None = None) -> int:
    """Print texts that the model of a run has continued."""
    args = parser().parse_args(argv)
    try:
        for name, holds, rule in (
            ("tokens", args.tokens >= 1, "at least 1"),
            ("temperature", 0 <= args.temperature < math.inf, "at least 0"),
            ("top-k", args.top_k >= 0, "at least 0 (0: all)"),
            ("top-p", 0 < args.top_p <= 1, "above 0 and at most 1"),
        ):
            if not holds:
                raise ConfigError(f"--{name} {getattr(args, name.replace('-', '_'))} must be {rule}")
        prompts = prompts_of(args)
        config = configuration(args.folder, args.step, command="generate")
        job = resolve(config, 1, this_machine().device_type(config.job.device))
        from trainer.components.generation import Sampling

        sampling = Sampling(args.temperature, args.top_k, args.top_p)
        print("\n\n".join(texts(job, prompts, tokens=args.tokens, sampling=sampling, seed=args.seed)))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
