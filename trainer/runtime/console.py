"""Log lines on the console: coloured in a terminal, plain and with the time of day elsewhere. Torch-free.

A terminal also has a last line that changes: what the run waits for, or the step that it is in.
"""

import logging
import os
import shutil
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

logger = logging.getLogger("trainer")
_COLORS = {logging.WARNING: "yellow", logging.ERROR: "bold red"}
_NAMES = r"(?<=[\d.) ])(tok/s|mfu|GiB|MiB|s)\b|\b(step|loss|max|grad|lr|eta)\b"
_PROGRESS = {"live": True, "terminal_only": True}
_WAIT = {"live": True}
_ERASE = "\r\x1b[2K"


class _ConsoleHandler(logging.Handler):
    def __init__(self, console: Console, rank: int) -> None:
        super().__init__()
        self.console = console
        self.prefix = f"[rank {rank}] " if rank else ""  # rank 0 logs for the job
        self.live = ""

    def emit(self, record: logging.LogRecord) -> None:
        message = self.prefix + record.getMessage()
        if not self.console.is_terminal:
            if not getattr(record, "terminal_only", False):
                now = time.strftime("%H:%M:%S")
                self._put("".join(f"{now} {line}\n" for line in message.splitlines()))
        elif getattr(record, "live", False):
            self.live = message.splitlines()[0][: self.console.width - 1]
            self._put(_ERASE + self.live)
        else:
            self.erase()  # the next step shows it again
            text = Text(message, style=_COLORS.get(record.levelno, ""))
            if "  loss " in message:
                text.highlight_regex(_NAMES, "dim")
                text.highlight_regex(r"(?<=loss )[\d.]+", "bold")
            self.console.print(text, soft_wrap=True)  # soft_wrap: a line stays a line in a narrow terminal
            self.console.file.flush()

    def erase(self) -> None:
        """Erase the last line of the terminal, if it is one that changes."""
        if self.live:
            self.live = ""
            self._put(_ERASE)

    def _put(self, text: str) -> None:
        self.console.file.write(text)
        self.console.file.flush()


def set_up_logging(rank: int, *, color: bool) -> None:
    """Send log lines to stdout: all lines of the ranks in LOG_RANK (default 0), warnings of the others."""
    spoken = [word.strip() for word in os.environ.get("LOG_RANK", "0").split(",")]
    console = Console(file=sys.stdout, no_color=not color, highlight=False)
    logger.handlers = [_ConsoleHandler(console, rank)]
    logger.setLevel(logging.INFO if str(rank) in spoken else logging.WARNING)
    logger.propagate = False


def say_waiting(what: str) -> None:
    """Say what a longer wait is for: in the last line of a terminal, elsewhere in a line."""
    logger.info(f"{what} ...", extra=_WAIT)


def show_progress(text: str) -> None:
    """Show how far the run is, in the last line of a terminal only."""
    logger.info(text, extra=_PROGRESS)


def report(line: str) -> None:
    """Print a line on stderr, in the place of a terminal's last line if that changes."""
    print(f"{_ERASE if sys.stderr.isatty() else ''}{line}", file=sys.stderr, flush=True)


def end_live_line() -> None:
    """Erase the last line of a terminal, before something else writes there."""
    for handler in logger.handlers:
        if isinstance(handler, _ConsoleHandler):
            handler.erase()


def program() -> str:
    """Return how a user calls `lct` here: by its name, by the path of its file, or as a module."""
    beside = Path(sys.executable).with_name("lct")
    if shutil.which("lct") == str(beside):
        return "lct"
    if beside.is_file():
        return os.path.relpath(beside) if beside.is_relative_to(Path.cwd()) else str(beside)
    return f"{sys.executable} -m trainer"
