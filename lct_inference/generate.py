"""Continue texts with the weights of a run, or of a Hugging Face folder, on one device or several.

With --ngpu N, N tensor-parallel ranks divide the model; each rank keeps the keys and values of its own heads. With
--context-parallel M, M of the ranks divide the tokens of a long prompt instead. All ranks draw the same tokens.
"""

import argparse
import sys
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lct_inference.sampling_defaults import set_sampling
from lct_inference.talk import Talk, check_length, ends_of, talk_options, text_tokens
from trainer.commands.finished_run import loaded_model, model_options, text_configuration
from trainer.commands.options import COUNT, Parser, given_as, number
from trainer.commands.ranks import all_ranks, run
from trainer.config.errors import ConfigError
from trainer.config.schema import JobConfig, Parallelism
from trainer.job import ResolvedJob, resolve
from trainer.runtime.console import for_terminal
from trainer.runtime.devices import this_machine

if TYPE_CHECKING:
    import torch

    from trainer.data.tokenizers.tokenizer import Tokenizer


def model_parser(command: str, text: str, *, tokens: int = 1024) -> Parser:
    """Return a parser with the options of all commands that generate text.

    Args:
        command: The name of the command.
        text: The description of the command.
        tokens: Default number of tokens to generate.
    """
    described = Parser(command, text)
    add = described.add_argument
    add("folder", type=Path, help="job.dump_folder of the run, or a Hugging Face folder")
    add(
        "--tokens",
        type=COUNT,
        default=tokens,
        help=f"largest number of tokens to generate (default: {tokens})",
    )
    text = "0: the likeliest token; 1: the model's own (default: from the model's generation_config.json, else 0.7)"
    add("--temperature", type=number(float, 0), help=text)
    text = "draw among the k likeliest tokens (default: likewise, else 0, all)"
    add("--top-k", type=number(int, 0), help=text)
    text = "draw among the likeliest tokens of this probability (default: likewise, else 1)"
    add("--top-p", type=number(float, above=0, most=1), help=text)
    model_options(described, seed="seed of the drawn tokens")
    text = "number of ranks that divide the model, one per GPU (default: 1)"
    add("--ngpu", type=COUNT, default=1, metavar="N", help=text)
    text = "number of context-parallel ranks, which divide each prompt (default: 1)"
    add("--context-parallel", type=COUNT, default=1, metavar="M", help=text)
    return described


def parser() -> Parser:
    """Return the parser of the options."""
    described = model_parser("generate", __doc__.splitlines()[0], tokens=64)
    add = described.add_argument
    add(
        "--prompt",
        action="append",
        help="text to continue; may be given again (default: the start of a document)",
    )
    add("--prompts", type=Path, metavar="FILE", help="file of texts to continue, one per line")
    add(
        "--chat",
        action="store_true",
        help="take the prompts as messages, which the model answers by its chat template",
    )
    talk_options(described, "with --chat: ")
    return described


def prompts_of(args: argparse.Namespace) -> list[str]:
    """Return the prompts of --prompt, then the lines of the file of --prompts; one empty prompt without both.

    Args:
        args: The options of the command line.

    Raises:
        ConfigError: The file cannot be read, or is empty.
    """
    prompts = list(args.prompt or ())
    if args.prompts is not None:
        try:
            lines = args.prompts.read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"--prompts {args.prompts} cannot be read ({error}); name a text file"
            ) from None
        if not lines:
            raise ConfigError(f"--prompts {args.prompts} is empty; give a text a line")
        prompts += lines
    return prompts or [""]


def to_write(
    args: argparse.Namespace, config: JobConfig, tokenizer: "Tokenizer"
) -> tuple[list[str], list[list[int]], Collection[int]]:
    """Return the printed beginning of each text, the tokens of each prompt, and the tokens that end a text.

    With --chat, the printed beginnings are empty.

    Args:
        args: The options of the command line.
        config: The configuration of the run.
        tokenizer: The tokenizer.

    Raises:
        ConfigError: A prompt has no token, or is too long for the model.
    """
    prompts = prompts_of(args)
    if args.chat:
        talk = Talk.of(config, args.tools)
        tokens = [talk.prompt([{"role": "user", "content": prompt}]) for prompt in prompts]
        shown = [""] * len(prompts)
        ends = talk.ends
    else:
        tokens = [text_tokens(tokenizer, prompt) for prompt in prompts]
        shown = prompts
        ends = ends_of(config, tokenizer)
    if not all(tokens):
        raise ConfigError(
            "--prompt '' needs a token that begins a text, and this tokenizer has none; give some text"
        )
    for prompt in tokens:
        check_length(prompt, config.training.seq_len)
    return shown, tokens, ends


def checked(argv: list[str]) -> tuple[argparse.Namespace, ResolvedJob]:
    """Return the options and the job of all ranks.

    Args:
        argv: The words of the command line, without the command.

    Raises:
        ConfigError: An option is wrong, or the ranks cannot divide the model.
    """
    args = parser().parse_args(argv)
    for name, value in (("--tools", args.tools), ("--argument", " ".join(args.argument))):
        if value and not args.chat:
            raise ConfigError(
                f"{name} {value} is for a chat template, which --chat uses; add --chat"
            )
    job = job_of(args, command="lct generate")
    if args.chat:
        Talk.of(job.config, args.tools)
    return args, job


def job_of(args: argparse.Namespace, *, command: str) -> ResolvedJob:
    """Return the job of all ranks for a command that generates text with the model of a folder.

    Its sequence length is rounded down, so that the ranks can divide it.

    Args:
        args: The options of the command line. Missing options of sampling are filled in place, from the model's folder.
        command: The command, for messages.

    Raises:
        ConfigError: An option is wrong, or the ranks cannot divide the model.
    """
    ranks = all_ranks(args.ngpu)
    cp = args.context_parallel
    if ranks % cp:
        raise ConfigError(
            f"--context-parallel {cp} does not divide the {ranks} ranks; give --ngpu a multiple of it"
        )
    config, _ = text_configuration(args, command=command)
    set_sampling(args, config)
    unit = ranks * (2 if cp > 1 else 1)
    length = max(config.training.seq_len // unit, 1) * unit
    config = replace(
        config,
        training=replace(config.training, seq_len=length),
        parallelism=Parallelism(
            context_parallel_degree=cp,
            tensor_parallel_degree=ranks // cp,
            fsdp_reshard_after_forward="never",
        ),
        comm=replace(config.comm, trace_buf_size=0),  # no flight records
        chat=replace(config.chat, arguments=(*config.chat.arguments, *args.argument)),
    )
    name = "--ngpu" if cp == 1 else "--ngpu over --context-parallel"
    with given_as(tensor_parallel_degree=name, context_parallel_degree="--context-parallel"):
        return resolve(
            config, ranks, this_machine().device_type(config.job.device), node=args.ngpu
        )


def work(args: argparse.Namespace, job: ResolvedJob, device: "torch.device") -> str:
    """Return each prompt followed by its continuation by the model, on every rank. A collective over all ranks.

    With --chat, return the continuations alone.

    Args:
        args: The options of the command line.
        job: The resolved job.
        device: The device of this rank.
    """
    from lct_inference.generation import Sampling, Writing, generate
    from trainer.data.tokenizers.tokenizer import open_tokenizer
    from trainer.runtime.agreement import raise_on_all_ranks

    tokenizer = open_tokenizer(job.config.model.tokenizer_file)
    shown, prompts, ends = raise_on_all_ranks(lambda: to_write(args, job.config, tokenizer))
    model, dims = loaded_model(job, device)
    longest = max(map(len, prompts)) + args.tokens
    if longest > job.config.training.seq_len and dims.is_first:
        window = f"the {job.config.training.seq_len:,} tokens that the model sees"
        print(
            f"note: a text of {longest:,} tokens is longer than {window}; its older half is dropped",
            file=sys.stderr,
        )
    sampling = Sampling(args.temperature, args.top_k, args.top_p)
    writing = Writing(args.tokens, sampling, args.seed, ends)
    written = generate(model, job, dims, prompts, writing)
    texts = (
        text + tokenizer.decode(continuation)
        for text, continuation in zip(shown, written, strict=True)
    )
    return for_terminal("\n\n".join(texts))


main = partial(run, __name__)
