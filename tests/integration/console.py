"""What a run prints elsewhere than on a terminal: lines that begin with the time of day."""

import re

_TIME = re.compile(r"\d\d:\d\d:\d\d ")


def lines_of(out: str) -> list[str]:
    """Return the lines without their time; every line must have one."""
    lines = out.splitlines()
    assert all(_TIME.match(line) for line in lines), out
    return [_TIME.sub("", line, count=1) for line in lines]
