"""torchtitan's keys of all versions, from `torchtitan.toml`: read as today's keys, ignored with a note, or refused."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any, get_args, get_type_hints

from trainer.config.errors import ConfigError, did_you_mean
from trainer.config.keys import Key, keys_of
from trainer.config.schema import JobConfig, Parallelism
from trainer.config.toml import load_toml
from trainer.config.values import shown

_TABLES = load_toml(Path(__file__).with_suffix(".toml"))
_OF_THE_MODEL = ("model.", "checkpoint.initial_load_")
_STRINGS = tuple[str, ...]
_KINDS = {"bool": bool, "int": int, "float": float, "str": str, "list": _STRINGS}


@dataclass(frozen=True)
class Spelling:
    """An older key of a setting.

    Attributes:
        key: Today's key.
        words: The change in words.
        kind: Type of the older value; None for the type of today's key.
        convert: The conversion of the value.
    """

    key: str
    words: str = ""
    kind: Any = None
    convert: Callable[[Any], object] = lambda value: value


@dataclass(frozen=True)
class Absent:
    """A setting of a feature that this program lacks.

    Attributes:
        kind: The type of its values.
        off: Values that are ignored; None for all.
        instead: What to do if another value is refused.
        needs: Today's switch without which every value is ignored.
        replaced: If this setting is on, a note says these words: what this program does instead.
    """

    kind: Any
    off: tuple[object, ...] | None
    instead: str = "leave it out"
    needs: str = ""
    replaced: str = ""


def _one_of(key: str, values: Mapping[str, Any], instead: str) -> Callable[[str], Any]:
    """Return the conversion of a key that once had these values.

    It raises a ConfigError for another value; `instead` says what to use.
    """

    def convert(value: str) -> Any:
        if value not in values:
            raise ConfigError(f"{key} = {value!r} has no counterpart here; use {instead}")
        return values[value]

    return convert


# It sends K/V to the next rank, or gathers them at once.
_ROTATIONS = {"alltoall": "ring", "allgather": "all_gather"}
_METHODS = "parallelism.context_parallel_method = 'ring' or 'all_gather' (once 'alltoall' and 'allgather')"
_FLOAT8 = {"dynamic": True, "": False}


def _schedule(name: str) -> str:
    """Return today's name of a pipeline schedule. Raise a ConfigError if it is unknown.

    Older names have other capitals and underscores, such as `interleaved_1f1b`.
    """
    today = get_args(get_type_hints(Parallelism)["pipeline_parallel_schedule"])
    names = {choice.lower(): choice for choice in today} | {
        "flexibleinterleaved1f1b": "Interleaved1F1B"
    }
    if (plain := name.lower().replace("_", "")) in names:
        return names[plain]
    raise ConfigError(
        f"experimental.pipeline_parallel_schedule = {name!r} is no schedule{did_you_mean(name, today)}"
    )


def _converters(names: Sequence[str]) -> bool:
    for name in names:
        if name not in ("float8", "quantize.linear.float8"):
            raise ConfigError(
                f"model.converters = {list(names)}: {name!r} has no counterpart here; use 'float8', which is "
                f"float8.enable, or leave it out"
            )
    return bool(names)


# Type of the older value, and its conversion.
_CONVERSIONS: dict[str, tuple[Any, Callable[[Any], object]]] = {
    "same": (None, lambda value: value),
    "inverted": (bool, lambda on: not on),
    "fused": (bool, lambda on: "fused" if on else "foreach"),
    "list_of_one": (str, lambda name: (name,) if name else ()),
    "joined": (tuple[_STRINGS, ...], lambda stages: tuple(",".join(names) for names in stages)),
    "rotation": (str, _one_of("context_parallel_rotate_method", _ROTATIONS, _METHODS)),
    "schedule": (str, _schedule),
    "fp8_linear": (
        str,
        _one_of("training.fp8_linear", _FLOAT8, "float8.enable (once 'dynamic')"),
    ),
    "converters": (_STRINGS, _converters),
}

OLDER = {old: Spelling(today) for old, today in _TABLES["renamed"].items()} | {
    old: Spelling(entry["key"], entry["words"], *_CONVERSIONS[entry["by"]])
    for old, entry in _TABLES["converted"].items()
}
OLDER_VALUES: dict[str, dict[str, str | None]] = {
    key: {old: today or None for old, today in names.items()}
    for key, names in _TABLES["values"].items()
}
"""Older or other values of today's keys, and their names here; None: the default."""
ONCE_STRINGS = frozenset({"float8.filter_fqns"})
"""Keys with a list as value that once had one string with commas."""


def _refused(entry: Mapping[str, Any]) -> Absent:
    off = tuple(tuple(value) if isinstance(value, list) else value for value in entry["off"])
    kind = _STRINGS if isinstance(off[0], tuple) else type(off[0])
    return Absent(kind, off, entry.get("instead", Absent.instead), entry.get("needs", ""))


ABSENT = {
    key: Absent(_KINDS[kind], None)
    for kind, keys in _TABLES["ignored"].items()
    for key in keys.split()
}
ABSENT |= {
    key: Absent(bool, None, replaced=e["by"])
    for e in _TABLES["replaced"]
    for key in e["keys"].split()
}
ABSENT |= {
    key: _refused(entry) for entry in _TABLES["refused"] for key in entry["keys"].split()
}


@dataclass(frozen=True)
class Settings:
    """The settings of one source, or of several merged sources.

    Attributes:
        values: Values by today's keys.
        absent: Value and source of each key that this program lacks.
        notes: One line for each older key or value.
    """

    values: dict[str, Any] = field(default_factory=dict)
    absent: dict[str, tuple[Any, str]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def over(self, base: "Settings") -> "Settings":
        """Return these settings merged over a base. Notes keep the order of reading, the base first.

        A `model.path` brings its own model: it replaces the table [model] and the initial weights of the base.

        Args:
            base: The settings below.
        """
        below = base.values
        if self.values.get("model.path") is not None:
            below = {
                key: value for key, value in below.items() if not key.startswith(_OF_THE_MODEL)
            }
        return Settings(below | self.values, base.absent | self.absent, base.notes + self.notes)


@cache
def accepted_keys(schema: type) -> dict[str, Key]:
    """Return every key that is read: keys of the schema, older keys, and keys that this program lacks.

    Args:
        schema: The class of the configuration.
    """
    today = keys_of(schema)
    older = {
        name: Key(today[old.key].kind if old.kind is None else old.kind, None)
        for name, old in OLDER.items()
    }
    return older | {name: Key(key.kind, None) for name, key in ABSENT.items()} | today


def rewrite(values: Mapping[str, Any], where: str) -> Settings:
    """Return the settings of one source with today's keys, the keys that this program lacks, and notes on older keys.

    Args:
        values: Values by "table.key".
        where: The source, for messages.

    Raises:
        ConfigError: Two spellings of one setting have different values, or a value has no counterpart here.
    """
    today = {
        key: value for key, value in values.items() if key not in OLDER and key not in ABSENT
    }
    notes = []
    for old, value in values.items():
        if old not in OLDER:
            continue
        key = OLDER[old].key
        new = OLDER[old].convert(value)
        if today.get(key, new) != new:
            raise ConfigError(
                f"{old} = {shown(value)} and {key} = {shown(today[key])} ({where}) are two spellings of one setting "
                f"with different values; keep {key} = {shown(today[key])} or {key} = {shown(new)}"
            )
        today[key] = new
        notes.append(
            f"{old} = {shown(value)} ({where}) is an older spelling, read as {key} = {shown(new)}"
        )
    return Settings(
        today, {key: (values[key], where) for key in values if key in ABSENT}, tuple(notes)
    )


def todays_value(key: str, value: object, where: str) -> tuple[object, tuple[str, ...]]:
    """Return the value as today's versions write it, and a note if this differs from `value`.

    Args:
        key: One of today's keys.
        value: The value.
        where: The source, for the note.
    """
    if key in ONCE_STRINGS and isinstance(value, str):
        today = [*filter(None, map(str.strip, value.split(",")))]
    elif isinstance(value, str) and value in OLDER_VALUES.get(key, {}):
        today = OLDER_VALUES[key][value]
    else:
        return value, ()
    return today, (f"{key} = {shown(value)} ({where}) is read as {key} = {shown(today)}",)


def check_absent(absent: Mapping[str, tuple[Any, str]], config: JobConfig) -> list[str]:
    """Return notes about settings that this program lacks: a line for each that is on and has a replacement.

    The last lines list the other settings, which are ignored; one line for each source.

    Args:
        absent: Value and source of each such key.
        config: The configuration.

    Raises:
        ConfigError: A setting is on and has an effect, but no replacement. The message says what to do instead.
    """
    notes = []
    ignored = {}
    for key, (value, where) in absent.items():
        known = ABSENT[key]
        if known.replaced and value:
            notes.append(
                f"{key} = {shown(value)} ({where}) has no counterpart here: {known.replaced}"
            )
            continue
        on = known.off is not None and value not in known.off
        if on and (not known.needs or attrgetter(known.needs)(config)):
            raise ConfigError(
                f"{key} = {shown(value)} ({where}) has no counterpart here; {known.instead}"
            )
        ignored.setdefault(where, []).append(f"{key} = {shown(value)}")
    return notes + [
        f"ignored ({where}), without counterpart here and off or without effect: {', '.join(settings)}"
        for where, settings in ignored.items()
    ]
