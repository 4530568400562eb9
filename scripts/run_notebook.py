"""Run a notebook and store it with its outputs.

    python scripts/run_notebook.py examples/context_parallel.ipynb
    python scripts/run_notebook.py examples/context_parallel.ipynb --steps 2 --output short.ipynb

The stored notebook has no time stamps, no paths of this machine and no versions of it.
"""

import argparse
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]
_CELL_SECONDS = 600
_STEPS = re.compile(r"(?m)^STEPS = \d+$")


def executed(notebook: Any, *, steps: int | None = None) -> Any:
    """Run all cells in the repository's root.

    Args:
        notebook: The notebook, of nbformat 4.
        steps: The value for its `STEPS`; None for the notebook's own value.

    Returns:
        The notebook with the outputs of its cells.

    Raises:
        SystemExit: `steps` has a value, and no cell sets `STEPS`.
        nbclient.exceptions.CellExecutionError: A cell failed.
    """
    if steps is not None:
        cells = [cell for cell in notebook.cells if cell.cell_type == "code" and _STEPS.search(cell.source)]
        if not cells:
            raise SystemExit("error: --steps needs a cell with a line such as STEPS = 30")
        cells[0].source = _STEPS.sub(f"STEPS = {steps}", cells[0].source)
    resources = {"metadata": {"path": str(ROOT)}}
    client = NotebookClient(notebook, timeout=_CELL_SECONDS, resources=resources, record_timing=False)
    client.execute()
    notebook.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    return notebook


def places(notebook: Any) -> list[str]:
    """Return the paths of this machine that a notebook has: the repository, the home folder, temporary files.

    Args:
        notebook: The notebook.
    """
    text = json.dumps(notebook)
    known = {str(ROOT), str(Path.home()), str(Path(sys.executable).parent), tempfile.gettempdir()}
    return sorted(place for place in known if re.search(rf"{re.escape(place)}\b", text))


def main(argv: list[str] | None = None) -> int:
    """Run a notebook, and write it.

    Args:
        argv: The words of the command line; None for the words of this process.

    Returns:
        The exit code.

    Raises:
        SystemExit: The outputs have a path of this machine.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--steps", type=int, help="training steps of each run, for a short form")
    parser.add_argument("--output", type=Path, help="the file to write (default: the notebook itself)")
    options = parser.parse_args(argv)
    notebook = executed(nbformat.read(options.notebook, as_version=4), steps=options.steps)
    if machine := places(notebook):
        raise SystemExit(f"error: the outputs have {', '.join(machine)}; print no paths in a notebook")
    output = options.output or options.notebook
    nbformat.write(notebook, output)
    print(f"{output} has the outputs of {sum(cell.cell_type == 'code' for cell in notebook.cells)} cells")
    return 0


if __name__ == "__main__":
    sys.exit(main())
