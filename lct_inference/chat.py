"""Chat on the terminal with the model of a run, or of a Hugging Face folder, through its chat template.

chat outputs/chat
chat ./Qwen3-8B --ngpu 4 --system 'Be brief.' --tools tools.json

Each line is a message. An answer is printed while it is generated, and Ctrl-C ends it. /reset begins again, /tool TEXT
gives the result of a tool that the model has called, /help lists the commands, and /exit or Ctrl-D leaves. Without a
terminal, each line of the input is a message. When the conversation is too long for the model, its first turns are
left out.

State of the process: The handler of Ctrl-C, while an answer is written.
"""

import argparse
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from lct_inference.generate import job_of, model_parser
from lct_inference.talk import PATIENCE_SECONDS, Pieces, Talk, talk_options
from trainer.commands.options import Parser
from trainer.commands.ranks import run
from trainer.config.errors import ConfigError
from trainer.job import ResolvedJob
from trainer.runtime.console import for_terminal

if TYPE_CHECKING:
    import torch


def parser() -> Parser:
    """Return the parser of the options."""
    described = model_parser("chat", __doc__)
    described.add_argument("--system", help="system message, before all others")
    talk_options(described)
    return described


def checked(argv: list[str]) -> tuple[argparse.Namespace, ResolvedJob]:
    """Return the options and the job of all ranks.

    Args:
        argv: The words of the command line, without the command.

    Raises:
        ConfigError: An option or a setting is wrong.
    """
    args = parser().parse_args(argv)
    job = job_of(args, command="lct chat")
    Talk.of(job.config, args.tools)
    return args, job


HELP = "/reset begins again, /tool TEXT gives the result of a tool, /exit or Ctrl-D leaves; Ctrl-C ends an answer"


def next_line() -> bytes:
    """Return the next line of the user with its end, or nothing at the end of the input."""
    if sys.stdin.isatty():
        print("> ", end="", flush=True)
    return sys.stdin.buffer.readline()


@dataclass
class Conversation:
    """The messages of a chat so far. Each line of the user adds a message or runs a command.

    Attributes:
        talk: The chat template, tokenizer and tools.
        system: The system message; None for none.
        tokens: Largest number of tokens of an answer.
        window: Largest number of tokens of prompt and answer together.
        say: Shows the user a line that is not part of an answer.
        has_ended: Whether the last line was /exit.
    """

    talk: Talk
    system: str | None
    tokens: int
    window: int
    say: Callable[[str], object]

    has_ended = False

    def __post_init__(self) -> None:
        system = {"role": "system", "content": self.system}
        self._first = [] if self.system is None else [system]
        self._messages = list(self._first)

    def prompt(self, line: str) -> list[int] | None:
        """Run a command of the user, or add a message to the conversation and return its prompt.

        Args:
            line: The line of the user.

        Returns:
            The tokens of the prompt. None if the line asks for no answer, or if no prompt can be made: the user is
            shown why.
        """
        command, _, content = line.partition(" ")
        if command == "/reset":
            self._messages = list(self._first)
        elif command == "/help":
            self.say(HELP)
        self.has_ended = command == "/exit"
        if not line or command in ("/reset", "/help", "/exit"):
            return None
        message = (
            {"role": "tool", "content": content}
            if command == "/tool"
            else {"role": "user", "content": line}
        )
        room = min(self.tokens, self.window // 4)
        try:
            messages, prompt, left_out = self.talk.fitting(
                [*self._messages, message], self.window, room
            )
        except ConfigError as error:
            self.say(f"error: {error}")
            return None
        if left_out:
            self.say(
                f"note: the first {left_out} turns are left out, as the model takes {self.window:,} tokens"
            )
        self._messages = messages
        return prompt

    def answered(self, prompt: list[int], written: list[int]) -> None:
        """Append an answer to the messages. Tell the user if the window has cut the answer.

        Args:
            prompt: The tokens of the prompt.
            written: The tokens of the answer.
        """
        if len(written) < self.tokens and len(prompt) + len(written) >= self.window:
            self.say(f"note: the answer ends here, as the model takes {self.window:,} tokens")
        self._messages.append(self.talk.answer(prompt, written))


@contextmanager
def interrupts() -> Iterator[list[int]]:
    """Yield a list that collects the signals of Ctrl-C inside this context; Ctrl-C raises nothing there."""
    signals = []
    before = signal.signal(signal.SIGINT, lambda number, _: signals.append(number))
    try:
        yield signals
    finally:
        signal.signal(signal.SIGINT, before)


def work(args: argparse.Namespace, job: ResolvedJob, device: "torch.device") -> str:
    """Return an empty text when the input of the chat has ended. A collective over all ranks; rank 0 reads and prints.

    Args:
        args: The options of the command line.
        job: The resolved job.
        device: The device of this rank.
    """
    from lct_inference.generation import Sampling, Writing, generate
    from trainer.commands.finished_run import loaded_model
    from trainer.runtime.agreement import control_group, highest, read_once
    from trainer.runtime.process_group import set_timeout

    talk = Talk.of(job.config, args.tools)
    window = job.config.training.seq_len
    model, dims = loaded_model(job, device)
    control = control_group()
    set_timeout(PATIENCE_SECONDS, except_group=control)
    is_first = dims.is_first
    say = partial(print, file=sys.stderr, flush=True) if is_first else lambda _: None
    if sys.stdin.isatty():
        say(HELP)
    conversation = Conversation(talk, args.system, args.tokens, window, say)
    while line := read_once(next_line):
        prompt = conversation.prompt(line.decode(errors="replace").strip())
        if conversation.has_ended:
            break
        if prompt is None:
            continue
        pieces = Pieces(talk.tokenizer.decode)

        def put(
            _: int, token: int, __: object, signals: list[int], pieces: Pieces = pieces
        ) -> bool:
            if is_first and token not in talk.ends:
                print(for_terminal(pieces.put(token)), end="", flush=True)
            return bool(highest(len(signals), control))

        sampling = Sampling(args.temperature, args.top_k, args.top_p)
        tokens = min(args.tokens, window - len(prompt))
        with interrupts() as signals:
            writing = Writing(
                tokens, sampling, args.seed, talk.ends, partial(put, signals=signals)
            )
            (written,) = generate(model, job, dims, [prompt], writing)
            highest(0, control)  # so that no rank leaves before the others
        if is_first:
            print(for_terminal(pieces.finish()), flush=True)
        conversation.answered(prompt, written)
    return ""


main = partial(run, __name__)
