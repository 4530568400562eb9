"""The variables of a job on several nodes: what they mean, and one sentence for each wrong value, without torch."""

import socket
import subprocess
import sys
from dataclasses import replace

import pytest

from trainer.config.errors import ConfigError
from trainer.runtime.nodes import Nodes

TWO = {"NNODES": "2", "MASTER_ADDR": "node-a", "NODE_RANK": "1"}


def test_what_the_variables_mean() -> None:
    alone = Nodes.from_environment({"NNODES": "", "MASTER_PORT": " "})  # an empty variable is a missing one
    assert alone == Nodes(1, 0, "localhost", 29500, "trainer", (), socket.gethostname())
    variables = {"MASTER_PORT": "80", "RDZV_ID": "7", "NODE_NAMES": "node-a, node-b,", "SLURMD_NODENAME": "node-b"}
    nodes = Nodes.from_environment(TWO | variables)
    assert nodes == Nodes(2, 1, "node-a", 80, "7", ("node-a", "node-b"), "node-b")
    assert nodes.command == "NNODES=2 MASTER_ADDR=node-a MASTER_PORT=80 RDZV_ID=7 and a NODE_RANK of its own"
    assert [nodes.named(1), replace(nodes, names=()).named(1)] == ["1 (node-b)", "1"]
    assert Nodes.from_environment(TWO).command.startswith("NNODES=2 MASTER_ADDR=node-a MASTER_PORT=29500 and ")
    assert Nodes.from_environment(TWO | {"MASTER_ADDR": "fe80::1"}).place == "[fe80::1]:29500"


@pytest.mark.parametrize("name", ["NODE_RANK", "GROUP_RANK", "SLURM_NODEID"])
def test_the_rank_of_a_node(name: str) -> None:
    variables = {"NNODES": "3", "MASTER_ADDR": "node-a"}
    later = {"SLURM_NODEID": "0"} if name != "SLURM_NODEID" else {}
    assert Nodes.from_environment(variables | later | {name: "2"}).rank == 2
    assert Nodes.from_environment({name: "2"}).rank == 0  # one node, in a job of Slurm's with more of them


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        *(
            ({"NNODES": value}, f"NNODES = {value!r} must be a whole number from 1 up, such as NNODES=2")
            for value in ("abc", "0", "-1", "2.0", "1_0", "²")
        ),
        ({"MASTER_PORT": "abc"}, "MASTER_PORT = 'abc' must be a whole number from 1 up, such as MASTER_PORT=29500"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT = 99999 must be at most 65535, such as MASTER_PORT=29500"),
        (
            {"NNODES": "2"},
            "NNODES = 2 needs MASTER_ADDR, the host name or IP address of the first node, the same on every node, such "
            f"as MASTER_ADDR={socket.gethostname()} if this is the first node",
        ),
        (
            TWO | {"MASTER_ADDR": "node-a,node-b"},
            "MASTER_ADDR = 'node-a,node-b' must be one host name or IP address, such as MASTER_ADDR=node-a",
        ),
        (
            {"NNODES": "2", "MASTER_ADDR": "node-a"},
            "NNODES = 2 needs NODE_RANK on each node (or GROUP_RANK, SLURM_NODEID): NODE_RANK=0 on the node of "
            "MASTER_ADDR, up to NODE_RANK=1",
        ),
        *(
            (TWO | {"NODE_RANK": value}, f"NODE_RANK = {value!r} must be a number from 0 to 1, because NNODES = 2")
            for value in ("2", "-1", "a")
        ),
        (TWO | {"NODE_NAMES": "a,b,c"}, "NODE_NAMES = 'a,b,c' has 3 names, but NNODES = 2; name each node once"),
    ],
)
def test_a_wrong_value_is_one_sentence(variables: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Nodes.from_environment(variables)
    assert str(raised.value) == message


def test_nodes_are_torch_free() -> None:
    code = "import sys, trainer.runtime.nodes; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
