"""The meeting of a job's nodes before their ranks start. Torch-free.

The launcher of the first node listens at MASTER_ADDR:MASTER_PORT; the others connect, and try again until it listens:

    first -> node    {"meeting": "trainer"}              a program that does not say this is another program
    node -> first    {"job", "name", "nodes", "ranks"}   numbers that differ end the meeting
    first -> node    {"here": [names]}                   when nodes have come or gone
    first -> node    {"rank", "port"} or {"error", "setting"}

While nodes are missing, each launcher prints one line every ten seconds. When all are there, the first node opens the
store of the job on a free port, each node learns its rank, and MASTER_PORT is free again.
"""

import errno
import ipaddress
import json
import re
import selectors
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

from trainer.config.errors import ConfigError
from trainer.runtime.nodes import Nodes

LINE_SECONDS = 10.0
_CONNECT_SECONDS = 3.0
_GREETING_SECONDS = 5.0
_PAUSE_SECONDS = 0.2
# A thousand nodes that arrive at once are not told a thousand lists.
_TELL_SECONDS = 0.5
_GREETING = {"meeting": "trainer"}
_LONGEST_MESSAGE = 2**20
_MOST_NAMES = 8
# What all nodes must have alike, the variable that sets it, and its words.
_SAME = (("nodes", "NNODES", "NNODES on {} is {}"), ("ranks", "NGPU", "{} has {} ranks"))


class NodesMissing(Exception):
    """Not all nodes came in time. The message is one sentence: who is missing, where, and what to do."""


class Place(NamedTuple):
    """What the meeting decided for one node: its rank among the nodes, and the port of the store on the first node."""

    rank: int
    port: int


def meet(nodes: Nodes, ranks: int, timeout_seconds: float, open_store: Callable[[], int]) -> Place:
    """Wait until all nodes are there, and return the place of this one.

    ranks: the number of ranks on this node; open_store: opens the store of the job and returns its port; called on the
    first node when all nodes are there.

    Raises:
        ConfigError: MASTER_ADDR has no address, MASTER_PORT is taken, or nodes have different numbers.
        NodesMissing: a node is missing after `timeout_seconds`.
    """
    addresses = addresses_of(nodes)
    waiting = _Waiting(nodes, timeout_seconds)
    me = {"job": nodes.job, "name": nodes.here, "nodes": nodes.count, "ranks": ranks}
    refused = 0
    while True:
        listener = _listener(nodes) if _is_this_machine(addresses) else None
        if listener is not None:
            with listener:
                return _receive_nodes(listener, me, nodes, waiting, open_store)
        try:
            return _join(me, nodes, waiting)
        except OSError as error:
            reason = error.strerror or str(error)
            refused += 1
        # On this machine, the port is neither free nor does anybody listen there: not a launcher that just ended.
        if _is_this_machine(addresses) and refused > 1 / _PAUSE_SECONDS:
            _taken(nodes)
        waiting.for_first_node(reason)
        time.sleep(_PAUSE_SECONDS)


@dataclass
class _Waiting:
    """The time-out of the meeting and the lines that are printed before it."""

    nodes: Nodes
    timeout: float
    started: float = field(default_factory=time.monotonic)
    lines: int = 0

    def for_first_node(self, reason: str) -> None:
        """Print the line of a node that cannot reach the first one, if it is time."""
        nodes = self.nodes
        if self._over():
            raise NodesMissing(
                f"the first node did not answer at {nodes.place} within {self.timeout:g} s ({reason}; this node: "
                f"{nodes.here}); MASTER_ADDR and MASTER_PORT must name the first node and a port that the other nodes "
                f"can reach, and the same command must run there with {nodes.command}"
            )
        self._print(f"the first node at {nodes.place} ({reason}; here: {nodes.here})", "there")

    def for_nodes(self, here: list[str]) -> None:
        """Print the line of a node that waits for others, if it is time. here: who has come, this node included."""
        nodes, left = self.nodes, self.nodes.count - len(here)
        who = f"here: {_listed(here)}"
        if missing := _missing(nodes.names, here):
            who += f"; missing: {_listed(missing)}"
        if _is_loopback(nodes.address):
            who += f"; {nodes.address} is reached from this machine only"
        if self._over():
            raise NodesMissing(
                f"{left} of {nodes.count} nodes did not come to {nodes.place} within {self.timeout:g} s ({who}); the "
                f"same command must run on every node with {nodes.command}"
            )
        where = "there" if missing else "on each missing node"
        self._print(f"{left} of {nodes.count} nodes ({who}) at {nodes.place}", where)

    def _print(self, what: str, where: str) -> None:
        passed = time.monotonic() - self.started
        if passed >= (self.lines + 1) * LINE_SECONDS:
            self.lines = int(passed / LINE_SECONDS)
            line = f"waiting for {what}, {passed:.0f} s of {self.timeout:g} s; start the same command {where} with "
            sys.stderr.write(f"{line}{self.nodes.command}\n")  # in one piece: other launchers may write there too
            sys.stderr.flush()

    def _over(self) -> bool:
        return time.monotonic() - self.started >= self.timeout


@dataclass
class _Connection:
    """Messages over a socket: one JSON object a line."""

    socket: socket.socket
    received: bytes = b""
    node: dict[str, Any] | None = None

    def send(self, message: dict[str, Any]) -> None:
        with suppress(OSError):  # who has gone is found out by `receive`
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]]:
        """Return the messages that have come; wait for the first bytes as long as the socket's time-out.

        Raises:
            OSError: the other end has gone, or has sent no message of a meeting.
        """
        try:
            read = self.socket.recv(2**16)
        except TimeoutError:
            return []
        if not read:
            raise ConnectionResetError(errno.ECONNRESET, "the connection was closed")
        *lines, self.received = (self.received + read).split(b"\n")
        try:
            messages = [json.loads(line) for line in lines]
        except ValueError:
            messages = [None]
        if len(self.received) > _LONGEST_MESSAGE or not all(isinstance(message, dict) for message in messages):
            raise OSError(errno.EPROTO, "another program answers")
        return messages


def _receive_nodes(
    listener: socket.socket, me: dict[str, Any], nodes: Nodes, waiting: _Waiting, open_store: Callable[[], int]
) -> Place:
    """Be the first node: wait for the others, and give each its place."""
    with selectors.DefaultSelector() as selector:
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ)
        connections: list[_Connection] = []
        here, told, tell_at = [me], [], 0.0
        try:
            while len(here) < nodes.count:
                waiting.for_nodes([node["name"] for node in here])
                for key, _ in selector.select(_PAUSE_SECONDS):
                    if key.fileobj is listener:
                        if (connection := _accept(listener)) is not None:
                            connections.append(connection)
                            selector.register(connection.socket, selectors.EVENT_READ, connection)
                    elif not _hear(key.data, me):
                        selector.unregister(key.fileobj)
                        connections.remove(key.data)
                        key.data.socket.close()
                here = [me, *(c.node for c in connections if c.node)]
                if here != told and time.monotonic() >= tell_at:
                    told, tell_at = here, time.monotonic() + _TELL_SECONDS
                    for connection in connections:
                        connection.send({"here": [node["name"] for node in here]})
            port = open_store()
            joined = [connection for connection in connections if connection.node]
            for one_more in joined[nodes.count - 1 :]:  # they came with the last one
                error = f"{one_more.node['name']} is one more than the {nodes.count} nodes of the job {nodes.job!r}"
                remedy = "start the command once on each node, or give each job a MASTER_PORT of its own"
                one_more.send({"error": f"{error}; {remedy}", "setting": True})
            joined = sorted(joined[: nodes.count - 1], key=lambda c: _order(c.node["name"], nodes.names))
            for rank, connection in enumerate(joined, start=1):
                connection.send({"rank": rank, "port": port})
            return Place(0, port)
        except (ConfigError, NodesMissing) as error:
            for connection in connections:
                connection.send({"error": str(error), "setting": isinstance(error, ConfigError)})
            raise
        finally:
            for connection in connections:
                connection.socket.close()


def _accept(listener: socket.socket) -> _Connection | None:
    try:
        accepted, _ = listener.accept()
    except OSError:  # who knocked has gone
        return None
    accepted.settimeout(_CONNECT_SECONDS)
    connection = _Connection(accepted)
    connection.send(_GREETING)
    return connection


def _hear(connection: _Connection, me: dict[str, Any]) -> bool:
    """Read what a node says, and return whether it stays.

    Raises:
        ConfigError: it has other numbers than this node.
    """
    try:
        for node in connection.receive():
            if node["job"] != me["job"]:
                error = (
                    f"the job {me['job']!r} gathers at this MASTER_ADDR and MASTER_PORT, but this is {node['job']!r}"
                )
                remedy = "give each job a MASTER_PORT of its own, or all nodes of a job the same RDZV_ID"
                connection.send({"error": f"{error}; {remedy}", "setting": True})
                return False
            for number, variable, text in _SAME:
                if node[number] != me[number]:
                    theirs, ours = text.format(node["name"], node[number]), text.format(me["name"], me[number])
                    raise ConfigError(f"{theirs}, but {ours}; give {variable} the same value on all nodes of a job")
            connection.node = node
    except (OSError, KeyError):  # it has gone, or was no node
        return False
    return True


def _join(me: dict[str, Any], nodes: Nodes, waiting: _Waiting) -> Place:
    """Be another node: tell the first one who this is, and wait for its answer.

    Raises:
        OSError: nobody listens, or the first node has gone.
    """
    with socket.create_connection((nodes.address, nodes.port), timeout=_CONNECT_SECONDS) as connected:
        connection = _Connection(connected)
        messages = _greeted(connection, nodes)
        connected.settimeout(_PAUSE_SECONDS)
        connection.send(me)
        here: list[str] = []
        while True:
            for message in messages:
                if "rank" in message:
                    return Place(message["rank"], message["port"])
                if "error" in message:
                    raise (ConfigError if message["setting"] else NodesMissing)(message["error"])
                here = message.get("here", here)
            if 0 < len(here) < nodes.count:
                waiting.for_nodes(here)
            else:
                waiting.for_first_node("no answer yet")
            messages = connection.receive()


def _greeted(connection: _Connection, nodes: Nodes) -> list[dict[str, Any]]:
    """Return the messages after the greeting of a launcher that gathers nodes."""
    deadline = time.monotonic() + _GREETING_SECONDS
    messages: list[dict[str, Any]] = []
    connection.socket.settimeout(_PAUSE_SECONDS)
    try:
        while not messages and time.monotonic() < deadline:
            messages = connection.receive()
    except ConnectionResetError:  # a launcher that is just ending, or a program that does not like us: look again
        raise
    except OSError:
        _taken(nodes)
    if messages[:1] != [_GREETING]:
        _taken(nodes)
    return messages[1:]


def _taken(nodes: Nodes) -> NoReturn:
    raise ConfigError(
        f"MASTER_PORT = {nodes.port} is taken by another program on {nodes.address}; name a free port of the first "
        f"node, the same on every node, such as MASTER_PORT={nodes.port + 1 if nodes.port < 65535 else 29500}"
    )


def addresses_of(nodes: Nodes) -> list[tuple[socket.AddressFamily, str]]:
    """Return the IP addresses of the first node.

    Raises:
        ConfigError: MASTER_ADDR has no address.
    """
    try:
        found = socket.getaddrinfo(nodes.address, nodes.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(
            f"MASTER_ADDR = {nodes.address!r} is not known on {nodes.here} ({error.strerror}); give the host name or "
            "IP address of the first node, the same on every node"
        ) from None
    return [(family, address[0]) for family, _, _, _, address in found]


def _is_this_machine(addresses: list[tuple[socket.AddressFamily, str]]) -> bool:
    """Return whether one of the addresses belongs to this machine: only such an address can be bound."""
    for family, address in addresses:
        with suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
            return True
    return False


def _listener(nodes: Nodes) -> socket.socket | None:
    """Return a socket that listens on the port of all networks of this machine; None if the port is taken."""
    try:
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", nodes.port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
        return socket.create_server(("", nodes.port), backlog=1024)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return None
        raise ConfigError(
            f"MASTER_PORT = {nodes.port} cannot be used on {nodes.here} ({error.strerror}); name a free port from 1024 "
            "up, the same on every node, such as MASTER_PORT=29500"
        ) from None


def _order(name: str, names: tuple[str, ...]) -> tuple[int, list[tuple[int, str]]]:
    """Return the key by which nodes get their ranks: the order of `names`, else numbers in names as numbers."""
    known = [_short(known) for known in names]
    index = known.index(_short(name)) if _short(name) in known else len(known)
    return index, [(int(digits or 0), text) for text, digits in re.findall(r"(\D*)(\d*)", name)]


def _missing(names: tuple[str, ...], here: list[str]) -> list[str]:
    come = {_short(name) for name in here}
    return [name for name in names if _short(name) not in come]


def _short(name: str) -> str:
    return name.partition(".")[0].lower()


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def _is_loopback(address: str) -> bool:
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
