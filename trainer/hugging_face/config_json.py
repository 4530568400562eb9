"""Entries of `config.json`, checked one by one; a family says what they mean to it. Torch-free."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from trainer.config.errors import ConfigError

CONFIG_FILE = "config.json"


@dataclass(frozen=True)
class Entries:
    """The entries of one file, or of a table in it."""

    file: Path
    content: Mapping[str, Any]

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number above 0; ConfigError if it is something else, or missing without a default."""
        value = self.content.get(key)
        value = default if value is None else value
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not 0 < value < math.inf
        ):
            raise ConfigError(f"{self.file}: {key} = {value!r} must be a number above 0")
        return value

    def whole(self, key: str, default: int | None = None, *, most: int | None = None) -> int:
        """Return a whole number above 0, at most `most`; otherwise as `number`."""
        value = self.number(key, default)
        if not isinstance(value, int):
            raise ConfigError(f"{self.file}: {key} = {value!r} must be a whole number")
        if most is not None and value > most:
            raise ConfigError(f"{self.file}: {key} = {value!r} must be at most {most:,}")
        return value

    def switch(self, key: str) -> bool:
        """Return whether a switch is on; missing or null: off; ConfigError if it is no switch."""
        value = self.content.get(key)
        if value not in (None, False, True):
            raise ConfigError(f"{self.file}: {key} = {value!r} must be true or false")
        return bool(value)

    def table(self, key: str) -> "Entries":
        """Return a table within; missing or null: an empty one; ConfigError if it is no table."""
        value = self.content.get(key) or {}
        if not isinstance(value, dict):
            raise ConfigError(f"{self.file}: {key} = {value!r} must be a table")
        return Entries(self.file, value)

    def only(self, key: str, *supported: Any) -> Any:
        """Return a value, one of these, or the first one if it is missing or null; ConfigError for another value."""
        value = self.content.get(key)
        if value is None:
            return supported[0]
        if value not in supported:
            words = " or ".join("null" if works is None else repr(works) for works in supported)
            raise ConfigError(
                f"{self.file}: {key} = {value!r} is not supported; it must be {words}"
            )
        return value


class HFConfig(Protocol):
    """How a family reads `config.json` and writes it."""

    model_type: str
    """What `model_type` says of it."""

    def read(self, config: Entries) -> Any:
        """Return model arguments, `max_seq_len` being the longest sequence that the file is for.

        Raises:
            ConfigError: by key and value, what the family does not have.
        """

    def write(self, args: Any) -> dict[str, Any]:
        """Return the entries of a model; ConfigError for what transformers does not have."""

    def check_start(self, args: Any) -> None:
        """Check that a model can start from weights of transformers, else raise a ConfigError."""


def read_settings(file: Path) -> Mapping[str, Any]:
    """Return the content of a JSON object; empty if there is no such file."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError:
        return {}
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is no JSON ({error}); copy it again") from None
    return found if isinstance(found, dict) else {}
