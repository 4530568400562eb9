"""Run the commands of docs/ that have an output below them, and replace the output by the present one.

python scripts/doc_outputs.py

In the pages below, an indented line that begins with `$ ` is a command for bash, in a folder without files of a user.
The lines after it, up to an empty one or the next command, are its standard output.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "docs" / "long_context.md",)
_BLOCK = re.compile(
    r"^(?P<indent> {4,})\$ (?P<command>(?:.*\\\n)*.*\n)(?P<output>(?:(?P=indent)(?!\$ ).*\n)*)", re.MULTILINE
)


def commands(text: str) -> list[str]:
    """Return the commands of a page that have an output below them, each in one line.

    Args:
        text: The page.
    """
    return [_one_line(match["command"]) for match in _BLOCK.finditer(text)]


def outputs(text: str) -> list[tuple[str, str]]:
    """Return the commands of a page that have an output below them, each with its output.

    Args:
        text: The page.
    """
    return [
        (_one_line(match["command"]), _without(match["indent"], match["output"])) for match in _BLOCK.finditer(text)
    ]


def page(text: str, run: Callable[[str], str]) -> str:
    """Return the page with the output that `run` returns for each command.

    Args:
        text: The page.
        run: Takes a command, and returns its output.
    """

    def block(match: re.Match) -> str:
        output = "".join(f"{match['indent']}{line}\n" for line in run(_one_line(match["command"])).splitlines())
        return f"{match['indent']}$ {match['command']}{output}"

    return _BLOCK.sub(block, text)


def run_here(command: str) -> str:
    """Return the standard output of a command, with the program of this checkout.

    Args:
        command: The command, for bash.

    Raises:
        SystemExit: The command failed.
    """
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)}
    shell = ["bash", "-o", "pipefail", "-c", command]
    with tempfile.TemporaryDirectory() as folder:
        result = subprocess.run(shell, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(f"{command}\nended with exit code {result.returncode}: {result.stderr}")
    return result.stdout


def _without(indent: str, output: str) -> str:
    return "".join(line.removeprefix(indent) for line in output.splitlines(keepends=True))


def _one_line(command: str) -> str:
    return re.sub(r"\\\n *", "", command).strip()


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(page(path.read_text(), run_here))
