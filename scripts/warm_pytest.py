"""Run pytest again and again, each time in a fork of a process that has imported packages and nothing of the tree.

A test session that starts cold needs 4 to 9 seconds for its imports, and its ranks need them again. Here both are warm:

    this process: imports packages; computes nothing, starts no thread
      |- fork: one session of pytest, in a process group of its own
           |- fork: the server that forks the ranks, made before pytest has threads

`WarmPytest` is the other end: it starts this file and sends one request for each session.
"""

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

# Packages that the tests import. Packages that start threads are left out: pyarrow, and whatever imports it.
_PACKAGES = (
    *("pytest", "_pytest.assertion.rewrite", "hypothesis", "xdist", "torch", "torch.distributed.fsdp"),
    *("torch.distributed.tensor.parallel", "torch.distributed.tensor.experimental", "torch.distributed._tools"),
    *("torch.distributed.checkpoint", "torch.distributed.pipelining", "torch._dynamo.testing"),
    *("torch._inductor.compile_fx", "torch.utils.tensorboard", "torchdata.stateful_dataloader", "transformers"),
    *("tokenizers", "tiktoken", "jinja2", "tomli_w"),
)
_VARIABLES = {
    "OPENBLAS_NUM_THREADS": "1",  # numpy would start its threads when it is imported
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # torch reads it when it is imported; the pool of ranks asks for the same
}
_OF_THE_TREE = ("longshard", "trainer", "lct_inference", "lct_planner", "lct_tools", "tests", "examples", "train")


class WarmPytest:
    """Sessions of pytest in one tree, one after another.

    Args:
        tree: the folder in which the sessions run; their imports come from there.
    """

    def __init__(self, tree: Path) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="warm_")
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve())],
            cwd=tree,
            env=os.environ | _VARIABLES,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, arguments: list[str], seconds: float) -> tuple[int | None, str]:
        """Run one session.

        Args:
            arguments: of pytest.
            seconds: the time limit. All processes of a session that takes longer are killed.

        Returns:
            pytest's exit code, None if the session did not end in time, and what it printed.

        Raises:
            RuntimeError: the warm process has ended.
        """
        with tempfile.TemporaryDirectory(dir=self._temporary.name) as folder:
            request = {"arguments": arguments, "seconds": seconds, "folder": folder}
            print(json.dumps(request), file=self._process.stdin, flush=True)
            answer = self._process.stdout.readline()
            if not answer:
                raise RuntimeError(f"the warm process has ended: exit code {self._process.wait()}")
            code = json.loads(answer)
            return code, (Path(folder) / "printed").read_text(errors="replace")

    def close(self) -> None:
        """End the warm process."""
        self._process.stdin.close()
        self._process.wait()
        self._temporary.cleanup()


def _serve() -> None:
    sys.path[:] = [entry for entry in sys.path if entry != str(Path(__file__).resolve().parent)]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for package in _PACKAGES:
        with contextlib.suppress(ImportError):
            importlib.import_module(package)
    read = [name for name in sys.modules if name.partition(".")[0] in _OF_THE_TREE]
    threads = len(os.listdir("/proc/self/task"))
    if read or threads > 1:
        raise RuntimeError(f"a warm process must have one thread and nothing of the tree, not {threads} and {read}")
    gc.freeze()  # a collection in a fork would copy all these pages
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(_session(**request)), file=answers, flush=True)


def _session(arguments: list[str], seconds: float, folder: str) -> int | None:
    process = os.fork()
    if process == 0:
        code = 70  # no exit code of pytest
        try:
            code = _pytest(arguments, folder)
        finally:
            os._exit(code)
    ended = os.pidfd_open(process)
    try:
        in_time = bool(select.select([ended], [], [], seconds)[0])
    finally:
        os.close(ended)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)  # the session, or ranks and commands that it has left
    status = os.waitpid(process, 0)[1]
    return os.waitstatus_to_exitcode(status) if in_time else None


def _pytest(arguments: list[str], folder: str) -> int:
    os.setpgid(0, 0)
    printed = os.open(os.path.join(folder, "printed"), os.O_WRONLY | os.O_CREAT)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (printed, 1), (printed, 2)):
        os.dup2(source, target)
    os.environ["TMPDIR"] = folder
    tempfile.tempdir = None
    sys.path.insert(0, os.getcwd())
    sys.argv = ["pytest", *arguments]
    del sys.modules["__main__"].__file__  # else each rank would run this file
    _fork_rank_server()
    import pytest

    code = int(pytest.main(arguments))
    sys.stdout.flush()
    return code


def _fork_rank_server() -> None:
    """Fork now the process that becomes multiprocessing's fork server, if a test asks for one.

    multiprocessing starts a new Python for it. The process here waits until then for the same command, and runs it.
    """
    from multiprocessing import util

    ours, theirs = socket.socketpair()
    process = os.fork()
    if process == 0:
        ours.close()
        _become_rank_server(theirs)
        os._exit(0)
    theirs.close()
    start_python = util.spawnv_passfds
    waiting = [process]

    def start(path: object, args: list, descriptors: list[int]) -> int:
        command = args[-1]
        numbers = ", ".join(map(str, descriptors))
        if not waiting or f"forkserver import main; main({numbers}," not in command:
            return start_python(path, args, descriptors)
        message = json.dumps({"command": command, "numbers": numbers, "variables": dict(os.environ)})
        socket.send_fds(ours, [message.encode()], descriptors)
        return waiting.pop()

    util.spawnv_passfds = start


def _become_rank_server(connection: socket.socket) -> None:
    message, descriptors, _, _ = socket.recv_fds(connection, 2**20, 16)
    if not message:
        return
    connection.close()
    request = json.loads(message)
    os.environ.clear()
    os.environ.update(request["variables"])
    numbers = ", ".join(map(str, descriptors))  # the same pipes and sockets have other numbers here
    exec(request["command"].replace(f"main({request['numbers']},", f"main({numbers},"), {})


if __name__ == "__main__":
    _serve()
