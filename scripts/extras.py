"""Print what each extra of this package adds to an installation, in megabytes, as the table of README.md.

    python scripts/extras.py

It counts the installed files of the packages that the extra needs and the program alone does not. An extra with a
package that is not installed here is left out.
"""

import importlib.metadata
import sys
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a clone

from trainer.config.toml import tomllib

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def needed(requirements: Iterable[str], extra: str = "") -> set[str]:
    """Return the names of all packages that these requirements bring.

    Args:
        requirements: Requirements, as a package lists them.
        extra: The extra of that package that is asked for.

    Raises:
        PackageNotFoundError: One of them is not installed.
    """
    names: set[str] = set()
    for text in requirements:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        names.add(name)
        theirs = importlib.metadata.requires(name) or []
        for option in ("", *requirement.extras):
            names |= needed(theirs, option)
    return names


def megabytes(names: Iterable[str]) -> float:
    """Return the size of the installed files of packages.

    Args:
        names: The names of the packages.
    """
    files = (Path(file.locate()) for name in names for file in importlib.metadata.files(name) or [])
    return sum(file.stat().st_size for file in files if file.is_file()) / 1e6


def sizes() -> dict[str, float]:
    """Return the megabytes that each extra adds, without the extra for development."""
    base = needed(["torch", *PROJECT["dependencies"]])
    added = {}
    for extra, requirements in PROJECT["optional-dependencies"].items():
        try:
            added[extra] = megabytes(needed(requirements) - base)
        except importlib.metadata.PackageNotFoundError as error:
            print(f"{extra} is left out: {error.name} is not installed", file=sys.stderr)
    return {extra: size for extra, size in added.items() if extra != "dev"}


if __name__ == "__main__":
    for extra, size in sizes().items():
        print(f"| `{extra}` | {size:,.0f} |")
