"""A process that has imported torch and the trainer, and forks a child for each command: `warm_client.py` asks for it.

    python -m tests.repository.documented.warm_server SOCKET

It has one thread and has computed nothing, so a child behaves like a fresh process that has imported these modules.
When its standard input ends, because the tests have ended, it kills its children and ends.
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path

# One thread; children get the variables of their commands. Libraries read these once, when they are imported.
os.environ.update({"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"})

_PRELOAD = [
    *("torch", "torch.distributed.run", "torch.distributed.fsdp", "torch.distributed.checkpoint", "torch.nn.attention"),
    *("torch._dynamo", "tensorboard", "torch.utils.tensorboard", "tiktoken", "tokenizers", "jinja2", "numpy"),
    *("trainer.trainer", "trainer.runtime.launch", "trainer.commands.rank", "lct_planner.tracing"),
]
_MOST_BYTES = 1 << 20
_PROGRAMS = {"lct": ("trainer.commands.main", "main"), "torchrun": ("torch.distributed.run", "main")}


class Server:
    """Forks a child for each connection, sends it the signals of its client, and answers with its exit code."""

    def __init__(self, address: str) -> None:
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(address)
        self._listener.listen(64)
        self._children: dict[socket.socket, int] = {}
        self._path = sys.path[1:]  # without the folder of `python -m`

    def serve(self) -> None:
        """Serve until standard input ends."""
        self._selector.register(sys.stdin.fileno(), selectors.EVENT_READ, lambda: None)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj == sys.stdin.fileno():
                    for pid in self._children.values():
                        os.killpg(pid, signal.SIGKILL)
                    return
                key.data()

    def _accept(self) -> None:
        connection = self._listener.accept()[0]
        data, streams, *_ = socket.recv_fds(connection, _MOST_BYTES, 3)
        message = json.loads(data)
        pid = os.fork()
        if pid == 0:
            self._be_the_child(message, streams, connection)
        for stream in streams:
            os.close(stream)
        self._children[connection] = pid
        ended = os.pidfd_open(pid)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._pass_on(connection))
        self._selector.register(ended, selectors.EVENT_READ, lambda: self._answer(connection, ended))

    def _pass_on(self, connection: socket.socket) -> None:
        """Send the child the signals of its client; if the client has ended, kill the child and its processes."""
        if number := connection.recv(1):
            os.kill(self._children[connection], number[0])
        else:
            os.killpg(self._children[connection], signal.SIGKILL)
            self._selector.unregister(connection)

    def _answer(self, connection: socket.socket, ended: int) -> None:
        code = os.waitstatus_to_exitcode(os.waitpid(self._children.pop(connection), 0)[1])
        self._selector.unregister(ended)
        with suppress(KeyError):
            self._selector.unregister(connection)
        with suppress(OSError):  # the client may have ended
            connection.send(str(code).encode())
        os.close(ended)
        connection.close()

    def _be_the_child(self, message: dict, streams: list[int], connection: socket.socket) -> None:
        code = 1
        try:
            os.setsid()
            self._selector.close()
            for each in (self._listener, connection, *self._children):
                each.close()
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
                os.close(stream)
            os.chdir(message["folder"])
            os.environ.clear()
            os.environ.update(message["variables"])
            sys.path[:] = self._path
            code = _code_of(message["words"])
        except BaseException:
            traceback.print_exc()
        os._exit(code)


def _code_of(words: list[str]) -> int:
    """Run a command in this process to its end, as Python does, and return its exit code."""
    try:
        _call(words)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    with suppress(BrokenPipeError):
        sys.stdout.flush()
        sys.stderr.flush()
    return code


def _call(words: list[str]) -> None:
    name, *arguments = words
    sys.executable = str(Path(os.environ["VIRTUAL_ENV"], "bin", "python"))  # what it starts is warm too
    if "-u" in arguments[:1]:
        arguments = arguments[1:]
        sys.stdout.reconfigure(write_through=True)
    if name in _PROGRAMS:
        module, function = _PROGRAMS[name]
        sys.argv = [str(Path(sys.executable).with_name(name)), *arguments]
        _set_path(str(Path(sys.executable).parent))
        sys.exit(getattr(importlib.import_module(module), function)())
    if arguments[0] == "-m":
        sys.argv = ["-m", *arguments[2:]]
        _set_path(os.getcwd())
        sys.modules.pop(arguments[1], None)  # as in a process that has not imported what it runs
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        _set_path(str(Path(arguments[0]).parent.absolute()))
        runpy.run_path(arguments[0], run_name="__main__")


def _set_path(first: str) -> None:
    """Put before the packages what Python puts there: the folder of the program, and PYTHONPATH."""
    folders = [] if os.environ.get("PYTHONSAFEPATH") else [first]
    sys.path[:0] = [*folders, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]


def main() -> None:
    """Import, then serve on the socket that the command line names."""
    address = sys.argv[1]
    for name in _PRELOAD:
        importlib.import_module(name)
    importlib.import_module("torch").set_num_threads(1)
    gc.collect()
    gc.freeze()  # a collection of a child would copy every page
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"{len(threads)} threads: a child would have one of them"
    server = Server(address)
    print("ready", flush=True)
    server.serve()


if __name__ == "__main__":
    main()
