"""Law: nodes that cannot start together say so in sentences, those that can train; a batch job of Slurm ends in order.

Real launchers on this machine, named by the variable with which Slurm names a node.
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
from trainer.checkpoint.store import LocalStore

# A launcher that prints its waiting line every second.
QUICK_LINES = (
    "import sys; from trainer.runtime import launch, meeting; meeting.LINE_SECONDS = 1.0; sys.exit(launch.main())"
)
CONFIG = f"--job.config_file={ROOT}/train_configs/debug_model.toml"


def node(name: str, port: int, *arguments: str, **variables: str) -> subprocess.Popen:
    """The launcher of one of two nodes that meet at localhost."""
    given = {"NNODES": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "SLURMD_NODENAME": name} | variables
    return subprocess.Popen(
        [sys.executable, "-c", QUICK_LINES, "--nproc-per-node=1", *arguments],
        cwd=ROOT,
        env=environment(OMP_NUM_THREADS="1", **given),
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


def test_a_missing_node_is_named_until_the_time_out() -> None:
    """On every node that is there. A node that has given up is missing again, and a signal ends the wait."""
    port = free_port()
    names = {"NNODES": "3", "NODE_NAMES": "node-a,node-b,node-c"}
    how = f"NNODES=3 MASTER_ADDR=localhost MASTER_PORT={port}"
    first = node("node-a", port, **names)
    assert re.fullmatch(
        r"waiting for 2 of 3 nodes \(here: node-a; missing: node-b, node-c; localhost is reached from this machine "
        rf"only\) at localhost:{port}, \d s of 300 s; start the same command there with {how}\n",
        first.stderr.readline(),
    )
    *waiting, last = said(node("node-c", port, "--start-timeout=3", **names), code=1)
    two = "1 of 3 nodes {}(here: node-a, node-c; missing: node-b; localhost is reached from this machine only)"
    assert last == (
        f"error: {two.format(f'did not come to localhost:{port} within 3 s ')}; "
        f"the same command must run on every node with {how}"
    )
    assert waiting
    assert all(line.startswith(f"waiting for {two.format('')} at localhost:{port}, ") for line in waiting)
    while "waiting for 2 of 3 nodes (here: node-a; missing" not in first.stderr.readline():
        assert first.poll() is None
    first.terminate()
    assert said(first, code=128 + signal.SIGTERM, timeout=10)[-1] == "error: stopped by SIGTERM"


@pytest.mark.slow
def test_a_node_that_comes_seconds_later_trains(tmp_path: Path) -> None:
    """The ranks of the first node are the first ranks."""
    port = free_port()
    arguments = [CONFIG, *QUICK, f"--job.dump_folder={tmp_path}"]
    first = node("node-b", port, *arguments, NODE_NAMES="node-b,node-a")
    assert first.stderr.readline().startswith("waiting for 1 of 2 nodes (here: node-b; missing: node-a;")
    late = node("node-a", port, *arguments, NODE_NAMES="node-b,node-a")
    outputs = [process.communicate(timeout=120) for process in (first, late)]
    assert [first.returncode, late.returncode] == [0, 0], outputs
    assert "training done: 3 steps" in outputs[0][0]
    assert outputs[1] == ("", "")
    assert len(losses(tmp_path)) == 3


def test_a_port_that_another_program_has() -> None:
    with socket.create_server(("localhost", 0)) as other:
        port = other.getsockname()[1]
        process = node("node-a", port, "--start-timeout=100")
        connection, _ = other.accept()
        connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
        (line,) = said(process, code=2, timeout=20)
        connection.close()
    assert line.startswith(f"error: MASTER_PORT = {port} is taken by another program on localhost; name a free port")


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--nnodes=abc", "NNODES = 'abc' must be a whole number from 1 up, such as NNODES=2"),
        *slow(
            (
                "--nproc-per-node=0",
                "--nproc-per-node = '0' must be a whole number from 1 up, such as --nproc-per-node 2",
            )
        ),
    ],
)
def test_a_wrong_number(argument: str, message: str) -> None:
    assert said(node("node-a", 29500, argument), code=2) == [f"error: {message}"]


@pytest.mark.slow
def test_a_node_that_ends_after_the_meeting_ends_the_others() -> None:
    """The store of the job waits for it until the time-out: one sentence, without a trace."""
    port = free_port()
    first = node("node-a", port, "--start-timeout=5", CONFIG)
    assert first.stderr.readline()
    meets = "from trainer.runtime import meeting, nodes; meeting.meet(nodes.Nodes(2, port={}, here='b'), 1, 9, None)"
    subprocess.run([sys.executable, "-c", meets.format(port)], check=True, cwd=ROOT)
    line = said(first, code=1)[-1]
    assert line.startswith("error: a node ended, or was cut off, before the ranks had started (")


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_a_launcher_of_two_nodes_is_killed(tmp_path: Path, killed: int) -> None:
    """Its ranks end with it, and so does the other node, in words; the first node has the store of the job."""
    port = free_port()
    arguments = [CONFIG, *QUICK, "--training.steps=100000", f"--job.dump_folder={tmp_path}"]
    nodes = [node("node-a", port, *arguments)]
    assert nodes[0].stderr.readline()  # it is the first node
    nodes.append(node("node-b", port, *arguments))
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
for name in localhost node-2; do
  SLURMD_NODENAME="$name" "$@" &
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
    assert LocalStore(out_folder / "checkpoint").steps() == [steps]
    assert err.splitlines() == ["SIGTERM: stopping after this step; a second signal ends the run at once"]
    options = (slurm / "srun_arguments").read_text().splitlines()
    assert options[:2] == ["--cpus-per-task=64", "--kill-on-bad-exit=0"]
