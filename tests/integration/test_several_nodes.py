"""Law: nodes that cannot start together say so in sentences, those that can train; a batch job of Slurm ends in order.

Real launchers on this machine.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.distributed.pool import free_port
from tests.integration.test_launch import QUICK, ROOT, environment, losses
from tests.integration.test_launcher_killed import ranks_in
from tests.slow import slow
from trainer.stores.store import Store

# A launcher that prints its waiting line every second.
QUICK_LINES = (
    "import sys; from trainer.runtime import job_store, launch; job_store.LINE_SECONDS = 1.0; sys.exit(launch.main())"
)
CONFIG = f"--job.config_file={ROOT}/train_configs/debug_model.toml"


def node(rank: int, port: int, *arguments: str, **variables: str) -> subprocess.Popen:
    """The launcher of one of two nodes, the first one at localhost."""
    node_variables = {
        "NNODES": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "NODE_RANK": str(rank),
    } | variables
    return subprocess.Popen(
        [sys.executable, "-c", QUICK_LINES, "--nproc-per-node=1", *arguments],
        cwd=ROOT,
        env=environment(
            OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="ERROR", **node_variables
        ),  # as trainer/commands/ranks.py
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def said(process: subprocess.Popen, *, code: int, timeout: float = 60) -> list[str]:
    """The lines of a launcher that ended with `code`: none of C++, no trace."""
    out, err = process.communicate(timeout=timeout)
    assert process.returncode == code, err
    assert out == ""
    *waiting, last = err.splitlines()
    assert all(line.startswith("waiting for ") for line in waiting), err
    assert last.startswith("error: "), err
    return [*waiting, last]


@pytest.mark.slow
def test_a_missing_node_is_named_until_the_time_out() -> None:
    """On every node that is there. A node that has given up is missing again, and a signal ends the wait."""
    port = free_port()
    names = {"NNODES": "3", "NODE_NAMES": "node-a,node-b,node-c"}
    how = f"NNODES=3 MASTER_ADDR=localhost MASTER_PORT={port} and a NODE_RANK of its own"
    first = node(0, port, **names)
    assert re.fullmatch(
        rf"waiting for 2 of 3 nodes at localhost:{port} \(missing: NODE_RANK 1 \(node-b\), 2 \(node-c\)\), \d s of "
        rf"300 s; start the same command there with {how}\n",
        first.stderr.readline(),
    )
    last_node = node(2, port, **names)
    while "waiting for 1 of 3 nodes" not in (line := first.stderr.readline()):
        assert first.poll() is None
    one = f"1 of 3 nodes at localhost:{port} (missing: NODE_RANK 1 (node-b))"
    assert line.startswith(f"waiting for {one}, ")
    first.terminate()
    assert said(first, code=128 + signal.SIGTERM, timeout=10)[-1] == "error: stopped by SIGTERM"
    last_node.terminate()
    waiting = said(last_node, code=128 + signal.SIGTERM, timeout=10)
    assert all(line.startswith((f"waiting for {one}, ", "waiting for the first node at ")) for line in waiting[:-1])


@pytest.mark.slow
def test_the_time_out_is_told_on_every_node() -> None:
    port = free_port()
    nodes = [node(rank, port, "--start-timeout=2", NNODES="3") for rank in (0, 1)]
    lasts = [said(each, code=1)[-1] for each in nodes]
    assert lasts[0] == lasts[1]
    assert lasts[0].startswith(
        f"error: waited 2 s without success for 1 of 3 nodes at localhost:{port} (missing: NODE_RANK 2); "
    )


@pytest.mark.slow
def test_a_node_that_comes_seconds_later_trains(tmp_path: Path) -> None:
    """The ranks of the first node are the first ranks."""
    port = free_port()
    arguments = [CONFIG, *QUICK, f"--job.dump_folder={tmp_path}"]
    first = node(0, port, *arguments)
    assert first.stderr.readline().startswith(f"waiting for 1 of 2 nodes at localhost:{port} (missing: NODE_RANK 1)")
    late = node(1, port, *arguments)
    outputs = [process.communicate(timeout=120) for process in (first, late)]
    assert [first.returncode, late.returncode] == [0, 0], outputs
    assert "training done: 3 steps" in outputs[0][0]
    assert outputs[1] == ("", "")
    assert len(losses(tmp_path)) == 3


def test_a_port_that_another_program_has() -> None:
    with socket.create_server(("localhost", 0)) as other:
        port = other.getsockname()[1]
        process = node(1, port, "--start-timeout=100")
        connection, _ = other.accept()
        connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
        (line,) = said(process, code=2, timeout=20)
        connection.close()
    assert line.startswith(f"error: MASTER_PORT = {port} is taken by another program on localhost; name a free port")


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("NNODES=abc", "NNODES = 'abc' must be a whole number from 1 up, such as NNODES=2"),
        *slow(
            (
                "--nproc-per-node=0",
                "--nproc-per-node = '0' must be a whole number from 1 up, such as --nproc-per-node 2",
            )
        ),
    ],
)
def test_a_wrong_number(argument: str, message: str) -> None:
    variable = {} if argument.startswith("-") else dict([argument.split("=")])
    assert said(node(0, 29500, *([] if variable else [argument]), **variable), code=2) == [f"error: {message}"]


@pytest.mark.slow
def test_a_node_that_ends_before_its_ranks_start_ends_the_others() -> None:
    """The store of the job waits for it until the time-out: one sentence, without a trace."""
    port = free_port()
    first = node(0, port, "--start-timeout=5", CONFIG)
    assert first.stderr.readline()
    comes = "from trainer.runtime import job_store, nodes; job_store.open_store(nodes.Nodes(2, 1, port={}), 1, 9)"
    subprocess.run([sys.executable, "-c", comes.format(port)], check=True, cwd=ROOT)
    line = said(first, code=1)[-1]
    assert line.startswith("error: a node ended, or was cut off, before the ranks had started (")


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_a_launcher_of_two_nodes_is_killed(tmp_path: Path, killed: int) -> None:
    """Its ranks end with it, and so does the other node, in words; the first node has the store of the job."""
    port = free_port()
    arguments = [CONFIG, *QUICK, "--training.steps=100000", f"--job.dump_folder={tmp_path}"]
    nodes = [node(0, port, *arguments)]
    assert nodes[0].stderr.readline()  # it is the first node
    nodes.append(node(1, port, *arguments))
    while not (tmp_path / "metrics.jsonl").exists() or not losses(tmp_path):
        assert [process.poll() for process in nodes] == [None, None]
        time.sleep(0.2)
    nodes[killed].kill()
    nodes[killed].communicate()
    _, err = nodes[1 - killed].communicate(timeout=60)
    assert nodes[1 - killed].returncode == 1, err
    assert "error: the ranks of this node lost their peers; the cause is on another node" in err
    assert ("rank 1 went away without a word" if killed else "and the store of the job too") in err
    assert "Traceback" not in err
    assert ranks_in(tmp_path) == []


SRUN = """#!/usr/bin/env bash
# A stand-in for srun: one task per node, all on this machine.
printf '%s\\n' "$@" > "$SLURM_SUBMIT_DIR/srun_arguments"
while [[ "$1" == --* ]]; do shift; done
for rank in 1 0; do
  SLURM_NODEID="$rank" "$@" &
  echo $! >> "$SLURM_SUBMIT_DIR/tasks"
done
code=0
for task in $(jobs -p); do wait "$task" || code=$?; done
exit "$code"
"""
SCONTROL = """#!/usr/bin/env bash
[ "$*" = "show hostnames node-[1-2]" ] && printf "%s\\n" localhost node-2
"""


@pytest.fixture
def slurm(tmp_path: Path) -> Path:
    """A folder from which a job was submitted, with stand-ins for the commands of Slurm."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    script = tmp_path / "run_llama_train.sh"
    script.write_text(f'#!/usr/bin/env bash\nexec "{ROOT}/run_llama_train.sh" "$@"\n')
    script.chmod(0o755)
    return tmp_path


def batch_job(folder: Path, *arguments: str) -> subprocess.Popen:
    """The batch script, as Slurm starts it from a copy of its own."""
    shutil.copy(ROOT / "multinode_trainer.slurm", folder / "slurm_script")
    variables = {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "12",
        "SLURM_JOB_NODELIST": "node-[1-2]",
        "SLURM_JOB_CPUS_PER_NODE": "96(x1),64",
        "SLURM_SUBMIT_DIR": str(folder),
        "MASTER_PORT": str(free_port()),
        "NGPU": "1",
    }
    return subprocess.Popen(
        ["bash", str(folder / "slurm_script"), *arguments],
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_a_batch_job_is_stopped_in_good_order(slurm: Path) -> None:
    """SIGTERM to the batch shell and to every process of the tasks: the step is finished and saved."""
    out_folder = slurm / "out"
    arguments = [*QUICK, "--training.steps=100000", "--checkpoint.enable", f"--job.dump_folder={out_folder}"]
    job = batch_job(slurm, *arguments)
    while not (out_folder / "metrics.jsonl").exists() or not losses(out_folder):
        assert job.poll() is None, job.communicate()
        time.sleep(0.2)
    job.terminate()
    tasks = [int(pid) for pid in (slurm / "tasks").read_text().split()]
    for pid in (*tasks, *ranks_in(out_folder)):
        os.kill(pid, signal.SIGTERM)
    out, err = job.communicate(timeout=60)
    assert job.returncode == 0, err
    steps = len(losses(out_folder))
    assert f"stopped by SIGTERM after step {steps}" in out
    assert Store(out_folder / "checkpoint").steps() == [steps]
    assert err.splitlines() == ["SIGTERM: stopping after this step; a second signal ends the run at once"]
    options = (slurm / "srun_arguments").read_text().splitlines()
    assert options[:2] == ["--cpus-per-task=64", "--kill-on-bad-exit=0"]
