"""Entries of `config.json`, checked one by one. A family says what each entry means. Torch-free."""

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
    """The entries of one file, or of a table in it.

    Attributes:
        file: The file, for messages.
        content: The entries.
    """

    file: Path
    content: Mapping[str, Any]

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number above 0: an int or a float, as the file has it.

        Args:
            key: The key.
            default: The value if the entry is missing or null. None: the entry is needed.

        Raises:
            ConfigError: The entry is no such number, or missing without a default.
        """
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
        """Return a whole number above 0. The file must have it without a decimal point.

        Args:
            key: The key.
            default: The value if the entry is missing or null. None: the entry is needed.
            most: The largest number. None: no bound.

        Raises:
            ConfigError: The entry is no such number, or missing without a default.
        """
        value = self.number(key, default)
        if not isinstance(value, int):
            raise ConfigError(f"{self.file}: {key} = {value!r} must be a whole number")
        if most is not None and value > most:
            raise ConfigError(f"{self.file}: {key} = {value!r} must be at most {most:,}")
        return value

    def wholes(self, keys: Mapping[str, str]) -> dict[str, int]:
        """Return several whole numbers above 0 by other names.

        Args:
            keys: Key of each entry -> the other name.
        """
        return {name: self.whole(key) for key, name in keys.items()}

    def switch(self, key: str) -> bool:
        """Return whether a switch is on; missing or null means off.

        Args:
            key: The key.

        Raises:
            ConfigError: The entry is neither true nor false.
        """
        value = self.content.get(key)
        if value not in (None, False, True):
            raise ConfigError(f"{self.file}: {key} = {value!r} must be true or false")
        return bool(value)

    def table(self, key: str) -> "Entries":
        """Return a table within this one; a missing, null or empty entry means an empty table.

        Args:
            key: The key.

        Raises:
            ConfigError: The entry is no table.
        """
        value = self.content.get(key) or {}
        if not isinstance(value, dict):
            raise ConfigError(f"{self.file}: {key} = {value!r} must be a table")
        return Entries(self.file, value)

    def only(self, key: str, *supported: Any) -> Any:
        """Return a supported value, by default the first one.

        Args:
            key: The key.
            *supported: All supported values; the first one is used if the entry is missing or null.

        Raises:
            ConfigError: The entry has another value.
        """
        value = self.content.get(key)
        if value is None:
            return supported[0]
        if value not in supported:
            words = " or ".join("null" if works is None else repr(works) for works in supported)
            raise ConfigError(
                f"{self.file}: {key} = {value!r} is not supported; it must be {words}"
            )
        return value


def entries_of(record: Any, keys: Mapping[str, str]) -> dict[str, Any]:
    """Return the entries that `Entries.wholes` reads.

    Args:
        record: Has the values as attributes. None: every value is None.
        keys: Key of each entry -> name of the attribute.
    """
    return {key: getattr(record, name, None) for key, name in keys.items()}


class HFConfig(Protocol):
    """How a family reads `config.json` and writes it."""

    model_type: str
    """The value of `model_type` for this family."""

    def read(self, config: Entries) -> Any:
        """Return model arguments; `max_seq_len` is the longest sequence that the file is for.

        Args:
            config: The entries of the file.

        Raises:
            ConfigError: The family lacks a feature; the message names key and value.
        """

    def write(self, args: Any) -> dict[str, Any]:
        """Return the entries of a model.

        Args:
            args: The arguments of the model.

        Raises:
            ConfigError: transformers lacks a feature of the model.
        """

    def check_start(self, args: Any) -> None:
        """Check that a model can start from weights of transformers.

        Args:
            args: The arguments of the model.

        Raises:
            ConfigError: transformers lacks a feature of the model.
        """


def read_settings(file: Path) -> Mapping[str, Any]:
    """Return the content of a JSON object; empty if the file cannot be read, or holds no object.

    Args:
        file: The file.

    Raises:
        ConfigError: The file is no JSON.
    """
    try:
        content = json.loads(file.read_text("utf-8"))
    except OSError:
        return {}
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is no JSON ({error}); copy it again") from None
    return content if isinstance(content, dict) else {}
