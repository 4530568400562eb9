"""The program `lct`. Each command is a module, which is imported when it is called."""

import sys
from importlib import import_module
from pathlib import Path

from trainer import __version__
from trainer.config.errors import ConfigError, did_you_mean
from trainer.config.toml import load_toml
from trainer.config.writable import is_of_file
from trainer.runtime.console import report
from trainer.runtime.output import outlasting_readers

COMMANDS = load_toml(Path(__file__).with_name("commands.toml"))
"""Purpose, example and module of each command."""
_LOGS = (["convert"], ["serve"], ["tokenize"])
"""Commands whose whole output is a log of their work."""


def usage() -> str:
    """Return the list of commands, with purpose and example of each."""
    commands = "\n".join(
        f"  {name:20}{about['purpose']}\n  {'':20}{about['example']}"
        for name, about in COMMANDS.items()
    )
    return (
        f"lct {__version__}: train language models on long sequences.\n\n  lct COMMAND --help\n\n{commands}\n\n"
        "  lct --version\n\nSettings: lct train --help. Documentation: docs/ in the repository."
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
    name, *others = arguments or ["help"]
    if name == "help" and others:
        name, *others = *others, "--help"
    if name in ("-h", "--help", "help"):
        print(usage())
        return 0
    if name == "--version":
        print(f"lct {__version__}")
        return 0
    if name not in COMMANDS:
        known = [*COMMANDS, "--version", "--help"]
        report(f"error: {name!r} is not a command of lct{did_you_mean(name, known)}")
        return 2
    module = COMMANDS[name].get("module", f"trainer.commands.{name}")
    try:
        return import_module(module).main(others)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise
        report(
            f"error: this installation is older than the program and lacks {error.name}; install the program again, "
            "from a clone with pip install -e ."
        )
        return 2
    except ConfigError as error:
        report(f"error: {error}")
        return 2
    except OSError as error:
        if not is_of_file(error):
            raise
        file = error.filename or "a file"
        report(
            f"error: {file} cannot be read or written ({error.strerror}); "
            "check its path, permissions and disk"
        )
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
