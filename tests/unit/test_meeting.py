"""Law: the nodes of a job meet once, in one order, or each says in one sentence why not. Real sockets, in threads."""

import json
import random
import socket
import threading
import time
from dataclasses import replace

import pytest

from tests.distributed.pool import free_port
from trainer.config.errors import ConfigError
from trainer.runtime import meeting
from trainer.runtime.meeting import NodesMissing, Place, meet
from trainer.runtime.nodes import Nodes

STORE = 4711


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "LINE_SECONDS", 0.4)
    monkeypatch.setattr(meeting, "_GREETING_SECONDS", 0.5)


class Launcher(threading.Thread):
    """One node that meets the others; `result` is its place or its error."""

    def __init__(self, nodes: Nodes, ranks: int = 8, timeout: float = 20.0) -> None:
        super().__init__(daemon=True)
        self.nodes, self.ranks, self.timeout = nodes, ranks, timeout
        self.start()

    def run(self) -> None:
        try:
            self.got = meet(self.nodes, self.ranks, self.timeout, lambda: STORE)
        except Exception as error:
            self.got = error

    @property
    def result(self) -> Place | Exception:
        self.join(30)
        return self.got


def job(*names: str, known: bool = False, **others: object) -> list[Nodes]:
    """The nodes of a job with these names, at a free port of this machine."""
    one = Nodes(len(names), port=free_port(), names=names if known else ())
    return [replace(one, here=name, **others) for name in names]


def listening(nodes: Nodes) -> None:
    """Wait until the first node listens."""
    deadline = time.monotonic() + 10
    while True:
        try:
            return socket.create_connection((nodes.address, nodes.port)).close()
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.mark.parametrize("known", [True, False], ids=["order of NODE_NAMES", "numbers as numbers"])
def test_ranks_follow_names_not_arrival(known: bool) -> None:
    names = ("node-2", "node-10", "node-9", "node-1") if known else ("node-7", "node-1", "node-2", "node-10")
    nodes = job(*names, known=known)
    first = Launcher(nodes[0])
    listening(nodes[0])
    others = list(nodes[1:])
    random.Random(1).shuffle(others)
    launchers = [first]
    for other in others:
        launchers.append(Launcher(other))
        time.sleep(0.05)
    ranks = {launcher.nodes.here: launcher.result for launcher in launchers}
    assert ranks == {name: Place(rank, STORE) for rank, name in enumerate(names)}


def test_two_nodes_of_one_name_and_a_domain() -> None:
    """As two launchers on one machine; a full name is the node of the short one."""
    nodes = job("node-a", "node-b", "node-b", known=True)
    launchers = [Launcher(node) for node in (nodes[0], replace(nodes[1], here="node-b.cluster"), nodes[2])]
    assert sorted(launcher.result for launcher in launchers) == [(0, STORE), (1, STORE), (2, STORE)]


def test_nodes_wait_for_the_first_one(capfd: pytest.CaptureFixture[str]) -> None:
    """Whoever is first on the machine of MASTER_ADDR listens; here the others cannot know that they could."""
    nodes = [replace(node, address="192.0.2.1") for node in job("node-a", "node-b")]
    error = Launcher(nodes[1], timeout=1.0).result
    assert isinstance(error, NodesMissing)
    where = f"192.0.2.1:{nodes[1].port}"
    assert str(error).startswith(f"the first node did not answer at {where} within 1 s (")
    assert str(error).endswith(
        "; this node: node-b); MASTER_ADDR and MASTER_PORT must name the first node and a port that the other nodes "
        f"can reach, and the same command must run there with {nodes[1].command}"
    )
    assert f"waiting for the first node at {where} (" in capfd.readouterr().err


def test_lines_and_time_out_name_who_is_missing(capfd: pytest.CaptureFixture[str]) -> None:
    nodes = job("node-a", "node-b", "node-c", known=True)
    launchers = [Launcher(nodes[0], timeout=1.8)]  # the first node's time-out counts for all
    listening(nodes[0])
    launchers.append(Launcher(nodes[1], timeout=20))
    errors = [launcher.result for launcher in launchers]
    assert [type(error) for error in errors] == [NodesMissing] * 2
    assert str(errors[0]) == str(errors[1])
    who = "here: node-a, node-b; missing: node-c; localhost is reached from this machine only"
    assert str(errors[0]) == (
        f"1 of 3 nodes did not come to {nodes[0].place} within 1.8 s ({who}); the same command must run on every node "
        f"with NNODES=3 MASTER_ADDR=localhost MASTER_PORT={nodes[0].port}"
    )
    lines = capfd.readouterr().err.splitlines()
    assert 3 <= len(lines) <= 9, lines  # at most every 0.4 s on each
    ends = f"start the same command there with NNODES=3 MASTER_ADDR=localhost MASTER_PORT={nodes[0].port}"
    assert all(f"waiting for 1 of 3 nodes ({who}) at {nodes[0].place}, " in line for line in lines[-2:]), lines
    assert all(line.endswith(ends) for line in lines), lines


def test_many_names_are_cut(capfd: pytest.CaptureFixture[str]) -> None:
    nodes = job(*(f"node-{i}" for i in range(64)), known=True)
    Launcher(nodes[0], timeout=0.5).join()
    shown = "missing: node-1, node-2, node-3, node-4, node-5, node-6, node-7, node-8 and 55 more; "
    assert f"waiting for 63 of 64 nodes (here: node-0; {shown}" in capfd.readouterr().err


def test_a_node_that_goes_is_missing_again() -> None:
    nodes = job("node-a", "node-b", "node-c", known=True)
    first = Launcher(nodes[0])
    listening(nodes[0])
    gone = Launcher(nodes[1], timeout=0.6)
    assert isinstance(gone.result, NodesMissing)
    third = Launcher(nodes[2])
    time.sleep(0.5)
    assert first.is_alive()
    assert third.is_alive()  # two of three: the one that has gone does not count
    again = Launcher(nodes[1])
    assert [x.result.rank for x in (first, again, third)] == [0, 1, 2]


def test_one_node_more_than_the_job_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two come at the same time, and one place is left."""
    gate, look = threading.Event(), meeting._Waiting.for_nodes
    monkeypatch.setattr(meeting._Waiting, "for_nodes", lambda *arguments: (gate.wait(), look(*arguments)))
    nodes = job("node-a", "node-b")
    gate.set()
    first = Launcher(nodes[0])
    listening(nodes[0])
    hello = json.dumps({"job": nodes[0].job, "name": "node-b", "nodes": 2, "ranks": 8}).encode() + b"\n"
    both = [socket.create_connection((nodes[0].address, nodes[0].port)) for _ in range(2)]
    for connection in both:
        assert connection.recv(100)
    gate.clear()
    time.sleep(2 * meeting._PAUSE_SECONDS)
    for connection in both:
        connection.sendall(hello)
    gate.set()
    assert first.result == (0, STORE)
    answers = [json.loads(connection.makefile().readlines()[-1]) for connection in both]
    assert {"rank": 1, "port": STORE} in answers
    (error,) = [answer["error"] for answer in answers if "error" in answer]
    assert error.startswith("node-b is one more than the 2 nodes of the job 'trainer'; start the command once on each")


def test_a_first_node_that_stops_answering(capfd: pytest.CaptureFixture[str]) -> None:
    """It hangs after its greeting: the time-out counts."""
    (nodes, _) = job("node-b", "node-c")
    with socket.create_server(("", nodes.port)) as first:
        launcher = Launcher(nodes, timeout=1.0)
        connection, _ = first.accept()
        connection.sendall(b'{"meeting": "trainer"}\n')
        assert isinstance(launcher.result, NodesMissing)
        connection.close()
    assert f"waiting for the first node at {nodes.place} (no answer yet; here: node-b), " in capfd.readouterr().err


def test_another_job_is_refused_and_this_one_goes_on() -> None:
    nodes = job("node-a", "node-b", job="7")
    first = Launcher(nodes[0])
    listening(nodes[0])
    error = Launcher(replace(nodes[1], job="8")).result
    assert isinstance(error, ConfigError)
    assert str(error) == (
        "the job '7' gathers at this MASTER_ADDR and MASTER_PORT, but this is '8'; give each job a MASTER_PORT of its "
        "own, or all nodes of a job the same RDZV_ID"
    )
    assert [first.is_alive(), Launcher(nodes[1]).result, first.result] == [True, (1, STORE), (0, STORE)]


@pytest.mark.parametrize(
    ("count", "ranks", "message"),
    [(3, 8, "NNODES on node-b is 3, but NNODES on node-a is 2"), (2, 4, "node-b has 4 ranks, but node-a has 8 ranks")],
)
def test_different_numbers_end_all_nodes(count: int, ranks: int, message: str) -> None:
    nodes = job("node-a", "node-b")
    first = Launcher(nodes[0])
    listening(nodes[0])
    errors = [Launcher(replace(nodes[1], count=count), ranks).result, first.result]
    assert [type(error) for error in errors] == [ConfigError] * 2
    remedy = "NNODES" if count == 3 else "NGPU"
    assert {str(error) for error in errors} == {f"{message}; give {remedy} the same value on all nodes of a job"}


@pytest.mark.parametrize("noise", [b"", b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b"\xff\n", b'{"job": "trainer"}\n'])
def test_a_stranger_does_not_disturb_the_meeting(noise: bytes) -> None:
    nodes = job("node-a", "node-b")
    first = Launcher(nodes[0])
    listening(nodes[0])
    with socket.create_connection((nodes[0].address, nodes[0].port)) as stranger:
        stranger.sendall(noise)
        time.sleep(0.1)
        assert [Launcher(nodes[1]).result, first.result] == [(1, STORE), (0, STORE)]


@pytest.mark.parametrize("greeting", [None, b"", b"SSH-2.0-OpenSSH_9.6\r\n", b"{}\n"])
def test_a_port_that_another_program_has(greeting: bytes | None) -> None:
    """It does not listen, is silent, or speaks another language."""
    (nodes, _) = job("node-a", "node-b")
    with socket.socket() as other:
        other.bind(("", nodes.port))
        if greeting is not None:
            other.listen()
        launcher = Launcher(nodes)
        if greeting is not None:
            connection, _ = other.accept()
            connection.sendall(greeting)
        error = launcher.result
    assert isinstance(error, ConfigError)
    assert str(error) == (
        f"MASTER_PORT = {nodes.port} is taken by another program on localhost; name a free port of the first node, the "
        f"same on every node, such as MASTER_PORT={nodes.port + 1}"
    )


def test_an_address_that_nobody_knows() -> None:
    with pytest.raises(
        ConfigError, match=r"^MASTER_ADDR = 'a\.invalid' is not known on b \(.*\); give the host name or"
    ):
        meet(Nodes(2, "a.invalid", here="b"), 1, 10, lambda: STORE)
