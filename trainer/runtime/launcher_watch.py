"""A rank ends with its launcher: without one, nobody would end it when another rank fails, or start it again.

`kill -9` of the launcher, or the kernel that ends it for want of memory, leaves its ranks running otherwise: they have
sessions of their own. The rank asks the kernel for a signal at its parent's death, where there is such a thing (Linux),
and watches the launcher's process beside it: that works for a launcher that is not the parent (a wrapper script between
them), or has ended before the rank could ask.
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


def launcher_of(arguments: list[str], variables: Mapping[str, str]) -> tuple[int | None, list[str]]:
    """Return the process id of the launcher that started this rank, and the arguments that are left.

    `--launched-by PID` comes first from our launcher; torchrun says nothing of itself, and is the parent. None: nobody
    launched this process, so that it may outlive its shell.
    """
    if arguments[:1] == ["--launched-by"]:
        return int(arguments[1]), arguments[2:]
    return os.getppid() if "TORCHELASTIC_RUN_ID" in variables else None, arguments


def end_with(launcher: int) -> None:
    """Kill this process as soon as the process `launcher` has ended, also if it has ended already."""
    if sys.platform == "linux" and os.getppid() == launcher:
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    threading.Thread(target=_watch, args=(launcher,), name="launcher_watch", daemon=True).start()


def _watch(launcher: int) -> None:
    _wait_for_end(launcher)
    os.kill(os.getpid(), signal.SIGKILL)  # not in good order: its peers, or a store, may be gone as well


def _wait_for_end(pid: int) -> None:
    """Return when the process has ended, collected by its parent or not."""
    try:
        ended = select.poll()
        ended.register(os.pidfd_open(pid), select.POLLIN)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):  # no Linux, one before 5.3, or a container that forbids it
        is_child = os.getppid() == pid
        while _exists(pid) and (not is_child or os.getppid() == pid):
            time.sleep(_POLL_SECONDS)
        return
    ended.poll()


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
