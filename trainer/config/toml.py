"""Find and read TOML files, also presets of the program, such as `--job.config_file llama3_8b`."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer.config.errors import ConfigError, nearest
from trainer.config.values import shown, tomllib

_FOLDER = Path(__file__).resolve().parents[2] / "train_configs"


def found_or_preset(path: Path, name: str) -> Path:
    """Return the path if it exists, else the preset of this name; without one, the path.

    Args:
        path: The path.
        name: The words of the user. Only a name without a folder can be a preset, with or without .toml.
    """
    preset = _FOLDER / f"{name.removesuffix('.toml')}.toml"
    return (
        preset if not path.exists() and Path(name).name == name and preset.is_file() else path
    )


def missing_file_hint(path: Path) -> str:
    """Return which file to name instead of a missing configuration file.

    Args:
        path: The missing file.
    """
    names = [path.stem for path in _FOLDER.glob("*.toml")]
    presets = sorted(
        names, key=lambda name: [int(x) if x.isdigit() else x for x in re.split(r"(\d+)", name)]
    )
    beside = {file.stem: str(file) for file in sorted(path.parent.glob("*.toml"))}
    if near := nearest(path.stem, beside):
        return f"did you mean {beside[near]!r}?"
    if near := nearest(path.stem, presets):
        return f"did you mean {near!r}, which comes with the program?"
    return f"give a .toml file, or one that comes with the program: {', '.join(presets)}"


def load_toml(path: Path, asked: str = "") -> dict[str, Any]:
    """Return the content of one TOML file. A key `base` stays in it.

    Args:
        path: The file.
        asked: The setting that names the file, for messages; empty for the path alone.

    Raises:
        ConfigError: The file is missing, cannot be read, or is not TOML.
    """
    asked = asked or str(path)
    text = ""
    try:
        # some editors begin a file with a byte-order mark
        text = path.read_bytes().decode("utf-8-sig")
        return tomllib.loads(text)
    except FileNotFoundError:
        raise ConfigError(f"{asked} does not exist; {missing_file_hint(path)}") from None
    except tomllib.TOMLDecodeError as error:
        reason = str(error).replace(
            "at end of document", f"at line {len(text.splitlines())}, the end"
        )
        raise ConfigError(
            f'{path} is not valid TOML: {reason}; a line is key = value, strings in "quotes"'
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not valid TOML: byte {error.start} is not UTF-8; save it as UTF-8"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{asked} cannot be read ({getattr(error, 'strerror', None) or error}); give a readable "
            ".toml file"
        ) from None


def with_bases(path: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield a file and its content, then its base and the content of the base, and so on. No content has a key `base`.

    Args:
        path: The file.

    Raises:
        ConfigError: As `load_toml`; or a base is no file name, or bases form a circle.
    """
    chain = ()
    while True:
        if path.resolve() in map(Path.resolve, chain):
            circle = " -> ".join(map(str, (*chain, path)))
            raise ConfigError(
                f"base = {path.name!r} (in {chain[-1]}) closes a circle, {circle}; remove one base"
            )
        source = f"base = {str(path)!r} (in {chain[-1]})" if chain else ""
        content = load_toml(path, source or f"job.config_file = {str(path)!r}")
        base = content.pop("base", None)
        if base is not None and not isinstance(base, str):
            raise ConfigError(
                f'base = {shown(base)} (in {path}) must be one file name, such as base = "llama3_8b.toml"'
            )
        yield path, content
        if base is None:
            return
        chain = (*chain, path)
        path = found_or_preset(path.parent / base, base)
