"""Read one TOML file, with a sentence for each way in which that fails."""

import sys
from pathlib import Path
from typing import Any

from trainer.config.errors import ConfigError
from trainer.config.presets import missing_file_hint

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def load_toml(path: Path, chain: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Return the content of a TOML file.

    chain: the files that led here by their key `base`.

    Raises:
        ConfigError: the file is missing, cannot be read, or is not TOML.
    """
    asked = f"base = {str(path)!r} (in {chain[-1]})" if chain else f"job.config_file = {str(path)!r}"
    text = ""
    try:
        text = path.read_bytes().decode("utf-8-sig")  # some editors begin a file with a byte-order mark
        return tomllib.loads(text)
    except FileNotFoundError:
        raise ConfigError(f"{asked} does not exist; {missing_file_hint(path)}") from None
    except tomllib.TOMLDecodeError as error:
        reason = str(error).replace("at end of document", f"at line {len(text.splitlines())}, the end")
        raise ConfigError(f'{path} is not valid TOML: {reason}; a line is key = value, strings in "quotes"') from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: byte {error.start} is not UTF-8; save it as UTF-8") from None
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{asked} cannot be read ({reason}); give a readable .toml file") from None
