"""A rank ends with its launcher: without a launcher, nobody would end the rank when another rank fails.

Ranks have sessions of their own, so they survive when the launcher is killed (`kill -9`, or no memory is left). On
Linux, a rank asks the kernel for a signal at its parent's death. It also watches the launcher's process. The launcher
may not be the parent (a wrapper script stands between them), or may have ended before the rank could ask.
"""

import ctypes
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Mapping

_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of <linux/prctl.h>
_POLL_SECONDS = 0.5


def launcher_of(
    arguments: list[str], variables: Mapping[str, str]
) -> tuple[int | None, list[str]]:
    """Return the process id of the launcher that started this rank, and the other arguments.

    Our launcher passes `--launched-by PID` first; torchrun is the parent. None instead of an id: this process has no
    launcher, and may outlive its shell.

    Args:
        arguments: The command line.
        variables: Environment variables.
    """
    if arguments[:1] == ["--launched-by"]:
        return int(arguments[1]), arguments[2:]
    if "TORCHELASTIC_RUN_ID" not in variables:
        return None, arguments
    return os.getppid(), arguments


def end_with(launcher: int) -> None:
    """Start a thread that kills this process as soon as the process `launcher` has ended, or has ended already.

    Args:
        launcher: Process id.
    """
    if sys.platform == "linux" and os.getppid() == launcher:
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    threading.Thread(
        target=_watch, args=(launcher,), name="launcher_watch", daemon=True
    ).start()


def _watch(launcher: int) -> None:
    _wait_for_end(launcher)
    # kill it, because peers or the store may be gone too
    os.kill(os.getpid(), signal.SIGKILL)


def _wait_for_end(pid: int) -> None:
    """Wait until the process has ended, whether its parent has collected it or not."""
    try:
        ended = select.poll()
        ended.register(os.pidfd_open(pid), select.POLLIN)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):
        # not Linux, Linux before 5.3, or a container that forbids it
        is_child = os.getppid() == pid
        while _exists(pid) and (not is_child or os.getppid() == pid):
            time.sleep(_POLL_SECONDS)
        return
    ended.poll()


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True
