"""A rank without torch, so that the launcher's behaviour is seen in a second: `FOLDER WHAT...`, one word for each rank.

`exit-N` ends at once with that code; `wait` ends with 0 after a signal (not SIGUSR1), or when the file `done` is in
the folder; `print` prints a word and waits; `hang` ignores signals; `leave` ends as a rank that lost its peers, when
another one has been killed.
"""

import faulthandler
import os
import signal
import sys
import time
from pathlib import Path

from trainer.runtime.launcher_watch import end_with, launcher_of
from trainer.runtime.rank_processes import LOST_PEERS


def rank_process() -> int:
    launcher, (folder, *words) = launcher_of(sys.argv[1:], os.environ)
    end_with(launcher)
    faulthandler.register(signal.SIGUSR1)
    rank = int(os.environ["RANK"])
    action, stopped = words[rank], []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2):
        signal.signal(number, lambda number, _: stopped.append(number) if action != "hang" else None)
    (Path(folder) / f"rank-{rank}").write_text(str(os.getpid()))
    if action.startswith("exit-"):
        return int(action.removeprefix("exit-"))
    if action == "print":
        print("a word", end="")
    while not stopped and not (Path(folder) / "done").exists():
        time.sleep(0.02)
        if action == "leave" and (Path(folder) / "leave").exists():
            return LOST_PEERS
    return 0


if __name__ == "__main__":
    sys.exit(rank_process())
