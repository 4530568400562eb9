"""Import the packages of `job.imports` before a configuration is read: they add choices, and tables, by name."""

import importlib
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from trainer.config.errors import ConfigError
from trainer.config.toml import found_or_preset, with_bases

_KEYS = (("job", "imports"), ("experimental", "custom_import"))
"""Today's key, and torchtitan's."""
IMPORTED: list[str] = []
"""What this process has imported so; processes that it starts import the same."""


def import_packages(names: Sequence[str]) -> None:
    """Import the modules, also from the folder where the command runs; ConfigError if one is missing, or fails."""
    if names and not {"", str(Path.cwd())} & {*sys.path}:
        sys.path.insert(0, str(Path.cwd()))
    for name in names:
        try:
            importlib.import_module(name)
            IMPORTED.append(name)
        except Exception as error:  # whatever a user's code raises
            reason = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
            raise ConfigError(
                f"job.imports: {name!r} cannot be imported ({reason}); name a module that is installed, or lies below "
                f"the folder where the command runs, {Path.cwd()}"
            ) from error


def imports_of(options: Sequence[tuple[str, list[str]]]) -> list[str]:
    """Return the value of `job.imports`, before other keys are read. options: of the command line, with their words.

    A value of a wrong type is left to the reader of all keys.
    """
    words = {name[2:].replace("-", "_"): words for name, words in options}
    for table, key in _KEYS:
        if f"{table}.{key}" in words:
            return words[f"{table}.{key}"]
    if name := words.get("job.config_file"):
        with suppress(ConfigError):
            for _, content in with_bases(found_or_preset(Path(name[0]), name[0])):
                for table, key in _KEYS:
                    settings = content.get(table)
                    value = settings.get(key) if isinstance(settings, dict) else None
                    if isinstance(value, str) and value:
                        return [value]
                    if isinstance(value, list):
                        return [item for item in value if isinstance(item, str)]
    return []
