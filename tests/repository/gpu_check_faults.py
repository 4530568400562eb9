"""Blocks that go wrong, for test_gpu_check.py. Torch-free, so that each starts at once."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from scripts.gpu_blocks.block import Check, Skipped


def passes(check: Check) -> None:
    check.note(device=check.device, infinite=float("inf"), nested={"a": (1, 2.5)})
    check.headline("all is well")
    check.expect(check.left() > 0, "no time was left")


def leaves_files(check: Check) -> None:
    check.file("small").write_text("10 letters")
    check.file("large").write_text("11 letters.")


def expects(check: Check) -> None:
    check.expect(False, "2 is not 3")
    check.expect(True, "not a problem")


def raises(check: Check) -> None:
    check.note(before=1)
    raise RuntimeError("a planted error")


def skips(check: Check) -> None:
    raise Skipped("nothing to do here")


def hangs(check: Check) -> None:
    """Hang with a child process; note the child's id and the block's folder."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    check.note(child=child.pid, folder=os.environ["TMPDIR"])
    time.sleep(600)


def dies(check: Check) -> None:
    check.note(before=1)
    os.kill(os.getpid(), signal.SIGSEGV)


def leaves_a_process(check: Check) -> None:
    hidden = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    check.note(child=hidden.pid, exists=Path(os.environ["TMPDIR"]).is_dir())
