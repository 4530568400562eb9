"""torchtitan's keys of all versions: read as today's keys, ignored with a note, or refused."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from operator import attrgetter
from typing import Any

from trainer.config.errors import ConfigError
from trainer.config.keys import Key, keys_of
from trainer.config.schema import JobConfig
from trainer.config.torchtitan import ABSENT, OLDER, OLDER_VALUES, ONCE_STRINGS
from trainer.config.values import shown

_OF_THE_MODEL = ("model.", "checkpoint.initial_load_")


@dataclass(frozen=True)
class Settings:
    """The settings of one source, or of several merged.

    values: today's keys; absent: keys without counterpart here, each with its value and its source; notes: one line for
    each older key or value.
    """

    values: dict[str, Any] = field(default_factory=dict)
    absent: dict[str, tuple[Any, str]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def over(self, base: "Settings") -> "Settings":
        """Return these settings merged over `base`; notes in the order of reading, the base first.

        A `model.path` brings a model of its own: it replaces table [model] and the initial weights of the base.
        """
        below = base.values
        if self.values.get("model.path") is not None:
            below = {key: value for key, value in below.items() if not key.startswith(_OF_THE_MODEL)}
        return Settings(below | self.values, base.absent | self.absent, base.notes + self.notes)


@cache
def accepted_keys(schema: type) -> dict[str, Key]:
    """Return every key that is read: of the schema, older keys, and keys without counterpart here."""
    today = keys_of(schema)
    older = {name: Key(today[old.key].kind if old.kind is None else old.kind, None) for name, old in OLDER.items()}
    return older | {name: Key(key.kind, None) for name, key in ABSENT.items()} | today


def rewrite(values: Mapping[str, Any], where: str) -> Settings:
    """Return one source's settings ("table.key" -> value) with today's keys; ConfigError if two spellings differ."""
    today = {key: value for key, value in values.items() if key not in OLDER and key not in ABSENT}
    notes = []
    for old, value in values.items():
        if old not in OLDER:
            continue
        key, new = OLDER[old].key, OLDER[old].convert(value)
        if today.get(key, new) != new:
            raise ConfigError(
                f"{old} = {shown(value)} and {key} = {shown(today[key])} ({where}) are two spellings of one setting "
                f"with different values; keep {key} = {shown(today[key])} or {key} = {shown(new)}"
            )
        today[key] = new
        notes.append(f"{old} = {shown(value)} ({where}) is an older spelling, read as {key} = {shown(new)}")
    return Settings(today, {key: (values[key], where) for key in values if key in ABSENT}, tuple(notes))


def todays_value(key: str, value: object, where: str) -> tuple[object, tuple[str, ...]]:
    """Return today's name of a value of one of today's keys, and a note if the name has changed."""
    if key in ONCE_STRINGS and isinstance(value, str):
        today = [word.strip() for word in value.split(",") if word.strip()]
    elif isinstance(value, str) and value in OLDER_VALUES.get(key, {}):
        today = OLDER_VALUES[key][value]
    else:
        return value, ()
    return today, (f"{key} = {shown(value)} ({where}) is read as {key} = {shown(today)}",)


def check_absent(absent: Mapping[str, tuple[Any, str]], config: JobConfig) -> list[str]:
    """Return one line for each source with settings that have no counterpart here and are off.

    Raises:
        ConfigError: such a setting is on; the message says what to do instead.
    """
    notes, ignored = [], {}
    for key, (value, where) in absent.items():
        known = ABSENT[key]
        if known.replaced and value:
            notes.append(f"{key} = {shown(value)} ({where}) has no counterpart here: {known.replaced}")
            continue
        on = known.off is not None and value not in known.off
        if on and (not known.needs or attrgetter(known.needs)(config)):
            raise ConfigError(f"{key} = {shown(value)} ({where}) has no counterpart here; {known.instead}")
        ignored.setdefault(where, []).append(f"{key} = {shown(value)}")
    return notes + [
        f"ignored ({where}), without counterpart here and off or without effect: {', '.join(settings)}"
        for where, settings in ignored.items()
    ]
