"""The commands of the documentation: from the code of Markdown, from the comments of other files."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from scripts.doc_outputs import outputs

ROOT = Path(__file__).resolve().parents[3]
README = ROOT / "README.md"
# A command of two pages is run with the first one. The README is the last of them: its commands start cold.
PAGES = [
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.toml")),
    *sorted((ROOT / "train_configs").glob("*.toml")),
    ROOT / "multinode_trainer.slurm",
    ROOT / "CONTRIBUTING.md",
    README,
]
_PROGRAMS = [
    *("lct", "curl", "make", "python", "python3", "torchrun", "pip", "git", "tensorboard", "./run_llama_train.sh"),
    *("sbatch", "scancel", "kill", "export", "source", "mkdir", "cp", "bash", "docker"),
]
_PROGRAM = rf"({'|'.join(map(re.escape, _PROGRAMS))}|\.venv/bin/\S+)(\s|$)"
_COMMAND = re.compile(rf"(\$ )?([A-Z_]+=\S+ )*({_PROGRAM}|for \w+ in [^:]*;)")


@dataclass(frozen=True)
class Command:
    """A command in one line, without its `$ `. shown: the output below it; None if the page shows none."""

    text: str
    page: str
    shown: str | None


def group(page: str) -> str:
    """Return the pages whose commands share a copy one after another: one page, all presets, all examples."""
    folder = page.partition("/")[0]
    return page if folder == "docs" or "/" not in page else folder


def commands(path: Path) -> Iterator[str]:
    """Yield the commands of a page, each in one line."""
    lines, fence = iter(path.read_text().splitlines()), ""
    for line in lines:
        if path.suffix != ".md":
            code = line.removeprefix("#").strip() if line.startswith("#") else ""
        elif line.startswith("```"):
            fence, code = "" if fence else line, ""
        else:
            code = line.strip() if fence == "```bash" or (not fence and line.startswith("    ")) else ""
        if not _COMMAND.match(code):
            continue
        while code.endswith("\\") or _quote_is_open(code):
            joined = "\n" if _quote_is_open(code.removesuffix("\\")) else ""
            code = code.removesuffix("\\") + joined + next(lines).lstrip("# ")
        yield re.sub(r"\s+# .*", "", code).strip()


def _quote_is_open(code: str) -> bool:
    try:
        shlex.split(code, comments=True)
    except ValueError:
        return True
    return False


def all_commands() -> dict[str, Command]:
    """Return every command by its text, in the order of the pages."""
    commands_by_text: dict[str, Command] = {}
    for path in PAGES:
        page = str(path.relative_to(ROOT))
        shown = {_words(command): output for command, output in outputs(path.read_text())}
        for command in commands(path):
            text = command.removeprefix("$ ")
            output = shown[_words(text)] if command.startswith("$ ") else None
            commands_by_text.setdefault(text, Command(text, page, output))
    return commands_by_text


def _words(command: str) -> str:
    return "".join(command.split())
