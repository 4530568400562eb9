"""Law: the nodes of a job all get one store, or each says in one sentence why not. Real stores, in threads."""

import contextlib
import socket
import threading
import time
from dataclasses import replace

import pytest
from torch.distributed import TCPStore

from tests.distributed.pool import free_port
from trainer.config.errors import ConfigError
from trainer.runtime import job_store
from trainer.runtime.job_store import NodesMissing, open_store
from trainer.runtime.nodes import Nodes


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_store, "LINE_SECONDS", 0.4)
    monkeypatch.setattr(job_store, "ANSWER_SECONDS", 0.7)


class Launcher(threading.Thread):
    """One node that waits for the others; `result` is the port of its store or its error."""

    def __init__(self, nodes: Nodes, ranks: int = 8, timeout: float = 20.0) -> None:
        super().__init__(daemon=True)
        self.nodes, self.ranks, self.timeout = nodes, ranks, timeout
        self.start()

    def run(self) -> None:
        try:
            self.store = open_store(self.nodes, self.ranks, self.timeout)
            self.got = self.nodes.port
        except Exception as error:
            self.got = error.with_traceback(None)  # whose frames hold the store

    @property
    def result(self) -> int | Exception:
        self.join(30)
        return self.got


def job(*names: str, known: bool = False, **others: object) -> list[Nodes]:
    """The nodes of a job with these names, at a free port of this machine."""
    one = Nodes(len(names), port=free_port(), names=names if known else ())
    return [replace(one, rank=rank, here=name, **others) for rank, name in enumerate(names)]


def listening(nodes: Nodes) -> None:
    """Wait until the first node listens."""
    deadline = time.monotonic() + 10
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection((nodes.address, nodes.port)).close()
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)], ids=["first node first", "first node last"])
def test_all_nodes_get_the_store_of_the_first_one(order: tuple[int, ...]) -> None:
    nodes = job("node-a", "node-b", "node-c")
    launchers = []
    for rank in order:
        launchers.append(Launcher(nodes[rank]))
        time.sleep(0.3)
    assert [launcher.result for launcher in launchers] == [nodes[0].port] * 3
    launchers[0].store.set("from", "one")
    assert launchers[-1].store.get("from") == b"one"


def test_nodes_wait_for_the_first_one(capfd: pytest.CaptureFixture[str]) -> None:
    nodes = job("node-a", "node-b")[1]
    error = Launcher(nodes, timeout=1.0).result
    assert isinstance(error, NodesMissing)
    who = f"the first node at {nodes.place} (Connection refused; this is node 1)"
    assert str(error) == (
        f"waited 1 s without success for {who}; MASTER_ADDR and MASTER_PORT must name the first node and a port "
        f"that all nodes can reach. The same command must run on every node with {nodes.command}"
    )
    assert f"waiting for {who}, " in capfd.readouterr().err


def test_lines_and_time_out_name_who_is_missing(capfd: pytest.CaptureFixture[str]) -> None:
    nodes = job("node-a", "node-b", "node-c", known=True)
    launchers = [Launcher(nodes[0], timeout=1.8)]  # the first node's time-out counts for all
    listening(nodes[0])
    launchers.append(Launcher(nodes[1], timeout=20))
    errors = [launcher.result for launcher in launchers]
    assert [type(error) for error in errors] == [NodesMissing] * 2
    assert str(errors[0]) == str(errors[1])
    who = f"1 of 3 nodes at {nodes[0].place} (missing: NODE_RANK 2 (node-c))"
    assert str(errors[0]).startswith(f"waited 1.8 s without success for {who}; ")
    lines = capfd.readouterr().err.splitlines()
    assert 3 <= len(lines) <= 9, lines  # at most every 0.4 s on each
    ends = f"there with NNODES=3 MASTER_ADDR=localhost MASTER_PORT={nodes[0].port} and a NODE_RANK of its own"
    assert all(line.startswith(f"waiting for {who}, ") for line in lines[-2:]), lines
    assert all(line.endswith(ends) for line in lines), lines


def test_many_names_are_cut(capfd: pytest.CaptureFixture[str]) -> None:
    nodes = job(*(f"node-{i}" for i in range(64)))
    Launcher(nodes[0], timeout=0.5).join()
    assert f"63 of 64 nodes at {nodes[0].place} (missing: NODE_RANK 1, 2, 3, 4, 5, 6, 7, 8 and 55 more), " in (
        capfd.readouterr().err
    )


def test_a_first_node_that_ends_is_waited_for() -> None:
    nodes = job("node-a", "node-b", "node-c")
    first, second = Launcher(nodes[0], timeout=0.5), Launcher(nodes[1])
    assert isinstance(first.result, NodesMissing)
    assert isinstance(second.result, NodesMissing)  # with its words
    again = [Launcher(node) for node in nodes]
    assert [launcher.result for launcher in again] == [nodes[0].port] * 3


def test_a_node_may_be_started_again_but_has_a_rank_of_its_own() -> None:
    nodes = job("node-a", "node-b", "node-c")
    first, second = Launcher(nodes[0]), Launcher(nodes[1])
    time.sleep(1)
    error = Launcher(replace(nodes[1], here="node-c")).result
    assert isinstance(error, ConfigError)
    assert str(error) == (
        "NODE_RANK = 1 is also the rank of node-b, and this is node-c; give each node a NODE_RANK of its own"
    )
    launchers = [first, second, Launcher(nodes[1]), Launcher(nodes[2])]
    assert [launcher.result for launcher in launchers] == [nodes[0].port] * 4


def test_a_job_that_has_all_of_its_nodes_takes_no_other() -> None:
    nodes = job("node-a", "node-b")
    launchers = [Launcher(node) for node in nodes]
    assert [launcher.result for launcher in launchers] == [nodes[0].port] * 2
    error = Launcher(nodes[1]).result
    assert isinstance(error, ConfigError)
    assert str(error).startswith(f"the job 'trainer' at {nodes[0].place} has all of its nodes; start the command once")


def test_another_job_is_refused_and_this_one_resumes() -> None:
    nodes = job("node-a", "node-b", job="7")
    first = Launcher(nodes[0])
    listening(nodes[0])
    error = Launcher(replace(nodes[1], job="8")).result
    assert isinstance(error, ConfigError)
    assert str(error) == (
        "the job '7' gathers at this MASTER_ADDR and MASTER_PORT, but this is '8'. Give each job a MASTER_PORT of its "
        "own, or all nodes of a job the same RDZV_ID"
    )
    assert first.is_alive()
    assert [Launcher(nodes[1]).result, first.result] == [nodes[0].port] * 2


@pytest.mark.parametrize(
    ("count", "ranks", "message"),
    [
        (3, 8, "NNODES on node-b is 3, but NNODES on node-a is 2"),
        (2, 4, "NGPU on node-b is 4, but NGPU on node-a is 8"),
    ],
)
def test_different_numbers_end_all_nodes(count: int, ranks: int, message: str) -> None:
    nodes = job("node-a", "node-b")
    first = Launcher(nodes[0])
    listening(nodes[0])
    errors = [Launcher(replace(nodes[1], count=count), ranks).result, first.result]
    assert [type(error) for error in errors] == [ConfigError] * 2
    remedy = message.partition(" ")[0]
    assert {str(error) for error in errors} == {f"{message}; give {remedy} the same value on all nodes of a job"}


@pytest.mark.parametrize("noise", [b"", b"GET / HTTP/1.1\r\n\r\n"])
def test_a_stranger_does_not_disturb_the_nodes(noise: bytes) -> None:
    nodes = job("node-a", "node-b")
    first = Launcher(nodes[0])
    listening(nodes[0])
    with socket.create_connection((nodes[0].address, nodes[0].port)) as stranger:
        stranger.sendall(noise)
        time.sleep(0.1)
        assert [Launcher(nodes[1]).result, first.result] == [nodes[0].port] * 2


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("greeting", [b"", b"SSH-2.0-OpenSSH_9.6\r\n", None], ids=["silent", "ssh", "a store"])
def test_a_port_that_another_program_has(greeting: bytes | None, rank: int) -> None:
    nodes = job("node-a", "node-b")[rank]
    with contextlib.ExitStack() as open_:
        if greeting is None:
            store = TCPStore("localhost", nodes.port, is_master=True, wait_for_workers=False)
        else:
            other = open_.enter_context(socket.create_server(("localhost", nodes.port)))

            def serve() -> None:
                for _ in range(2):
                    connection, _ = other.accept()
                    open_.push(connection)
                    connection.sendall(greeting)

            threading.Thread(target=serve, daemon=True).start()
        error = Launcher(nodes).result
        if greeting is None:
            del store
    assert isinstance(error, ConfigError)
    assert str(error) == (
        f"MASTER_PORT = {nodes.port} is taken by another program on localhost; name a free port of the first node, the "
        f"same on every node, such as MASTER_PORT={nodes.port + 1}"
    )


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("a.invalid", r"^MASTER_ADDR = 'a\.invalid' is not known on b \(.*\); give the host name or"),
        (
            "192.0.2.1",
            r"^MASTER_ADDR = '192\.0\.2\.1' is no address of b, which has NODE_RANK = 0; NODE_RANK=0 belongs",
        ),
    ],
)
def test_a_wrong_address(address: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_store(Nodes(2, address=address, here="b"), 1, 10)
