"""Read TOML files and their bases as typed settings."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer.config.errors import ConfigError, Problems
from trainer.config.legacy import Settings, accepted_keys, rewrite, todays_value
from trainer.config.toml import found_or_preset, load_toml
from trainer.config.unknown import unknown_key, unknown_table
from trainer.config.values import from_toml, shown


def with_bases(path: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield a file and its content, then its base, and so on.

    Raises:
        ConfigError: a file is missing or not TOML, or a base is wrong.
    """
    chain: tuple[Path, ...] = ()
    while True:
        if path.resolve() in [earlier.resolve() for earlier in chain]:
            circle = " -> ".join(str(file) for file in (*chain, path))
            raise ConfigError(f"base = {path.name!r} (in {chain[-1]}) closes a circle, {circle}; remove one base")
        content = load_toml(path, chain)
        base = content.pop("base", None)
        if base is not None and not isinstance(base, str):
            raise ConfigError(
                f'base = {shown(base)} (in {path}) must be one file name, such as base = "llama3_8b.toml"'
            )
        yield path, content
        if base is None:
            return
        chain, path = (*chain, path), found_or_preset(path.parent / base, base)


def read_file(path: Path, schema: type, problems: Problems) -> Settings:
    """Return the settings of a file merged over its bases; wrong ones go to `problems`.

    Raises:
        ConfigError: as `with_bases`.
    """
    settings = Settings()
    for file, content in with_bases(path):
        with problems.collected():
            settings = settings.over(_typed(content, f"in {file}", schema, problems))
    return settings


def _typed(content: dict[str, Any], where: str, schema: type, problems: Problems) -> Settings:
    """Return the settings of a parsed file, with their types checked."""
    values: dict[str, object] = {}
    notes: list[str] = []
    for table, settings in content.items():
        with problems.collected():
            known = any(name.startswith(f"{table}.") for name in accepted_keys(schema))
            if not known and isinstance(settings, dict):
                raise unknown_table(table, where, schema)
            if not known:
                raise unknown_key(table, f"{table} = {shown(settings)}", where, schema)
            if not isinstance(settings, dict):
                raise ConfigError(
                    f"{table} = {shown(settings)} ({where}) must be a table; write [{table}] and keys below it"
                )
            for name, value in _flat(table, settings, accepted_keys(schema)):
                with problems.collected():
                    typed, renamed = _typed_value(name, value, where, schema)
                    notes += renamed
                    if typed is not None:
                        values[name] = typed
    return Settings(notes=tuple(notes)).over(rewrite(values, where))


def _typed_value(name: str, value: object, where: str, schema: type) -> tuple[object, tuple[str, ...]]:
    """Return today's value of one key, or None for the default, and notes."""
    if name == "job.config_file":
        raise ConfigError(
            f"{name} = {shown(value)} ({where}) is for the command line only; a file inherits another one "
            f'with base = "other.toml" at its top'
        )
    key = accepted_keys(schema).get(name)
    if key is None:
        raise unknown_key(name, f"{name} = {shown(value)}", where, schema)
    if name == "chat.arguments" and isinstance(value, dict):  # a table [chat.arguments]
        value = [f"{argument}={json.dumps(given, default=str)}" for argument, given in value.items()]
    value, renamed = todays_value(name, value, where)
    if value is not None:
        value = from_toml(name, value, key, where)
    return value, renamed


def _flat(table: str, settings: dict[str, Any], accepted: dict[str, Any]) -> Iterator[tuple[str, object]]:
    """Yield the keys of a table, and of known tables within it as "table.within.key"."""
    for key, value in settings.items():
        name = f"{table}.{key}"
        if isinstance(value, dict) and any(known.startswith(f"{name}.") for known in accepted):
            yield from _flat(name, value, accepted)
        else:
            yield name, value
