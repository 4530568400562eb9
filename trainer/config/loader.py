"""Read a command line and TOML files into a `JobConfig`: command line over file over base over defaults.

Every source becomes a flat dict "table.key" -> typed value. Older spellings are rewritten per source. Then the sources
are merged.
"""

import difflib
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

import tomli_w

from trainer.config.errors import ConfigError, did_you_mean
from trainer.config.help import help_text
from trainer.config.keys import Key, keys_of
from trainer.config.legacy import Settings, check_absent, rewrite, todays_value
from trainer.config.schema import JobConfig
from trainer.config.torchtitan import ABSENT, OLDER
from trainer.config.values import from_toml, from_words, shown

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_COMMAND_LINE = "on the command line"


@dataclass(frozen=True)
class CommandLine:
    """A parsed command line; `notes` are lines for the log about older keys and ignored ones."""

    config: JobConfig
    check_config: bool
    print_config: bool
    world_size: int | None
    notes: tuple[str, ...]


# Options that are not settings of a run.
_ACTIONS = {"check_config": Key(bool, False), "print_config": Key(bool, False), "world_size": Key(int, 8)}


def parse_command_line(argv: list[str]) -> CommandLine:
    """Return the configuration of `argv` (without the program's name) and the files it names; --help exits with 0.

    Raises:
        ConfigError: an unknown table or key, a value of the wrong type, a file that is missing or not TOML.
    """
    given, value_notes = _read_options(argv)
    check_config, print_config = given.pop("check_config", False), given.pop("print_config", False)
    world_size = given.pop("world_size", None)
    if world_size is not None and world_size < 1:
        raise ConfigError(f"--world-size {world_size} must be the number of ranks, at least 1, such as 8")
    if world_size is not None and not check_config:
        raise ConfigError(f"--world-size {world_size} needs --check-config; add it")
    settings = Settings(notes=tuple(value_notes)).over(rewrite(given, _COMMAND_LINE))
    config_file = settings.values.get("job.config_file")
    if config_file is not None:
        settings = settings.over(_read_file(Path(config_file), chain=()))
    config = _build(settings.values)
    notes = (*settings.notes, *check_absent(settings.absent, config))
    return CommandLine(config, check_config, print_config, world_size, notes)


def to_toml(config: JobConfig) -> str:
    """Return the configuration as TOML that loads to an equal one, without None and the name of the file."""
    tables = {
        table: {key: value for key, value in content.items() if value is not None}
        for table, content in asdict(config).items()
    }
    tables["job"].pop("config_file", None)
    return tomli_w.dumps(tables)


@cache
def _accepted_keys(schema: type) -> dict[str, Key]:
    """Return every key that is read: of the schema, older keys, and keys without counterpart here."""
    today = keys_of(schema)
    older = {name: Key(today[old.key].kind if old.kind is None else old.kind, None) for name, old in OLDER.items()}
    return older | {name: Key(key.kind, None) for name, key in ABSENT.items()} | today


def _build(values: dict[str, object]) -> JobConfig:
    tables: dict[str, dict[str, object]] = {table: {} for table in get_type_hints(JobConfig)}
    for name, value in values.items():
        table, _, key = name.partition(".")
        tables[table][key] = value
    return JobConfig(**{table: kind(**tables[table]) for table, kind in get_type_hints(JobConfig).items()})


# ---- command line


def _read_options(argv: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Return options as name -> typed value, and notes; the last counts if an option is given twice."""
    options = _split(argv)
    if any(token in ("-h", "--help") for token, _ in options):
        print(help_text(JobConfig, width=min(shutil.get_terminal_size().columns, 120)))
        raise SystemExit(0)
    keys = _ACTIONS | _accepted_keys(JobConfig)
    given: dict[str, Any] = {}
    notes: list[str] = []
    for token, words in options:
        name, negated = _option_name(token, words)
        key = keys[name]
        if not negated:
            if len(words) == 1:
                word, renamed = todays_value(name, words[0], _COMMAND_LINE)
                words, notes = [str(word)], [*notes, *renamed]
            given[name] = from_words(_label(name), words, key.kind, key.default)
        elif words:
            raise ConfigError(f"{token} takes no value, and was given {' '.join(words)!r}; write {token} alone")
        else:
            given[name] = False
    return given, notes


def _split(argv: list[str]) -> list[tuple[str, list[str]]]:
    """Return each option with the words up to the next option; the value of `--key=value` is a word, too."""
    options: list[tuple[str, list[str]]] = []
    for token in argv:
        if token in ("-h", "--help"):
            options.append((token, []))
        elif token.startswith("--") and len(token) > 2:
            name, equals, value = token.partition("=")
            options.append((name, [value] if equals else []))
        elif options and token != "--":
            options[-1][1].append(token)
        else:
            raise ConfigError(
                f"{token!r} {_COMMAND_LINE} belongs to no option; write --table.key value, "
                f"such as --job.config_file train_configs/debug_model.toml"
            )
    return options


def _option_name(token: str, words: list[str]) -> tuple[str, bool]:
    """Return (name, False) for --table.key, and (name, True) for --no-table.key and --table.no-key of a boolean."""
    keys = _ACTIONS | _accepted_keys(JobConfig)
    name = token[2:].replace("-", "_")
    table, _, key = name.rpartition(".")
    for candidate in (name, name.removeprefix("no_"), f"{table}.{key.removeprefix('no_')}"):
        negated = candidate != name
        if candidate in keys and (not negated or keys[candidate].kind is bool):
            return candidate, negated
    near = difflib.get_close_matches(name, _ACTIONS, n=1, cutoff=0.8)
    if near:
        raise ConfigError(f"{token} is not a known option; did you mean {_label(near[0])}?")
    raise _unknown(name, " ".join([token, *words]), _COMMAND_LINE)


def _label(name: str) -> str:
    """Return the option as messages name it: settings by key, actions as typed."""
    return name if "." in name else f"--{name.replace('_', '-')}"


# ---- TOML files


def _read_file(path: Path, chain: tuple[Path, ...]) -> Settings:
    """Return the settings of a file merged over its bases; `chain`: the files that led here."""
    if path.resolve() in [earlier.resolve() for earlier in chain]:
        circle = " -> ".join(str(file) for file in (*chain, path))
        raise ConfigError(f"base = {path.name!r} (in {chain[-1]}) closes a circle, {circle}; remove one base")
    content = _load_toml(path, chain)
    base = content.pop("base", None)
    if base is not None and not isinstance(base, str):
        raise ConfigError(f'base = {shown(base)} (in {path}) must be one file name, such as base = "llama3_8b.toml"')
    below = Settings() if base is None else _read_file(path.parent / base, (*chain, path))
    return _typed(content, f"in {path}").over(below)


def _load_toml(path: Path, chain: tuple[Path, ...]) -> dict[str, Any]:
    asked = f"base = {str(path)!r} (in {chain[-1]})" if chain else f"job.config_file = {str(path)!r}"
    text = ""
    try:
        text = path.read_bytes().decode()
        return tomllib.loads(text)
    except FileNotFoundError:
        siblings = sorted(str(file) for file in path.parent.glob("*.toml")) if path.parent.is_dir() else []
        near = difflib.get_close_matches(str(path), siblings, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "give a .toml file, such as train_configs/debug_model.toml"
        raise ConfigError(f"{asked} does not exist; {hint}") from None
    except tomllib.TOMLDecodeError as error:
        reason = str(error).replace("at end of document", f"at line {len(text.splitlines())}, the end")
        raise ConfigError(f'{path} is not valid TOML: {reason}; a line is key = value, strings in "quotes"') from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: byte {error.start} is not UTF-8; save it as UTF-8") from None
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{asked} cannot be read ({reason}); give a readable .toml file") from None


def _typed(content: dict[str, Any], where: str) -> Settings:
    """Return the settings of a parsed file, with their types checked."""
    accepted = _accepted_keys(JobConfig)
    tables = [table.name for table in fields(JobConfig)]
    values: dict[str, object] = {}
    notes: list[str] = []
    for table, settings in content.items():
        known = any(name.startswith(f"{table}.") for name in accepted)
        if not known and isinstance(settings, dict):
            name = table if table.isprintable() else repr(table)
            raise ConfigError(f"[{name}] ({where}) is not a known table{did_you_mean(table, tables)}")
        if not known:
            raise _unknown(table, f"{table} = {shown(settings)}", where)
        if not isinstance(settings, dict):
            raise ConfigError(
                f"{table} = {shown(settings)} ({where}) must be a table; write [{table}] and keys below it"
            )
        for name, value in _flat(table, settings):
            if name == "job.config_file":
                raise ConfigError(
                    f"{name} = {shown(value)} ({where}) is for the command line only; a file inherits another one "
                    f'with base = "other.toml" at its top'
                )
            if name not in accepted:
                raise _unknown(name, f"{name} = {shown(value)}", where)
            value, renamed = todays_value(name, value, where)
            notes += renamed
            if value is not None:
                values[name] = from_toml(name, value, accepted[name].kind, accepted[name].default, where)
    return Settings(notes=tuple(notes)).over(rewrite(values, where))


def _flat(table: str, settings: dict[str, Any]) -> Iterator[tuple[str, object]]:
    """Yield the keys of a table, and of known tables within it as "table.within.key"."""
    for key, value in settings.items():
        name = f"{table}.{key}"
        if isinstance(value, dict) and any(known.startswith(f"{name}.") for known in _accepted_keys(JobConfig)):
            yield from _flat(name, value)
        else:
            yield name, value


def _unknown(name: str, given: str, where: str) -> ConfigError:
    """Return the error for an unknown key, with the nearest known one."""
    table, _, key = name.rpartition(".")
    known = list(keys_of(JobConfig))
    tables = [field.name for field in fields(JobConfig)]
    if not given.isprintable():
        given = repr(given)
    same_key = [other for other in known if other.partition(".")[2] == key]
    if same_key:
        return ConfigError(f"{given} ({where}) is not a known key; did you mean {' or '.join(map(repr, same_key))}?")
    if table and table not in tables:
        return ConfigError(f"{given} ({where}) is in no known table{did_you_mean(table, tables)}")
    in_table = [other for other in known if other.startswith(f"{table}.")]
    near = _nearest(key, in_table) or _nearest(key, known)
    if near:
        hint = f"; did you mean {near!r}?"
    elif table:
        hint = f"; the keys of [{table}] are {', '.join(other.partition('.')[2] for other in in_table)}"
    else:
        hint = f"; settings are table.key, with table one of {', '.join(tables)}"
    return ConfigError(f"{given} ({where}) is not a known key{hint}")


def _nearest(key: str, names: list[str]) -> str | None:
    """Return the name whose part after the dot is nearest to `key`."""
    near = difflib.get_close_matches(key, [name.partition(".")[2] for name in names], n=1)
    return next((name for name in names if near and name.partition(".")[2] == near[0]), None)
