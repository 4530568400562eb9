"""One block of `gpu_check.py` in this process: python -m scripts.gpu_blocks.child MODULE:FUNCTION DEVICE FILE LIMIT."""

import importlib
import sys
from pathlib import Path

from scripts.gpu_blocks.block import Check, Skipped


def main(entry: str, device: str, path: str, limit: str) -> None:
    """Run one block.

    Args:
        entry: `module:function`; the function takes a `Check`.
        device: "cuda" or "cpu".
        path: The file of the notes.
        limit: Seconds until the process is killed.
    """
    check = Check(device, Path(path), float(limit))
    module, _, function = entry.partition(":")
    try:
        getattr(importlib.import_module(module), function)(check)
    except Skipped as why:
        check.end(skipped=str(why))
    else:
        check.end()


if __name__ == "__main__":
    main(*sys.argv[1:])
