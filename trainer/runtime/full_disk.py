"""Say in words that a disk is full, from an error of writing. Torch-free."""

import errno
import shutil
from pathlib import Path

_REASONS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the quota of this user is used up",
    errno.EFBIG: "a file has reached the largest size that this user may write (ulimit -f)",
}


def os_error_of(error: BaseException) -> OSError | None:
    """Return the operating system's error that an error is, or was raised from or after: PyTorch's own hides it."""
    seen, link = set(), error
    while link is not None and id(link) not in seen:
        if isinstance(link, OSError) and link.errno:
            return link
        seen.add(id(link))
        link = link.__cause__ or link.__context__
    return None


def full_disk(error: BaseException, folder: Path, needed: int = 0) -> str:
    """Return why nothing more can be written to the folder, such as `the disk is full (2 MiB are free)`; else "".

    needed: bytes that are to be written, if they are known.
    """
    found = os_error_of(error)
    if found is None or found.errno not in _REASONS:
        return ""
    numbers = [f"about {_size(needed)} are needed"] if needed else []
    if found.errno == errno.ENOSPC:
        numbers.insert(0, f"{_size(shutil.disk_usage(folder).free)} are free")
    return _REASONS[found.errno] + (f" ({', '.join(numbers)})" if numbers else "")


def _size(number: int) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if number >= unit:
            return f"{number / unit:.1f} {name}"
    return f"{number / 1024:.0f} KiB"
