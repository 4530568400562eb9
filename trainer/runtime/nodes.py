"""The nodes of a job, as variables name them. Torch-free, so that a wrong value is refused at once."""

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from trainer.config.errors import ConfigError

_DEFAULT_JOB = "trainer"
_HIGHEST_PORT = 65535


@dataclass(frozen=True)
class Nodes:
    """The nodes of one job and where they meet.

    count: nodes of the job; address, port: the first node; job: the job's name, which keeps two jobs apart;
    names: the host names of all nodes in the order of their ranks, if they are known; here: the name of this node.
    """

    count: int = 1
    address: str = "localhost"
    port: int = 29500
    job: str = _DEFAULT_JOB
    names: tuple[str, ...] = ()
    here: str = ""

    @classmethod
    def from_environment(cls, variables: Mapping[str, str]) -> "Nodes":
        """Read NNODES, MASTER_ADDR, MASTER_PORT, RDZV_ID and NODE_NAMES; an empty variable counts as missing.

        Raises:
            ConfigError: a value is wrong, or several nodes have no MASTER_ADDR.
        """
        given = {name: value.strip() for name, value in variables.items() if value.strip()}
        count = whole_number("NNODES", given.get("NNODES", "1"), such_as="NNODES=2")
        port = whole_number("MASTER_PORT", given.get("MASTER_PORT", "29500"), such_as="MASTER_PORT=29500")
        if port > _HIGHEST_PORT:
            raise ConfigError(f"MASTER_PORT = {port} must be at most {_HIGHEST_PORT}, such as MASTER_PORT=29500")
        if count > 1 and "MASTER_ADDR" not in given:
            raise ConfigError(
                f"NNODES = {count} needs MASTER_ADDR, the host name or IP address of the first node, the same on every "
                f"node, such as MASTER_ADDR={socket.gethostname()} if this is the first node"
            )
        address = given.get("MASTER_ADDR", "localhost")
        if not re.fullmatch(r"[\w.:-]+", address):
            raise ConfigError(
                f"MASTER_ADDR = {address!r} must be one host name or IP address, such as MASTER_ADDR=node-a"
            )
        names = tuple(name.strip() for name in given.get("NODE_NAMES", "").split(",") if name.strip())
        if names and len(names) != count:
            raise ConfigError(
                f"NODE_NAMES = {given['NODE_NAMES']!r} has {len(names)} names, but NNODES = {count}; name each "
                "node once"
            )
        here = given.get("SLURMD_NODENAME", socket.gethostname())  # Slurm's own name of this node, if Slurm starts it
        return cls(count, address, port, given.get("RDZV_ID", _DEFAULT_JOB), names, here)

    @property
    def place(self) -> str:
        """The address and port of the first node, `[...]:port` for IPv6."""
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"

    @property
    def command(self) -> str:
        """The variables with which the other nodes start the same command."""
        job = f" RDZV_ID={self.job}" if self.job != _DEFAULT_JOB else ""
        return f"NNODES={self.count} MASTER_ADDR={self.address} MASTER_PORT={self.port}{job}"


def whole_number(name: str, text: str, *, such_as: str) -> int:
    """Return the number from 1 up that `text` spells.

    Raises:
        ConfigError: it spells another number, or none.
    """
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < 1:
        raise ConfigError(f"{name} = {text!r} must be a whole number from 1 up, such as {such_as}")
    return int(text)
