"""The program `lct`. Each command is a module, which is imported when it is called."""

import sys
from importlib import import_module

from trainer import __version__
from trainer.config.errors import ConfigError, did_you_mean
from trainer.runtime.console import report
from trainer.runtime.output import outlasting_readers

# command -> (its purpose, an example)
COMMANDS = {
    "train": (
        "train on the GPUs of this machine, or on two CPU ranks",
        "lct train my.toml --ngpu 8",
    ),
    "check": (
        "check a configuration and print every decision",
        "lct check my.toml --world-size 8",
    ),
    "estimate": (
        "predict memory, traffic and time of a step on GPUs, the longest sequence, the fastest settings",
        "lct estimate my.toml --world-size 8 --gpu h100",
    ),
    "generate": (
        "continue a text with the weights of a run",
        "lct generate outputs/debug_model",
    ),
    "chat": (
        "talk with the model of a run, through its chat template",
        "lct chat outputs/chat",
    ),
    "serve": (
        "answer requests in the format of OpenAI's API",
        "lct serve outputs/chat --port 8000",
    ),
    "evaluate": (
        "measure a run on long sequences: loss by position, needles in a haystack",
        "lct evaluate outputs/debug_model --seq-len 2048",
    ),
    "convert": (
        "convert the weights of a run to Hugging Face's files",
        "lct convert to-hf outputs exported",
    ),
    "verify": (
        "read checkpoints whole, and say which are damaged",
        "lct verify outputs/debug_model",
    ),
    "plan": (
        "show who computes and sends what in context parallelism",
        "lct plan --seq-len 65536 --degree 4",
    ),
    "data": (
        "show what a job trains on: counts, and a packed sequence with its labels",
        "lct data show my.toml --sample 3",
    ),
    "tokenize": (
        "turn text into files of token ids, which train faster",
        "lct tokenize --path 'data/*.jsonl' --output tokens",
    ),
}
_LOGS = (["convert"], ["serve"], ["tokenize"])
"""Commands whose whole output is a log of their work."""


def usage() -> str:
    """Return the list of commands, with purpose and example of each."""
    lines = [
        f"lct {__version__}: train language models on long sequences.",
        "",
        "  lct COMMAND --help",
        "",
    ]
    for name, (purpose, example) in COMMANDS.items():
        lines += [f"  {name:20}{purpose}", f"  {'':20}{example}"]
    return "\n".join(
        [
            *lines,
            "",
            "  lct --version",
            "",
            "Settings: lct train --help. Documentation: docs/ in the repository.",
        ]
    )


def main(argv: list[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: The words of the command line; None for the words of this process.

    Returns:
        The exit code.
    """
    arguments = sys.argv[1:] if argv is None else argv
    with outlasting_readers(is_log=arguments[:1] in _LOGS):
        return _run(arguments)


def _run(arguments: list[str]) -> int:
    if arguments[:1] == ["help"] and len(arguments) > 1:
        arguments = [*arguments[1:], "--help"]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    if arguments[0] == "--version":
        print(f"lct {__version__}")
        return 0
    if arguments[0] not in COMMANDS:
        known = [*COMMANDS, "--version", "--help"]
        report(
            f"error: {arguments[0]!r} is not a command of lct{did_you_mean(arguments[0], known)}"
        )
        return 2
    name = arguments[0].replace("tokenize", "tokenize_text")  # Python has a module tokenize
    command = import_module(f"trainer.commands.{name}")
    try:
        return command.main(arguments[1:])
    except ConfigError as error:
        report(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
