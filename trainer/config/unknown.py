"""The error for a key or table that does not exist: what to write instead."""

from pathlib import Path
from typing import get_type_hints

from trainer.config.errors import ConfigError, did_you_mean, nearest
from trainer.config.keys import keys_of
from trainer.config.toml import load_toml

ADVICE = load_toml(Path(__file__).with_name("elsewhere.toml"))["advice"]
ELSEWHERE: dict[str, str] = {
    name: entry["instead"] for entry in ADVICE for name in entry["names"].split()
}
"""Names of settings in other programs, and what to write here instead."""


def unknown_key(name: str, written: str, where: str, schema: type) -> ConfigError:
    """Return the error for an unknown key.

    The advice is the first of: a key of the same name in another table; today's name of a key of another program; a key
    of a near spelling; the keys of the table, or the tables.

    Args:
        name: "table.key" or "key".
        written: The key and its value as the user wrote them.
        where: The source, for the message.
        schema: The class of the configuration.
    """
    table, _, key = name.rpartition(".")
    known = list(keys_of(schema))
    tables = list(get_type_hints(schema))
    if not written.isprintable():
        written = repr(written)
    same = [other for other in known if other.partition(".")[2] == key]
    if same:
        return ConfigError(
            f"{written} ({where}) is not a known key; did you mean {' or '.join(map(repr, same))}?"
        )
    for other in (key, name.replace(".", "_"), table.partition(".")[0]):
        if advice := ELSEWHERE.get(other.lower()):
            return ConfigError(f"{written} ({where}) is not a known key; {advice}")
    if name in tables:
        keys = [f"--{other}" for other in known if other.startswith(f"{name}.")]
        shown_keys = f"{', '.join(keys[:3])}{' ...' * (len(keys) > 3)}"
        return ConfigError(
            f"{written} ({where}) is a table of settings; its keys are {shown_keys}"
        )
    if table and table not in tables:
        return ConfigError(
            f"{written} ({where}) is in no known table{did_you_mean(table, tables)}"
        )
    in_table = [other for other in known if other.startswith(f"{table}.")]
    near = _nearest(key, in_table) or _nearest(key, known)
    if near:
        hint = f"did you mean {near!r}?"
    elif table:
        hint = f"the keys of [{table}] are {', '.join(other.partition('.')[2] for other in in_table)}"
    else:
        hint = f"settings are table.key, with table one of {', '.join(tables)}"
    return ConfigError(f"{written} ({where}) is not a known key; {hint}")


def unknown_table(table: str, where: str, schema: type) -> ConfigError:
    """Return the error for an unknown table of a file.

    Args:
        table: Its name.
        where: The source, for the message.
        schema: The class of the configuration.
    """
    hint = (
        f"; {ELSEWHERE[table]}"
        if table in ELSEWHERE
        else did_you_mean(table, get_type_hints(schema))
    )
    return ConfigError(
        f"[{table if table.isprintable() else repr(table)}] ({where}) is not a known table{hint}"
    )


def _nearest(key: str, names: list[str]) -> str | None:
    near = nearest(key, [name.partition(".")[2] for name in names])
    return next((name for name in names if name.partition(".")[2] == near), None)
