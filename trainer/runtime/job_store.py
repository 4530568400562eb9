"""The store of a job, in which its nodes find each other before their ranks start.

The first node (NODE_RANK = 0) serves a TCPStore at MASTER_ADDR:MASTER_PORT, which the ranks use, too. A job on one node
serves it on a free port of the loopback interface. Its keys are plain text; nothing is unpickled:

    job            set by the first node: the name of the job
    node/RANK      set by each node: its host name, NNODES and NGPU
    verdict        set by the first node: empty when all nodes are there, else why the job does not start
    EVENT/RANK     set by each node that has reached an event of the job: the start or the end of its ranks

While nodes are missing, each launcher prints one line every ten seconds.
"""

import errno
import json
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

from trainer.config.errors import ConfigError
from trainer.runtime.nodes import Nodes

if TYPE_CHECKING:
    from torch.distributed import TCPStore

LINE_SECONDS = 10.0
ANSWER_SECONDS = 5.0
"""Time that another program may keep the port, and that a store may take to answer."""
_PAUSE_SECONDS = 0.2
_MOST_NAMES = 8


class NodesMissing(Exception):
    """Not all nodes came in time. The message is one sentence: which nodes, where, and what to do."""


class StoreError(Exception):
    """The store of the job does not answer any more. The message comes from PyTorch."""


def listener_of_one_node() -> socket.socket:
    """Return a socket that listens on a free port of the loopback interface.

    A store that opens its own socket would listen on all networks.
    """
    return socket.create_server(("127.0.0.1", 0), backlog=1024)


def serve(listener: socket.socket, address: str) -> "TCPStore":
    """Return a store that listens at this socket, which it takes over.

    Args:
        listener: The socket.
        address: The address at which this process reaches it.
    """
    from torch.distributed import TCPStore

    return TCPStore(
        address,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def open_store(nodes: Nodes, ranks: int, timeout_seconds: float) -> "TCPStore":
    """Return the store of a job on several nodes, once all nodes are there.

    Args:
        nodes: The nodes of the job; this node is `nodes.rank`.
        ranks: Number of ranks on this node.
        timeout_seconds: How long to wait for the other nodes.

    Raises:
        ConfigError: MASTER_ADDR is wrong, MASTER_PORT is taken, or nodes disagree.
        NodesMissing: A node is missing after `timeout_seconds`.
    """
    from torch.distributed import DistError

    nodes.check_address()
    me = {"name": nodes.here, "NNODES": nodes.count, "NGPU": ranks}
    waiting = _Waiting(nodes, timeout_seconds)
    if nodes.rank == 0:
        store = serve(_listener(nodes), nodes.address)
        _gather(store, nodes, me, waiting)
        return store
    while True:
        store = _reach(nodes, waiting)
        with suppress(DistError):  # the first node has ended: wait for it again
            _join(store, nodes, me, waiting)
            return store


def meet(store: "TCPStore", nodes: Nodes, event: str, timeout_seconds: float) -> None:
    """Report that this node has reached an event, and wait until the launchers of all nodes have reached it.

    Args:
        store: The store of the job.
        nodes: The nodes of the job.
        event: Name of the event.
        timeout_seconds: How long to wait.

    Raises:
        StoreError: A launcher has not come in time, or the first node, which has the store, has ended.
    """
    from torch.distributed import DistError

    try:
        store.set(f"{event}/{nodes.rank}", "")
        store.wait(
            [f"{event}/{rank}" for rank in range(nodes.count)],
            timedelta(seconds=timeout_seconds),
        )
    except DistError as error:
        raise StoreError(str(error).partition("\n")[0]) from None


def _listener(nodes: Nodes) -> socket.socket:
    """Return a socket that listens on MASTER_PORT of all networks; wait 5 s for a taken port.

    Raises:
        ConfigError: The port is still taken, or not allowed.
    """
    # a launcher that is just ending may hold the port
    deadline = time.monotonic() + ANSWER_SECONDS
    while True:
        try:
            both = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if both else socket.AF_INET
            return socket.create_server(
                ("", nodes.port), family=family, dualstack_ipv6=both, backlog=1024
            )
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise ConfigError(
                    f"MASTER_PORT = {nodes.port} cannot be used on {nodes.here} ({error.strerror}); name a "
                    "free port from 1024 up, the same on every node, such as MASTER_PORT=29500"
                ) from None
        if time.monotonic() > deadline:
            _taken(nodes)
        time.sleep(_PAUSE_SECONDS)


def _gather(store: "TCPStore", nodes: Nodes, me: dict[str, Any], waiting: "_Waiting") -> None:
    """Act as the first node: wait for the others, and set the verdict.

    Raises:
        ConfigError: Nodes have other values of NNODES or NGPU.
        NodesMissing: The time is over.
    """
    store.set("job", nodes.job)
    store.set("node/0", json.dumps(me))
    unchecked = {*range(nodes.count)}
    try:
        while unchecked:
            for rank in unchecked - {*waiting.missing(store)}:
                node = json.loads(store.get(f"node/{rank}"))
                if other := next(
                    (name for name in ("NNODES", "NGPU") if node[name] != me[name]), None
                ):
                    raise ConfigError(
                        f"{other} on {node['name']} is {node[other]}, but {other} on {me['name']} is {me[other]}; give "
                        f"{other} the same value on all nodes of a job"
                    )
                unchecked.remove(rank)
            if unchecked:
                waiting.pause(store)
    except (ConfigError, NodesMissing) as error:
        store.set("verdict", json.dumps([isinstance(error, ConfigError), str(error)]))
        time.sleep(5 * _PAUSE_SECONDS)  # the store ends with this process
        raise
    store.set("verdict", "")


def _reach(nodes: Nodes, waiting: "_Waiting") -> "TCPStore":
    """Return the store of the first node; wait until it listens.

    Raises:
        ConfigError: Another program has the port.
        NodesMissing: The time is over.
    """
    from torch.distributed import DistError, TCPStore

    while True:
        try:
            with socket.create_connection((nodes.address, nodes.port), timeout=3) as probe:
                probe.settimeout(_PAUSE_SECONDS)
                with suppress(TimeoutError):
                    if probe.recv(1):  # a store waits until it is asked
                        _taken(nodes)
                    raise ConnectionResetError(errno.ECONNRESET, "the connection was closed")
        except OSError as error:
            waiting.pause(None, error.strerror or str(error))
            continue
        stores = []

        def connect(stores: "list[TCPStore]" = stores) -> None:
            answer = timedelta(seconds=ANSWER_SECONDS)
            with suppress(DistError):
                store = TCPStore(
                    nodes.address,
                    nodes.port,
                    is_master=False,
                    wait_for_workers=False,
                    timeout=answer,
                )
                store.wait(["job"], answer)
                stores.append(store)

        # A program that listens and is silent would block torch's store for ever.
        thread = threading.Thread(target=connect, daemon=True)
        thread.start()
        thread.join(2 * ANSWER_SECONDS)
        if not stores:
            _taken(nodes)
        return stores[0]


def _join(store: "TCPStore", nodes: Nodes, me: dict[str, Any], waiting: "_Waiting") -> None:
    """Act as another node: register with the first node, and wait for its verdict.

    Raises:
        ConfigError: Another job is there, the job has all of its nodes, another node has this rank, or nodes disagree.
        NodesMissing: The time is over.
        DistError: The first node has ended.
    """
    if (job := store.get("job").decode()) != nodes.job:
        raise ConfigError(
            f"the job {job!r} gathers at this MASTER_ADDR and MASTER_PORT, but this is {nodes.job!r}. Give "
            "each job a MASTER_PORT of its own, or all nodes of a job the same RDZV_ID"
        )
    if store.check(["verdict"]) and not store.get("verdict"):
        raise ConfigError(
            f"the job {job!r} at {nodes.place} has all of its nodes; start the command once on each node, or give each "
            "job a MASTER_PORT of its own"
        )
    key = f"node/{nodes.rank}"
    text = json.dumps(me)
    if (other := json.loads(store.compare_set(key, "", text)))["name"] != me["name"]:
        raise ConfigError(
            f"NODE_RANK = {nodes.rank} is also the rank of {other['name']}, and this is {me['name']}; give "
            "each node a NODE_RANK of its own"
        )
    store.set(key, text)  # this node may have been started again
    while not store.check(["verdict"]):
        waiting.pause(store)
    if verdict := store.get("verdict"):
        is_setting, text = json.loads(verdict)
        raise (ConfigError if is_setting else NodesMissing)(text)


@dataclass
class _Waiting:
    """The time-out of a node that waits for others, and the lines that it prints."""

    nodes: Nodes
    timeout: float
    started: float = field(default_factory=time.monotonic)
    lines: int = 0

    def missing(self, store: "TCPStore") -> list[int]:
        """Return the ranks of the nodes that have not come."""
        return [rank for rank in range(self.nodes.count) if not store.check([f"node/{rank}"])]

    def pause(self, store: "TCPStore | None", reason: str = "") -> None:
        """Wait a moment, and print a line if it is time. store: None if the first node cannot be reached, for `reason`.

        Raises:
            NodesMissing: The time is over. A node that has reached the first node waits a little longer than the first
                node, because the first node's verdict counts.
        """
        time.sleep(_PAUSE_SECONDS)
        nodes = self.nodes
        passed = time.monotonic() - self.started
        is_over = passed >= self.timeout + (
            0 if store is None or nodes.rank == 0 else ANSWER_SECONDS
        )
        if not is_over and passed < (self.lines + 1) * LINE_SECONDS:
            return
        if store is None:
            who = f"the first node at {nodes.place} ({reason}; this is node {nodes.named(nodes.rank)})"
        else:
            missing = self.missing(store)
            named = ", ".join(nodes.named(rank) for rank in missing[:_MOST_NAMES])
            named += f" and {len(missing) - _MOST_NAMES} more" * (len(missing) > _MOST_NAMES)
            who = f"{len(missing)} of {nodes.count} nodes at {nodes.place} (missing: NODE_RANK {named})"
        if is_over:
            raise NodesMissing(
                f"waited {self.timeout:g} s without success for {who}; MASTER_ADDR and MASTER_PORT must name the first "
                f"node and a port that all nodes can reach. The same command must run on every node with "
                f"{nodes.command}"
            )
        self.lines = int(passed / LINE_SECONDS)
        line = f"waiting for {who}, {passed:.0f} s of {self.timeout:g} s; start the same command there with "
        # write it in one piece, because other launchers may write there too
        sys.stderr.write(f"{line}{nodes.command}\n")
        sys.stderr.flush()


def _taken(nodes: Nodes) -> NoReturn:
    raise ConfigError(
        f"MASTER_PORT = {nodes.port} is taken by another program on {nodes.address}; name a free port of the first "
        f"node, the same on every node, such as MASTER_PORT={nodes.port + 1 if nodes.port < 65535 else 29500}"
    )
