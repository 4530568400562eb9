"""Log lines on the console: coloured in a terminal, plain in a file, from the ranks in LOG_RANK."""

import logging
import os
import sys

from rich.console import Console
from rich.text import Text

logger = logging.getLogger("trainer")
_COLORS = {logging.WARNING: "yellow", logging.ERROR: "bold red"}


class _ConsoleHandler(logging.Handler):
    def __init__(self, console: Console, rank: int) -> None:
        super().__init__()
        self.console = console
        self.prefix = f"[rank {rank}] " if rank else ""  # rank 0 logs for the job

    def emit(self, record: logging.LogRecord) -> None:
        style = _COLORS.get(record.levelno, getattr(record, "style", ""))
        # soft_wrap: a line stays a line in a narrow terminal
        self.console.print(Text(self.prefix + record.getMessage(), style=style), soft_wrap=True)
        self.console.file.flush()


def set_up_logging(rank: int, *, color: bool) -> None:
    """Send log lines to stdout: all lines of the ranks in LOG_RANK (default 0), warnings of the others."""
    spoken = os.environ.get("LOG_RANK", "0").split(",")
    console = Console(file=sys.stdout, no_color=not color, highlight=False)
    logger.handlers = [_ConsoleHandler(console, rank)]
    logger.setLevel(logging.INFO if str(rank) in spoken else logging.WARNING)
    logger.propagate = False
