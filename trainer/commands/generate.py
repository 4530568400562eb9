"""Continue texts with the weights of a run, or of a Hugging Face folder, on one device or several.

generate outputs/debug_model --prompt 'def main(' --prompt 'class ' --tokens 60 --top-p 0.9

With --ngpu N tensor-parallel ranks divide the model, each with the keys and values of its own heads. All ranks draw the
same tokens, and rank 0 prints them.
"""

import argparse
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.commands.finished_run import loaded_model, model_options, text_configuration
from trainer.commands.options import Parser, given_as, number
from trainer.commands.ranks import all_ranks, run, work_on_rank
from trainer.config.errors import ConfigError
from trainer.config.schema import JobConfig, Parallelism
from trainer.job import ResolvedJob, resolve
from trainer.runtime.devices import this_machine
from trainer.stores.initial import hf_folder

if TYPE_CHECKING:
    import torch

    from trainer.data.tokenizers.tokenizer import Tokenizer


def end_ids(config: JobConfig, tokenizer: "Tokenizer") -> set[int]:
    """Return the tokens that end a text: the tokenizer's, and all that the model's `generation_config.json` names."""
    from trainer.data.tokenizers.tokenizer_json import read_settings

    folders = {Path(config.model.tokenizer_file), Path(config.model.tokenizer_file).parent, hf_folder(config)}
    ends: set[Any] = {tokenizer.eos_id}
    for folder in folders - {None}:
        named = read_settings(folder / "generation_config.json").get("eos_token_id")
        ends |= set(named) if isinstance(named, list) else {named}
    return {end for end in ends if type(end) is int and 0 <= end < tokenizer.vocab_size}


def parser() -> Parser:
    """Return the parser of the options."""
    described = Parser("generate", __doc__.splitlines()[0])
    add = described.add_argument
    add("folder", type=Path, help="job.dump_folder of the run, or a Hugging Face folder")
    add("--prompt", action="append", help="text to continue; may be given again (default: the start of a document)")
    add("--prompts", type=Path, metavar="FILE", help="texts to continue, one a line")
    add("--tokens", type=number(int, 1), default=64, help="most tokens to write (default: 64)")
    text = "0: the likeliest token; 1: as the model says (default: 0.7)"
    add("--temperature", type=number(float, 0), default=0.7, help=text)
    text = "draw among the k likeliest tokens (default: 0, all)"
    add("--top-k", type=number(int, 0), default=0, help=text)
    text = "draw among the likeliest tokens of this probability (default: 1)"
    add("--top-p", type=number(float, above=0, most=1), default=1.0, help=text)
    model_options(described, seed="of the drawn tokens")
    text = "ranks that divide the model, a GPU each (default: 1)"
    add("--ngpu", type=number(int, 1), default=1, metavar="N", help=text)
    return described


def prompts_of(args: argparse.Namespace, tokenizer: "Tokenizer") -> list[list[int]]:
    """Return the tokens of the prompts of the command line and of the file."""
    prompts = list(args.prompt or ())
    if args.prompts is not None:
        try:
            lines = args.prompts.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--prompts {args.prompts} cannot be read ({error}); name a text file") from None
        if not lines:
            raise ConfigError(f"--prompts {args.prompts} is empty; give a text a line")
        prompts += lines
    tokens = [tokenizer.encode(prompt) for prompt in prompts or [""]]
    if tokenizer.bos_id is None and not all(tokens):
        raise ConfigError("--prompt '' needs a token that begins a text, and this tokenizer has none; give some text")
    return tokens


def checked(argv: list[str]) -> tuple[argparse.Namespace, ResolvedJob]:
    """Return the arguments and the job of all ranks."""
    args = parser().parse_args(argv)
    ranks = all_ranks(args.ngpu)
    config, _ = text_configuration(args.folder, args.step, command="lct generate", tokenizer=args.tokenizer)
    length = max(config.training.seq_len // ranks, 1) * ranks
    config = replace(
        config,
        training=replace(config.training, seq_len=length),
        parallelism=Parallelism(tensor_parallel_degree=ranks),
        comm=replace(config.comm, trace_buf_size=0),  # nothing is written
    )
    with given_as(tensor_parallel_degree="--ngpu"):
        return args, resolve(config, ranks, this_machine().device_type(config.job.device))


def work(args: argparse.Namespace, job: ResolvedJob, device: "torch.device") -> str:
    """Return each prompt and what the model writes after it, up to the end of the text. A collective over all ranks."""
    from trainer.components.generation import Sampling, generate
    from trainer.data.tokenizers.tokenizer import open_tokenizer
    from trainer.runtime.agreement import raise_on_all_ranks

    tokenizer = open_tokenizer(job.config.model.tokenizer_file)
    prompts = raise_on_all_ranks(lambda: prompts_of(args, tokenizer), device)
    begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    settings = {"tokens": args.tokens, "sampling": Sampling(args.temperature, args.top_k, args.top_p)}
    settings |= {"seed": args.seed, "ends": end_ids(job.config, tokenizer)}
    model, dims = loaded_model(job, device)
    written = generate(model, job, dims, [begin + ids for ids in prompts], **settings)
    return "\n\n".join(tokenizer.decode(ids + more) for ids, more in zip(prompts, written, strict=True))


main = partial(run, "trainer.commands.generate", checked, work)

if __name__ == "__main__":
    from trainer.commands.rank import command_line

    sys.exit(command_line(partial(work_on_rank, checked, work)))
