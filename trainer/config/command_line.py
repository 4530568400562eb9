"""Read the options of a command line as typed values: settings (--table.key value) and actions (--help, ...)."""

from dataclasses import dataclass, field
from typing import Any

from trainer.config.errors import ConfigError, Problems, nearest
from trainer.config.keys import Key
from trainer.config.torchtitan import ONCE_STRINGS, accepted_keys, todays_value
from trainer.config.unknown import unknown_key
from trainer.config.values import from_words, shown

COMMAND_LINE = "on the command line"
_HELP = ("-h", "--help")
# Options that are not settings of a run.
ACTIONS = {
    "check_config": Key(bool, False),
    "print_config": Key(bool, False),
    "world_size": Key(int, 8),
    "allow_imports": Key(bool, False),
}
# A script sets it first, and its caller may set it again.
_OFTEN_TWICE = ("job.config_file",)


@dataclass
class Options:
    """The options of a command line.

    Attributes:
        values: Typed value of each setting or action, by name.
        notes: Lines for the log.
        help: Topics of --help, [] for everything; None without --help.
    """

    values: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    help: list[str] | None = None


def read_options(argv: list[str], schema: type, problems: Problems) -> Options:
    """Return the options of a command line. If an option is given twice, the last one counts.

    Args:
        argv: The words of the command line, without the program's name.
        schema: The class of the configuration.
        problems: Collects errors.
    """
    read = Options()
    with problems.collected():
        for token, words in split(argv):
            if token in _HELP:
                read.help = [*(read.help or []), *words]
                continue
            with problems.collected():
                _read_option(token, words, schema, read)
    return read


def _read_option(token: str, words: list[str], schema: type, read: Options) -> None:
    name, key, negated = _option_name(token, words, schema)
    if not negated:
        if len(words) == 1 and name not in ONCE_STRINGS:  # a word is a list of one
            word, renamed = todays_value(name, words[0], COMMAND_LINE)
            words = [str(word)]
            read.notes += renamed
        value = from_words(_label(name), words, key)
    elif words:
        raise ConfigError(
            f"{token} takes no value, and was given {' '.join(words)!r}; write {token} alone"
        )
    else:
        value = False
    if read.values.get(name, value) != value and name not in _OFTEN_TWICE:
        read.notes.append(
            f"{_label(name)} is given more than once {COMMAND_LINE}; the last value counts: {shown(value)}"
        )
    read.values[name] = value


def split(argv: list[str]) -> list[tuple[str, list[str]]]:
    """Return each option, such as `--table.key`, with the words up to the next option.

    The value of `--key=value` is a word, too.

    Args:
        argv: The words of the command line, without the program's name.

    Raises:
        ConfigError: A word belongs to no option.
    """
    options = []
    for token in argv:
        if token == "-h":
            options.append((token, []))
        elif token.startswith("--") and len(token) > 2:
            name, equals, value = token.partition("=")
            options.append((name, [value] if equals else []))
        elif options and token != "--":
            options[-1][1].append(token)
        else:
            raise ConfigError(
                f"{token!r} {COMMAND_LINE} belongs to no option; write --table.key value, "
                f"such as --job.config_file debug_model"
            )
    return options


def _option_name(token: str, words: list[str], schema: type) -> tuple[str, Key, bool]:
    """Return the name and the key of --table.key, and whether it is --no-table.key or --table.no-key of a boolean.

    Raises:
        ConfigError: The option is unknown, or a key that is no boolean is negated.
    """
    keys = ACTIONS | accepted_keys(schema)
    name = token[2:].replace("-", "_")
    table, _, key = name.rpartition(".")
    for candidate in (name, name.removeprefix("no_"), f"{table}.{key.removeprefix('no_')}"):
        if candidate not in keys:
            continue
        negated = candidate != name
        if negated and keys[candidate].kind is not bool:
            raise ConfigError(
                f"{token} is no switch: {candidate!r} takes a value; write {_option(candidate)} VALUE"
            )
        return candidate, keys[candidate], negated
    near = nearest(name, [*ACTIONS, "help"])
    if near and "." not in name:
        raise ConfigError(f"{token} is not a known option; did you mean {_label(near)}?")
    raise unknown_key(name, " ".join([token, *words]), COMMAND_LINE, schema)


def _option(name: str) -> str:
    return f"--{name}" if "." in name else f"--{name.replace('_', '-')}"


def _label(name: str) -> str:
    """Return the option as messages name it: settings by key, actions as typed."""
    return name if "." in name else _option(name)
