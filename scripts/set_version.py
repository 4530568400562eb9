"""Write the version of the next release into the files that have it, or check that they agree: docs/release.md.

    python scripts/set_version.py 0.10.0            # trainer/__init__.py, CITATION.cff and CHANGELOG.md
    python scripts/set_version.py --check 0.10.0    # exit code 1 if one of them has another version

A version that a file cannot take changes no file.
"""

import argparse
import datetime
import re
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OPEN = "## Not released\n"
PLACES = {
    "trainer/__init__.py": r'(?m)^(__version__ = ")[^"]+',
    "CITATION.cff": r"(?m)^(version: ).+",
}
"""Files with the version, and what stands before and in its place."""


def write(version: str, root: Path) -> None:
    """Write a version. The changes that are not released become the changes of this version.

    Args:
        version: The version, such as 0.10.0.
        root: The folder of the repository.

    Raises:
        ValueError: A file has no place for the version, or CHANGELOG.md has this version already.
    """
    texts = {}
    for name, place in PLACES.items():
        old = (root / name).read_text(encoding="utf-8")
        texts[name], count = re.subn(place, rf"\g<1>{version}", old)
        if count != 1:
            raise ValueError(f"{name} has {count} lines with the version; it must have one")
    changes = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    if OPEN not in changes or f"\n## {version} " in changes:
        raise ValueError(f"CHANGELOG.md must have a heading {OPEN.strip()!r} and no heading of {version}")
    today = datetime.datetime.now(datetime.timezone.utc).date()
    texts["CHANGELOG.md"] = changes.replace(OPEN, f"{OPEN}\n## {version} ({today})\n", 1)
    for name, text in texts.items():
        (root / name).write_text(text, encoding="utf-8")


def differences(version: str, root: Path) -> list[str]:
    """Return one sentence for each file that does not have a version.

    Args:
        version: The version, such as 0.10.0.
        root: The folder of the repository.
    """
    places = PLACES | {"CHANGELOG.md": r"(?m)^(## )[0-9]\S*"}
    sentences = []
    for name, place in places.items():
        match = re.search(place, (root / name).read_text(encoding="utf-8"))
        version_there = match.group().removeprefix(match[1]) if match else "no version"
        if version_there != version:
            sentences.append(f"{name} has {version_there}, not {version}; run python scripts/set_version.py {version}")
    return sentences


def main(argv: Sequence[str] | None = None) -> int:
    """Write or check a version.

    Args:
        argv: The words of the command line; None for the words of this process.

    Returns:
        The exit code: 1 if a file has another version or cannot be changed.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", help="three numbers, such as 0.10.0")
    parser.add_argument("--check", action="store_true", help="compare, and change nothing")
    options = parser.parse_args(argv)
    if not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", options.version):
        parser.error(f"{options.version!r} is not a version; write three numbers, such as 0.10.0 or 0.10.0rc1")
    if options.check:
        sentences = differences(options.version, ROOT)
        print("\n".join(sentences) or f"all files have version {options.version}")
        return int(bool(sentences))
    try:
        write(options.version, ROOT)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
