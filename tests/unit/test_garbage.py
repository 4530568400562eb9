"""Law: on a CPU, memory that is free again is not given back to the system and mapped again."""

import platform
import subprocess
import sys

import pytest

_CODE = """
import resource, sys, torch
from trainer.runtime.garbage import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
def use():
    for _ in range(10):
        x = torch.empty(10_000_000).fill_(1.0)
        y = x * 2
        del x, y
use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(mode: str) -> int:
    """Of using 800 MB a second time, in a process of its own."""
    command = [sys.executable, "-c", _CODE, mode]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is glibc's")
def test_freed_memory_is_kept() -> None:
    assert 4 * page_faults("keep") < page_faults("leave")
