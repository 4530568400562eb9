"""The configurations that come with the program, which can be given by name: `--job.config_file llama3_8b`."""

import re
from pathlib import Path

from trainer.config.spelling import nearest

_FOLDER = Path(__file__).resolve().parents[2] / "train_configs"


def preset_names() -> list[str]:
    """Return the names of all presets, the smallest model first."""
    names = [path.stem for path in _FOLDER.glob("*.toml")]
    return sorted(names, key=lambda name: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)])


def found_or_preset(path: Path, name: str) -> Path:
    """Return `path` if it exists, else the preset of this name, with or without .toml; without one, `path`.

    name: what the user wrote; only a name without a folder can be a preset.
    """
    preset = _FOLDER / f"{name.removesuffix('.toml')}.toml"
    return preset if not path.exists() and Path(name).name == name and preset.is_file() else path


def missing_file_hint(path: Path) -> str:
    """Return what to give instead of a configuration file that does not exist."""
    presets = preset_names()
    beside = {file.stem: str(file) for file in sorted(path.parent.glob("*.toml"))} if path.parent.is_dir() else {}
    near = nearest(path.stem, beside)
    if near is not None:
        return f"did you mean {beside[near]!r}?"
    near = nearest(path.stem, presets)
    if near is not None:
        return f"did you mean {near!r}, which comes with the program?"
    return f"give a .toml file, or one that comes with the program: {', '.join(presets)}"
