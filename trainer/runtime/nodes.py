"""The nodes of a job, as variables name them. Torch-free, so that a wrong value is refused at once."""

import os
import re
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from trainer.config.errors import ConfigError

_DEFAULT_JOB = "trainer"
_HIGHEST_PORT = 65535
_RANKS = ("NODE_RANK", "GROUP_RANK", "SLURM_NODEID")


@dataclass(frozen=True)
class Nodes:
    """The nodes of one job.

    Attributes:
        count: Number of nodes.
        rank: Rank of this node.
        address: Address of the first node.
        port: Port of the first node.
        job: The job's name, which distinguishes two jobs at one address.
        names: Host names of all nodes in the order of ranks, if known.
        here: Name of this node.
    """

    count: int = 1
    rank: int = 0
    address: str = "localhost"
    port: int = 29500
    job: str = _DEFAULT_JOB
    names: tuple[str, ...] = ()
    here: str = ""

    @classmethod
    def from_environment(cls, variables: Mapping[str, str] = os.environ) -> "Nodes":
        """Return the nodes that NNODES, MASTER_ADDR, MASTER_PORT, RDZV_ID and NODE_NAMES describe.

        If there are several nodes, the rank of this node is NODE_RANK, GROUP_RANK or SLURM_NODEID. An empty variable
        counts as missing.

        Args:
            variables: Environment variables.

        Raises:
            ConfigError: A value is wrong, or several nodes have no MASTER_ADDR or rank.
        """
        values = {name: value.strip() for name, value in variables.items() if value.strip()}
        count = whole_number("NNODES", values.get("NNODES", "1"), such_as="NNODES=2")
        port = whole_number(
            "MASTER_PORT", values.get("MASTER_PORT", "29500"), such_as="MASTER_PORT=29500"
        )
        if port > _HIGHEST_PORT:
            raise ConfigError(
                f"MASTER_PORT = {port} must be at most {_HIGHEST_PORT}, such as MASTER_PORT=29500"
            )
        if count > 1 and "MASTER_ADDR" not in values:
            raise ConfigError(
                f"NNODES = {count} needs MASTER_ADDR, the host name or IP address of the first node, the same on every "
                f"node, such as MASTER_ADDR={socket.gethostname()} if this is the first node"
            )
        address = values.get("MASTER_ADDR", "localhost")
        if not re.fullmatch(r"[\w.:-]+", address):
            raise ConfigError(
                f"MASTER_ADDR = {address!r} must be one host name or IP address, such as MASTER_ADDR=node-a"
            )
        names = tuple(filter(None, map(str.strip, values.get("NODE_NAMES", "").split(","))))
        if names and len(names) != count:
            raise ConfigError(
                f"NODE_NAMES = {values['NODE_NAMES']!r} has {len(names)} names, but NNODES = {count}; name each "
                "node once"
            )
        rank = _rank(values, count) if count > 1 else 0
        # Slurm's own name of this node, if Slurm starts it
        here = values.get("SLURMD_NODENAME", socket.gethostname())
        return cls(count, rank, address, port, values.get("RDZV_ID", _DEFAULT_JOB), names, here)

    @property
    def place(self) -> str:
        """The address and port of the first node, `[...]:port` for IPv6."""
        return (
            f"[{self.address}]:{self.port}"
            if ":" in self.address
            else f"{self.address}:{self.port}"
        )

    @property
    def command(self) -> str:
        """The variables with which the other nodes start the same command."""
        job = f" RDZV_ID={self.job}" if self.job != _DEFAULT_JOB else ""
        return f"NNODES={self.count} MASTER_ADDR={self.address} MASTER_PORT={self.port}{job} and a NODE_RANK of its own"

    def named(self, rank: int) -> str:
        """Return the rank of a node, with its name if that is known.

        Args:
            rank: Rank of the node.
        """
        return f"{rank} ({self.names[rank]})" if self.names else str(rank)

    def check_address(self) -> None:
        """Check that MASTER_ADDR is known here. On the first node it must be an address of this machine.

        Raises:
            ConfigError: MASTER_ADDR is unknown, or on the first node it is no address of this machine.
        """
        try:
            addresses = socket.getaddrinfo(self.address, self.port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise ConfigError(
                f"MASTER_ADDR = {self.address!r} is not known on {self.here} ({error.strerror}); give the "
                "host name or IP address of the first node, the same on every node"
            ) from None
        if self.rank == 0 and not any(
            _is_ours(family, address[0]) for family, _, _, _, address in addresses
        ):
            raise ConfigError(
                f"MASTER_ADDR = {self.address!r} is no address of {self.here}, which has NODE_RANK = 0; "
                "NODE_RANK=0 belongs on the node of MASTER_ADDR"
            )


def _rank(values: Mapping[str, str], count: int) -> int:
    name = next((name for name in _RANKS if name in values), None)
    if name is None:
        raise ConfigError(
            f"NNODES = {count} needs NODE_RANK on each node (or {', '.join(_RANKS[1:])}): NODE_RANK=0 on the node of "
            f"MASTER_ADDR, up to NODE_RANK={count - 1}"
        )
    text = values[name]
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) >= count:
        raise ConfigError(
            f"{name} = {text!r} must be a number from 0 to {count - 1}, because NNODES = {count}"
        )
    return int(text)


def _is_ours(family: socket.AddressFamily, address: str) -> bool:
    """Return whether an address belongs to this machine: only such an address can be bound."""
    with suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
        return True
    return False


def ranks_of_each_node(variables: Mapping[str, str], world_size: int) -> int | None:
    """Return the ranks per node, by the launcher's variables. None without them, or if nodes differ.

    Every rank returns the same number: all ranks use it to choose how attention is spread.

    Args:
        variables: Environment variables.
        world_size: Number of all ranks.
    """
    here, nodes = (variables.get(name, "") for name in ("LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"))
    is_equal = here.isdecimal() and nodes.isdecimal() and int(here) * int(nodes) == world_size
    return int(here) if is_equal else None


def whole_number(name: str, text: str, *, such_as: str) -> int:
    """Return the number from 1 up that `text` spells.

    Args:
        name: Name of the setting, for the message.
        text: The text.
        such_as: An example, for the message.

    Raises:
        ConfigError: The text spells no such number.
    """
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < 1:
        raise ConfigError(
            f"{name} = {text!r} must be a whole number from 1 up, such as {such_as}"
        )
    return int(text)
