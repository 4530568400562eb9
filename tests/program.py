"""The files of the program: of its packages, and of the rank that torchrun starts."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("longshard", "trainer", "lct_inference", "lct_planner", "lct_tools")


def files_of_program() -> list[Path]:
    """Return all Python files of the program."""
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return [*files, ROOT / "train.py"]
