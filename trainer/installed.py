"""Report missing packages of a clone in one sentence. Only the standard library is imported."""

import sys
from importlib.util import find_spec

_EVERY_COMMAND = ("numpy", "safetensors", "tomllib" if sys.version_info >= (3, 11) else "tomli")
_TRAINING = ("torch", "tiktoken")


def check_installed(*, training: bool) -> None:
    """End the process with exit code 2 and a message on stderr if a package is missing.

    Args:
        training: Also check the packages that only training needs.
    """
    missing = [
        name for name in (*_EVERY_COMMAND, *_TRAINING * training) if find_spec(name) is None
    ]
    if missing:
        print(
            f"error: {sys.executable} lacks {' '.join(missing)}; run `make train` once, which installs them into "
            ".venv, or `pip install -r requirements.txt` for this Python",
            file=sys.stderr,
        )
        sys.exit(2)
