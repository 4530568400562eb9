"""Laws of the program of a rank, whichever launcher starts it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.slow import slow
from trainer.commands.rank import set_connections

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
# As train.py does; the program is what torch has read when it is imported by it.
PROGRAM = """
import sys
from train import command_line

def program(arguments, launched):
    assert "torch" not in sys.modules, "torch has read its variables already"
    import os, torch
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "32", "CUDA reads it when it starts"
    print({name: os.environ[name] for name in %r if name in os.environ}, torch._C._accelerator_getAllocatorSettings())
    return 0

sys.exit(command_line(program))
"""
SET = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
CASES = [
    ({}, SET, "expandable_segments:True"),
    *(({name: "max_split_size_mb:512"}, {name: "max_split_size_mb:512"}, None) for name in NAMES),
    *slow(({"PYTORCH_ALLOC_CONF": ""}, {"PYTORCH_ALLOC_CONF": ""}, "")),
]


@pytest.mark.parametrize(("variables", "wanted", "settings"), CASES, ids=str)
def test_the_allocator_of_a_rank_is_set_up_before_torch_is_imported(
    variables: dict[str, str], wanted: dict[str, str], settings: str | None
) -> None:
    """A setting of the user under any of its names stays. settings: the setting that torch reads without a GPU."""
    environment = {name: value for name, value in os.environ.items() if name not in NAMES} | variables
    environment.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM % (NAMES,)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip().startswith(str(wanted))
    assert settings is None or done.stdout.strip() == f"{wanted} {settings}".strip()


def test_each_stream_of_a_rank_has_a_queue_of_its_own_unless_the_user_set_their_number() -> None:
    environ: dict[str, str] = {}
    set_connections(environ)
    assert environ == {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    environ = {"CUDA_DEVICE_MAX_CONNECTIONS": "9"}
    set_connections(environ)
    assert environ == {"CUDA_DEVICE_MAX_CONNECTIONS": "9"}


# A thread of Python in PyTorch's code ends the interpreter as one of gloo's does that drops a tensor, but each time.
BUSY = """
import atexit, sys
from train import command_line

def program(arguments, launched):
    import threading, torch

    def add():
        tensor = torch.randn(100)
        while True:
            tensor + tensor

    threading.Thread(target=add, daemon=True).start()
    atexit.register(print, "exit functions have run")
    return 0

sys.exit(command_line(program))
"""


def test_a_rank_ends_while_threads_still_use_tensors() -> None:
    done = subprocess.run([sys.executable, "-c", BUSY], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "exit functions have run\n", "")


INTERRUPTED = """
import sys
from train import command_line

def program(arguments, launched):
    import atexit, time, torch
    atexit.register(time.sleep, 60)
    raise KeyboardInterrupt

sys.exit(command_line(program))
"""


def test_an_interrupted_rank_ends_at_once_with_its_code() -> None:
    """The end of the interpreter may wait for threads, and the launcher would kill the rank as one that hangs."""
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], cwd=ROOT, timeout=20, check=False)
    assert done.returncode == 130
