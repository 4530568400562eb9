"""Convert a TOML value, or the words of a command line, to the type of its key."""

import json
import math
import os
import re
import sys
import types
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from trainer.config.errors import ConfigError, nearest
from trainer.config.keys import Key

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_SWITCHES = dict.fromkeys(("1", "yes", "y", "on", "t"), "true") | dict.fromkeys(
    ("0", "no", "n", "off", "f"), "false"
)
_MOVED = {
    "stop_after_update": "; for updates during the backward set training.early_update = true"
}
_SYNONYMS = {"gpu": "cuda", "gpus": "cuda", "nvidia": "cuda"}
_MOST_SHOWN = 4  # words in a message, when the shell has made many words of a pattern
_NAMES: dict[type, str] = {
    bool: "true or false",
    int: "an int",
    float: "a finite float",
    str: "a string",
}


def from_toml(name: str, value: object, key: Key, where: str) -> object:
    """Return a value in the type of its key.

    An int becomes a float, and a list a tuple. For a `named` key, a table becomes a tuple of texts "name=value". Other
    values stay as they are.

    Args:
        name: The key, for messages.
        value: The value of the file.
        key: The properties of the key.
        where: The source, for messages.

    Raises:
        ConfigError: The value has another type, or is none of the choices.
    """
    if key.named and isinstance(value, dict):
        value = [f"{named}={json.dumps(each, default=str)}" for named, each in value.items()]
    checked = _checked(value, without_none(key.kind)[0], infinite=key.may_be_infinite)
    if checked is None:
        raise _wrong(name, value, key, where)
    return checked


def from_words(name: str, words: list[str], key: Key) -> object:
    """Return the value of the words after an option. A bool needs no word; an optional value may be None.

    Args:
        name: The key, for messages.
        words: The words.
        key: The properties of the key.

    Raises:
        ConfigError: There are too few or too many words, or a word is no value of the key's type.
    """
    plain, optional = without_none(key.kind)
    where = "on the command line"
    if get_origin(plain) is tuple:
        return from_toml(
            name, [_parsed(word, get_args(plain)[0]) for word in words], key, where
        )
    if plain is bool and not words:
        return True
    if len(words) != 1:
        others = f" and {len(words) - _MOST_SHOWN} more" if len(words) > _MOST_SHOWN else ""
        received = f"{' '.join(words[:_MOST_SHOWN])!r}{others}" if words else "none"
        hint = _example(key.works, plain)
        if any(word[:1] == "-" and _parsed(word, float) == word for word in words):
            hint = "; options begin with two hyphens"
        elif plain is str and words and all(map(os.path.exists, words)):
            hint = f"; the shell has replaced a pattern by files: quote it, such as --{name} 'data/*.txt'"
        elif not words and plain is str:
            hint += f"; write --{name}=VALUE for a value that begins with two hyphens"
        raise ConfigError(
            f"{name} ({where}) was given {received}, and takes one value: {kind_name(plain)}{hint}"
        )
    if optional and words == ["None"]:
        return None
    value = _checked(_parsed(words[0], plain), plain, infinite=key.may_be_infinite)
    if value is None:
        raise _wrong(name, words[0], key, where)
    return value


def shown(value: object) -> str:
    """Return a value as messages print it: on one line, with booleans and lists as in TOML.

    Args:
        value: The value.
    """
    value = list(value) if isinstance(value, tuple) else value
    return str(value).lower() if isinstance(value, bool) else repr(value)


def in_millions(number: int) -> str:
    """Return 16.8 million for 16777216, and 524,288 as it is.

    Args:
        number: The number.
    """
    for word, unit in (("billion", 10**9), ("million", 10**6)):
        if number >= unit:
            return f"{number / unit:,.1f} {word}"
    return f"{number:,}"


def _checked(value: object, kind: Any, *, infinite: bool = False) -> object | None:
    """Return `value` as a `kind`, None if it is not one. The dataclass of a table may raise ConfigError.

    infinite: whether `value` may be inf. nan and -inf are never allowed.
    """
    if get_origin(kind) is Literal:
        return value if value in get_args(kind) else None
    if get_origin(kind) is tuple:
        items = (
            [_checked(item, get_args(kind)[0]) for item in value]
            if isinstance(value, list)
            else [None]
        )
        return None if None in items else tuple(items)
    if is_dataclass(kind):
        return _table(value, kind)
    if kind is float and type(value) is int and abs(value) < 2**1023:
        value = float(value)
    if isinstance(value, float) and not math.isfinite(value):
        return value if kind is float and infinite and value == math.inf else None
    return value if type(value) is kind else None


def _table(value: object, kind: type) -> object | None:
    """Return the instance of the dataclass `kind` that a table describes. The dataclass may raise ConfigError.

    None if `value` is no table, has an unknown key or a value of a wrong type, or lacks a key that has no default.
    """
    kinds = {field.name: get_type_hints(kind)[field.name] for field in fields(kind)}
    if not isinstance(value, dict) or not value.keys() <= kinds.keys():
        return None
    checked = {name: _checked(x, without_none(kinds[name])[0]) for name, x in value.items()}
    needed = {field.name for field in fields(kind) if field.default is MISSING}
    return None if None in checked.values() or needed - {*checked} else kind(**checked)


def _parsed(word: str, kind: Any) -> object:
    """Return the word as a value of this kind, or the word itself if it is no such value."""
    if kind is bool:
        return {"true": True, "false": False}.get(word.lower(), word)
    with suppress(ValueError):  # TOMLDecodeError is one too
        if is_dataclass(kind):
            return tomllib.loads(f"table = {word}")["table"]
        if kind in (int, float):
            return kind(word)
    return word


def without_none(kind: Any) -> tuple[Any, bool]:
    """Return (int, True) for `int | None`, and (type, False) for any other type.

    Args:
        kind: A type.
    """
    if get_origin(kind) not in (Union, types.UnionType):
        return kind, False
    (plain,) = [part for part in get_args(kind) if part is not types.NoneType]
    return plain, True


def kind_name(kind: Any, *, infinite: bool = False) -> str:
    """Return a type as messages name it: "an int", "one of 'a', 'b'", "a list, each item a string".

    Args:
        kind: A type.
        infinite: Whether a float may be infinite.
    """
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(repr, get_args(kind)))}"
    if get_origin(kind) is tuple:
        return f"a list, each item {kind_name(get_args(kind)[0])}"
    if is_dataclass(kind):
        return f"a table of {', '.join(field.name for field in fields(kind))}"
    return "a float" if kind is float and infinite else _NAMES[kind]


def _example(default: object, kind: Any) -> str:
    if default == ():
        item = get_args(kind)[0]
        examples = {int: ("[2, 4]", "2 4"), float: ("[0.7, 0.3]", "0.7 0.3")}
        toml, words = examples.get(item, ('["a", "b"]', "a b"))
        if is_dataclass(item):
            toml, words = f"[{item.EXAMPLE}]", f"'{item.EXAMPLE}'"
        return f", such as {toml} in a file and {words} on the command line"
    return "" if default in (None, "") else f", such as {shown(default)}"


def _wrong(name: str, value: object, key: Key, where: str) -> ConfigError:
    kind, optional = without_none(key.kind)
    hint = _example(key.works, kind)
    word = str(value).lower()
    if get_origin(kind) is Literal:
        near = _SYNONYMS.get(word)
        near = near if near in get_args(kind) else nearest(str(value), get_args(kind))
        hint = _MOVED.get(value, f"; did you mean {near!r}?" if near else "")
    elif (
        isinstance(value, str)
        and kind in (int, float, bool)
        and _checked(_parsed(value, kind), kind) is not None
    ):
        hint = f"; write {value.strip()} without quotes"
    elif kind is str and type(value) in (int, float):
        hint = f'; write "{value}"'
    elif kind is bool and word in _SWITCHES:
        hint = f"; write {_SWITCHES[word]}"
    elif kind is int and (number := meant(value)):
        hint = f"; write {number}"
    if optional:
        hint += ", or leave it out"
    return ConfigError(
        f"{name} = {shown(value)} ({where}) must be "
        f"{kind_name(kind, infinite=key.may_be_infinite)}{hint}"
    )


def meant(value: object) -> str:
    """Return the whole number that 1e4 or 8,192 means, and both that 8k means: `8192 or 8000`. Else return ''.

    Args:
        value: The value, or the words of the user.
    """
    written = _parsed(value, float) if isinstance(value, str) else value
    if isinstance(written, float) and math.isfinite(written) and written == int(written):
        return str(int(written))
    match = re.fullmatch(r"(\d[\d,_]*(?:\.\d+)?)\s*([kKMG]?)i?", str(value).strip())
    if match is None or isinstance(value, list | dict):
        return ""
    number = float(re.sub("[,_]", "", match[1]))
    power = " kMG".index(match[2].replace("K", "k") or " ")
    choices = [number * 1024**power, number * 1000**power] if power else [number]
    return " or ".join(str(int(choice)) for choice in choices if choice == int(choice))
