"""Talk with the model of a run, or of a Hugging Face folder: a chat on the terminal, through its chat template.

chat outputs/chat
chat ./Qwen3-8B --ngpu 4 --system 'Be brief.' --tools tools.json

Each line is a message. An answer is printed as it is written. /reset begins again, /tool TEXT gives the result of a
tool that the model has called, and Ctrl-D ends. Without a terminal, each line of the input is a message.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from trainer.commands.generate import job_of, model_parser
from trainer.commands.options import Parser
from trainer.commands.ranks import run
from trainer.commands.talk import PATIENCE_SECONDS, Pieces, Talk, talk_options
from trainer.config.errors import ConfigError
from trainer.job import ResolvedJob

if TYPE_CHECKING:
    import torch


def parser() -> Parser:
    """Return the parser of the options."""
    described = model_parser("chat", __doc__)
    described.add_argument("--system", help="message of the system, before all others")
    talk_options(described)
    return described


def checked(argv: list[str]) -> tuple[argparse.Namespace, ResolvedJob]:
    """Return the arguments and the job of all ranks."""
    args = parser().parse_args(argv)
    job = job_of(args, command="lct chat")
    Talk.of(job.config, args.tools)
    return args, job


def next_line() -> bytes:
    """Return the next line of the user with its end, or nothing at the end of the input."""
    if sys.stdin.isatty():
        print("> ", end="", flush=True)
    return sys.stdin.buffer.readline()


def work(args: argparse.Namespace, job: ResolvedJob, device: "torch.device") -> str:
    """Talk until the input ends. A collective over all ranks; rank 0 reads and prints."""
    from trainer.commands.finished_run import loaded_model
    from trainer.components.generation import Sampling, generate
    from trainer.runtime.agreement import read_once
    from trainer.runtime.process_group import set_timeout

    talk = Talk.of(job.config, args.tools)
    model, dims = loaded_model(job, device)
    set_timeout(PATIENCE_SECONDS)  # the other ranks wait while the user thinks
    first = [] if args.system is None else [{"role": "system", "content": args.system}]
    messages, is_first = list(first), dims.rank("world") == 0
    while given := read_once(next_line, over=dims["world"]):
        line = given.decode(errors="replace").strip()
        command, _, rest = line.partition(" ")
        if command == "/reset":
            messages = list(first)
            continue
        if not line:
            continue
        message = {"role": "tool", "content": rest} if command == "/tool" else {"role": "user", "content": line}
        try:
            prompt = talk.prompt([*messages, message])
        except ConfigError as error:
            if is_first:
                print(f"error: {error}", file=sys.stderr)
            continue
        pieces = Pieces(talk.tokenizer.decode)
        sampling = Sampling(args.temperature, args.top_k, args.top_p)
        settings = {"tokens": args.tokens, "sampling": sampling, "seed": args.seed, "ends": talk.ends}

        def put(_: int, token: int, __: object, put: Callable[[int], str] = pieces.put) -> None:
            if is_first and token not in talk.ends:
                print(put(token), end="", flush=True)

        (written,) = generate(model, job, dims, [prompt], **settings, on_token=put)
        if is_first:
            print(pieces.finish(), flush=True)
        messages += [message, talk.answer(prompt, written)]
    return ""


main = partial(run, __name__)
