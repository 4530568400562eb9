"""What stands in `.venv/bin` of a copy instead of Python and its programs: it hands the command to a warm server.

The shorter form of the command runs (`shortened.py`). The standard streams, the folder and the variables go to the
server (`warm_server.py`), signals go to its child, and this process ends as the child ends. Without a server, and for
what no server has imported, the real program takes over. Only the standard library is imported: starting this takes a
fiftieth of a second.
"""

import json
import os
import signal
import socket
import sys
from pathlib import Path

from tests.repository.documented.shortened import program_of, shorter

SERVERS = "WARM_SERVERS"
"""Variable: the folder with the sockets of the servers. Without it, or if it is empty, every program starts cold."""
SHORTENED = "IS_SHORTENED"
"""Variable: this command is part of one that was shortened already."""
PLAIN, WITH_SHIM = "plain", "with_shim"
"""Names of sockets: of the usual server, and of the one that has the library of CUDA tensors without memory."""
_RUNS_ANOTHER = "tests.s3_server"
"""The program whose arguments are a command."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
_WARM_MODULES = (
    "longshard",
    "trainer",
    "lct_inference",
    "lct_planner",
    "lct_tools",
    "scripts",
    "examples",
    "tests",
    "pytest",
)


def run(name: str, real: str) -> None:
    """Run the program `name` with the arguments of this process. real: the folder of the real programs."""
    words = [name, *sys.argv[1:]]
    if SHORTENED not in os.environ and program_of(words)[0] != _RUNS_ANOTHER:
        os.environ[SHORTENED] = "1"
        words = shorter(words, os.environ)
    address = _server(words)
    if address is None:
        os.execv(f"{real}/{name}", [f"{real}/{name}", *words[1:]])
    _end_as(_run_there(address, words))


def _server(words: list[str]) -> Path | None:
    """Return the socket of the server that runs this command, or None if it has to start cold."""
    folder = os.environ.get(SERVERS)
    if not folder or not _is_warm(words):
        return None
    address = Path(folder, WITH_SHIM if "LD_PRELOAD" in os.environ else PLAIN)
    return address if address.exists() else None


def _is_warm(words: list[str]) -> bool:
    if words[0] not in ("python", "python3"):
        return words[0] != "tensorboard"
    arguments = [word for word in words[1:] if word != "-u"]
    if arguments[:1] == ["-m"]:
        return arguments[1].partition(".")[0] in _WARM_MODULES or arguments[1] == "torch.distributed.run"
    return bool(arguments) and arguments[0].endswith(".py")


def _run_there(address: Path, words: list[str]) -> int:
    """Run the command in a child of the server, and return its exit code; below 0, the signal that ended it."""
    message = {"words": words, "folder": os.getcwd(), "variables": dict(os.environ)}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(str(address))
        for number in _SIGNALS:
            signal.signal(number, lambda number, _: connection.send(bytes([number])))
        socket.send_fds(connection, [json.dumps(message).encode()], [0, 1, 2])
        answer = connection.recv(16)
    if not answer:
        print("the warm server has ended", file=sys.stderr)
    return int(answer or b"1")


def _end_as(code: int) -> None:
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)
