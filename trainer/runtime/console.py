"""Log lines on the console: coloured in a terminal, plain and with the time of day elsewhere. Torch-free.

A terminal also has a last line that changes: why the run waits, or the step that it is in.

State of the process: The level of this program's logger, for the run.
"""

import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from textwrap import TextWrapper, wrap

logger = logging.getLogger("trainer")
TOPIC = 13
"""Columns of a topic, see `paragraphs`."""
_BOLD, _DIM, _PLAIN = "\x1b[1m", "\x1b[2m", "\x1b[0m"
_COLORS = {logging.WARNING: "\x1b[33m", logging.ERROR: "\x1b[1;31m"}
_NAMES = r"(?<=[\d.) ])(tok/s|mfu|GiB|MiB|s)\b|\b(step|loss|max|grad|lr|eta)\b"
_ERASE = "\r\x1b[2K"

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def escaped(text: str) -> str:
    """Return a text of data or of a model with control characters escaped, except the new line and the tab.

    Args:
        text: The text.
    """
    return _CONTROLS.sub(lambda match: repr(match[0])[1:-1], text)


def for_terminal(text: str) -> str:
    """Return a text for stdout. On a terminal it is escaped, because control characters could change the terminal.

    Args:
        text: The text.
    """
    return escaped(text) if sys.stdout.isatty() else text


class _Lines(logging.Handler):
    """Elsewhere than on a terminal: plain lines with the time of day."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.stream = sys.stdout
        self.prefix = f"[rank {rank}] " if rank else ""  # rank 0 logs for the job

    def emit(self, record: logging.LogRecord) -> None:
        if not getattr(record, "terminal_only", False):
            now = time.strftime("%H:%M:%S")
            message = f"{self.prefix}{record.getMessage()}"
            self.put("".join(f"{now} {line}\n" for line in message.splitlines()))

    def put(self, text: str) -> None:
        """Write at once."""
        self.stream.write(text)
        self.stream.flush()


class _Terminal(_Lines):
    """On a terminal: lines of its width, in colours if they are wanted, and a last line that changes."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.live = ""
        self.color = "NO_COLOR" not in os.environ

    def emit(self, record: logging.LogRecord) -> None:
        message = f"{self.prefix}{record.getMessage()}"
        width = shutil.get_terminal_size().columns
        if getattr(record, "live", False):
            self.live = message.splitlines()[0][: width - 1]
            self.put(f"{_ERASE}{self.live}")
            return
        self.erase()  # the next step shows it again
        # Break lines between words, and indent the next ones. A path is never broken.
        how = {
            "subsequent_indent": "    ",
            "break_long_words": False,
            "break_on_hyphens": False,
        }
        lines = (
            wrap(line, width, **how) if len(line) > width else [line]
            for line in message.splitlines()
        )
        text = "".join(f"{part}\n" for parts in lines for part in parts)
        self.put(_colored(text, record.levelno) if self.color else text)

    def erase(self) -> None:
        """Erase the last line of the terminal, if it is one that changes."""
        if self.live:
            self.live = ""
            self.put(_ERASE)


def line_width() -> int:
    """Return the number of columns of the terminal on stdout, at most 100; 100 if stdout is no terminal."""
    return min(shutil.get_terminal_size().columns, 100) if sys.stdout.isatty() else 100


def paragraphs(topics: Iterable[tuple[str, str]], width: int) -> str:
    """Return topics and texts in two columns.

    If a topic equals the one before, its column stays empty. A topic with an empty text is left out.

    Args:
        topics: Pairs of a topic and a text.
        width: Number of characters of a line.
    """
    wrapped = TextWrapper(
        max(width, 2 * TOPIC) - TOPIC, break_on_hyphens=False, break_long_words=False
    ).wrap
    lines = []
    before = ""
    for topic, text in topics:
        for line in wrapped(text):
            lines.append(f"{topic if topic != before else '':{TOPIC}}{line}")
            before = topic
    return "\n".join(lines)


def _colored(text: str, level: int) -> str:
    """Return the text in the colour of its level; in the line of a step names are dim, and the loss is bold."""
    if level in _COLORS:
        return f"{_COLORS[level]}{text}{_PLAIN}"
    if "  loss " in text:
        text = re.sub(r"(?<=loss )[\d.]+", f"{_BOLD}\\g<0>{_PLAIN}", text)
        text = re.sub(_NAMES, f"{_DIM}\\g<0>{_PLAIN}", text)
    return text


def set_up_logging(rank: int) -> None:
    """Send log lines of `trainer` and `longshard` to stdout: all of the ranks in LOG_RANK (default 0), else warnings.

    Lines on a terminal have colours, unless the variable NO_COLOR is set (https://no-color.org).

    Args:
        rank: Number of this rank.
    """
    logging_ranks = [word.strip() for word in os.environ.get("LOG_RANK", "0").split(",")]
    handler = _Terminal(rank) if sys.stdout.isatty() else _Lines(rank)
    for shown in (logger, logging.getLogger("longshard")):
        shown.handlers = [handler]
        shown.setLevel(logging.INFO if str(rank) in logging_ranks else logging.WARNING)
        shown.propagate = False


def say_waiting(reason: str) -> None:
    """Show the reason of a longer wait: in the last line of a terminal, elsewhere in a line.

    Args:
        reason: What the program does meanwhile.
    """
    logger.info(f"{reason} ...", extra={"live": True})


def show_progress(text: str) -> None:
    """Show the progress of the run, in the last line of a terminal only.

    Args:
        text: The progress.
    """
    logger.info(text, extra={"live": True, "terminal_only": True})


def report(line: str) -> None:
    """Print a line on stderr. It replaces a terminal's last line if that line changes.

    Args:
        line: The line.
    """
    print(f"{_ERASE if sys.stderr.isatty() else ''}{line}", file=sys.stderr, flush=True)


def end_live_line() -> None:
    """Erase the changing last line of a terminal, before other code writes there."""
    for handler in logger.handlers:
        if isinstance(handler, _Terminal):
            handler.erase()


def program() -> str:
    """Return how a user calls `lct` here: by its name, by the path of its file, or as a module."""
    beside = Path(sys.executable).with_name("lct")
    if shutil.which("lct") == str(beside):
        return "lct"
    if beside.is_file():
        return os.path.relpath(beside) if beside.is_relative_to(Path.cwd()) else str(beside)
    return f"{sys.executable} -m trainer"
