"""Laws of deploy/: every key of a file exists for its scheduler and for this program, and every shell script runs.

Schedulers are not here. Their schemas come from packages; stand-ins for their commands write down their arguments.
"""

import copy
import importlib
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts import spot
from trainer.commands.main import COMMANDS
from trainer.config.keys import keys_of
from trainer.config.schema import JobConfig

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
SCRIPTS = sorted([*DEPLOY.glob("*.sh"), *DEPLOY.glob("*.sbatch")])
MANIFESTS = {
    "jobset.yaml": ("jobset_v1alpha2_job_set", "JobsetV1alpha2JobSet"),
    "trainjob.yaml": ("trainer_v1alpha1_train_job", "TrainerV1alpha1TrainJob"),
}
LONGEST_PAGE = 90


def content(name: str) -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / name).read_text())


def lost(written: Any, read: Any, place: str = "") -> Iterator[str]:
    """Yield the places of a manifest that a model of its API does not keep: it knows no such key."""
    if isinstance(written, dict):
        for key, value in written.items():
            yield from lost(value, (read or {}).get(key), f"{place}.{key}")
    elif isinstance(written, list):
        for number, value in enumerate(written):
            yield from lost(value, (read or [])[number : number + 1] and read[number], f"{place}[{number}]")
    elif written != read:
        yield place


def check_manifest(name: str, manifest: dict[str, Any]) -> None:
    """Raise an error if the API has no such key, lacks one, or takes another type."""
    module, kind = MANIFESTS[name]
    model = getattr(importlib.import_module(f"kubeflow_trainer_api.models.{module}"), kind)
    assert [*lost(manifest, model.from_dict(copy.deepcopy(manifest)).to_dict())] == []


@pytest.mark.parametrize("name", MANIFESTS)
def test_every_key_of_a_manifest_exists(name: str) -> None:
    check_manifest(name, content(name))


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("jobset.yaml", "maxRestarts: 100", "maxRestart: 100"),
        ("jobset.yaml", "parallelism: 2 ", "parallelism: two "),
        ("jobset.yaml", "mountPath: /runs", "mountpath: /runs"),
        ("jobset.yaml", "fieldPath:", "fieldpath:"),
        ("trainjob.yaml", "numNodes: 2", "numnodes: 2"),
        ("trainjob.yaml", "numProcPerNode: 8", "numProcPerNode: [8]"),
        ("trainjob.yaml", "runtimeRef:", "runtime:"),
        ("trainjob.yaml", "medium: Memory", "media: Memory"),
    ],
)
def test_a_wrong_key_of_a_manifest_is_seen(name: str, old: str, new: str) -> None:
    text = (DEPLOY / name).read_text()
    assert old in text
    with pytest.raises((AssertionError, ValueError, TypeError)):
        check_manifest(name, yaml.safe_load(text.replace(old, new)))


def test_the_task_of_skypilot_has_the_schema_of_skypilot() -> None:
    schemas = pytest.importorskip("sky.utils.schemas", reason="skypilot is not installed; it is large")
    jsonschema = pytest.importorskip("jsonschema")
    task = content("skypilot.yaml")
    jsonschema.validate(task, schemas.get_task_schema())
    jsonschema.validate(task["resources"], schemas.get_resources_schema())


# ---- the program that they start


def pod_of(name: str) -> dict[str, Any]:
    spec = content(name)["spec"]
    jobs = (
        spec.get("replicatedJobs")
        or spec["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    )
    return jobs[0]["template"]["spec"]["template"]["spec"]


def commands() -> dict[str, list[str]]:
    """The words of `lct ...` of each file."""
    (container,) = pod_of("jobset.yaml")["containers"]
    shells = {
        "trainjob.yaml": content("trainjob.yaml")["spec"]["trainer"]["command"][-1],
        "skypilot.yaml": content("skypilot.yaml")["run"],
        "slurm_container.sbatch": (DEPLOY / "slurm_container.sbatch").read_text(),
    }
    texts = {name: re.search(r"lct (train (?:\\\n|[^&\n])*)", text)[1] for name, text in shells.items()}
    return {"jobset.yaml": container["args"]} | {name: shlex.split(text) for name, text in texts.items()}


@pytest.mark.parametrize("name", commands())
def test_the_command_is_one_of_this_program_and_resumes(name: str) -> None:
    command, preset, *options = commands()[name]
    assert command in COMMANDS
    assert (ROOT / "train_configs" / f"{preset}.toml").exists()
    keys = [option.removeprefix("--") for option in options if option.startswith("--")]
    assert {"checkpoint.enable", "job.dump_folder"} <= {*keys}
    assert {*keys} <= {*keys_of(JobConfig)}


def test_the_nodes_of_a_jobset_are_one_number_and_the_first_pod_has_the_address() -> None:
    jobset = content("jobset.yaml")
    (job,) = jobset["spec"]["replicatedJobs"]
    (container,) = pod_of("jobset.yaml")["containers"]
    variables = {variable["name"]: variable.get("value") for variable in container["env"]}
    nodes = job["template"]["spec"]
    assert nodes["parallelism"] == nodes["completions"] == int(variables["NNODES"])
    assert int(variables["NGPU"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    name, group = jobset["metadata"]["name"], job["name"]
    assert variables["MASTER_ADDR"] == f"{name}-{group}-0-0.{name}"
    assert jobset["spec"]["network"]["enableDNSHostnames"]
    page = (ROOT / "docs" / "several_nodes.md").read_text()
    assert all(f"| `{variable}` |" in page for variable in variables)


@pytest.mark.parametrize("name", MANIFESTS)
def test_volumes_are_mounted_and_the_script_comes_from_the_config_map(name: str) -> None:
    pod = pod_of(name)
    mounted = {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    (script,) = [volume["configMap"]["name"] for volume in pod["volumes"] if "configMap" in volume]
    assert (
        f"kubectl create configmap {script} --from-file=deploy/resumable.sh"
        in (ROOT / "docs" / "clouds.md").read_text()
    )


# ---- shell


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_has_nothing_to_say(path: Path) -> None:
    checker = Path(sys.executable).parent / "shellcheck"
    done = subprocess.run([checker, path], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
    bad = subprocess.run([checker, "-s", "bash", "-"], input="cd $1\n", capture_output=True, text=True)
    assert bad.returncode == 1


def stand_in(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/bash\n{text}\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize(
    ("script", "variables"),
    [
        (
            lambda: content("skypilot.yaml")["run"],
            {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_GPUS_PER_NODE": "8"}
            | {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_TASK_ID": "sky-1"}
            | content("skypilot.yaml")["envs"],
        ),
        (
            lambda: content("trainjob.yaml")["spec"]["trainer"]["command"][-1],
            {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "8", "PET_MASTER_ADDR": "10.0.0.1"},
        ),
    ],
    ids=["skypilot", "trainjob"],
)
def test_the_shell_of_a_file_gives_the_launcher_its_variables(tmp_path: Path, script: Any, variables: dict) -> None:
    (tmp_path / "deploy").symlink_to(DEPLOY)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    prints = 'echo "$NNODES $NODE_RANK $NGPU $MASTER_ADDR $@"'
    stand_in(tmp_path / ".venv" / "bin", "lct", prints)
    text = script().replace("/deploy/resumable.sh", str(DEPLOY / "resumable.sh")).replace(" deploy/", f" {DEPLOY}/")
    text = text.replace(str(DEPLOY) + str(DEPLOY), str(DEPLOY))
    path = f"{tmp_path / '.venv' / 'bin'}:/usr/bin:/bin"
    done = subprocess.run(
        ["bash", "-eu", "-c", text], cwd=tmp_path, env={"PATH": path, **variables}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2 1 8 10.0.0.1 train llama3_8b_long --checkpoint.enable")


PROGRAM = """
import signal, sys, time
def stop(number, frame):
    print("saved", signal.Signals(number).name, flush=True)
    sys.exit(int(sys.argv[1]))
for name in sys.argv[2:]:
    signal.signal(signal.Signals[name], stop)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("sent", "arrives", "code", "ends"),
    [
        ("SIGTERM", "SIGTERM", 0, 143),
        ("SIGINT", "SIGTERM", 0, 143),
        ("SIGHUP", "SIGHUP", 0, 129),
        ("SIGUSR1", "SIGUSR1", 0, 138),
        ("SIGUSR2", "SIGUSR2", 0, 140),
        ("SIGTERM", "SIGTERM", 1, 1),
    ],
)
def test_a_stopped_program_is_not_taken_for_done(sent: str, arrives: str, code: int, ends: int) -> None:
    command = ["bash", DEPLOY / "resumable.sh", sys.executable, "-c", PROGRAM, str(code), arrives]
    # A shell cannot trap a signal that its parent ignores, as a shell's background processes ignore SIGINT.
    heard = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **heard) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.Signals[sent])
        assert process.communicate(timeout=20)[0] == f"saved {arrives}\n"
    assert process.returncode == ends


@pytest.mark.parametrize("code", [0, 2])
def test_a_program_without_a_signal_keeps_its_exit_code(code: int) -> None:
    command = ["bash", str(DEPLOY / "resumable.sh"), "bash", "-c", f"exit {code}"]
    assert subprocess.run(command).returncode == code


# ---- Slurm


@pytest.mark.parametrize("stops", [True, False], ids=["time limit", "done"])
def test_the_batch_script_stops_its_steps_and_queues_the_job_again(tmp_path: Path, stops: bool) -> None:
    calls = tmp_path / "calls"
    stand_in(tmp_path, "scontrol", f'[ "$1" = show ] && printf "a\\nb\\n" || echo "scontrol $@" >> {calls}')
    stand_in(tmp_path, "scancel", f'echo "scancel $@" >> {calls}; kill -TERM $(cat {tmp_path}/step)')
    wait = "sleep 60 & child=$!; trap 'kill $child; exit 0' TERM; wait $child" if stops else "exit 0"
    stand_in(
        tmp_path,
        "srun",
        f'echo "srun $NNODES $MASTER_ADDR $NODE_NAMES $@" >> {calls}; echo $$ > {tmp_path}/step; {wait}',
    )
    job = {"SLURM_JOB_NODELIST": "a,b", "SLURM_JOB_ID": "7", "SLURM_JOB_CPUS_PER_NODE": "96(x2)"}
    job |= {"SLURM_SUBMIT_DIR": str(ROOT), "IMAGE": "image.sqsh", "PATH": f"{tmp_path}:/usr/bin:/bin"}
    process = subprocess.Popen(["bash", DEPLOY / "slurm_container.sbatch", "--training.steps", "9"], env=job)
    deadline = time.monotonic() + 20
    while not (tmp_path / "step").exists() or not (tmp_path / "step").read_text().strip():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    if stops:
        time.sleep(0.3)  # the step has set its handler
        process.send_signal(signal.SIGUSR1)
    assert process.wait(timeout=20) == 0
    first, *later = calls.read_text().splitlines()
    assert first.startswith("srun 2 a a,b --cpus-per-task=96 ")
    assert "--container-image=image.sqsh" in first
    assert first.endswith("--checkpoint.enable --job.dump_folder outputs/long --training.steps 9")
    assert later == (["scancel --signal=TERM 7", "scontrol requeue 7"] if stops else [])


def test_the_batch_script_needs_an_image() -> None:
    done = subprocess.run(
        ["bash", DEPLOY / "slurm_container.sbatch"], env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "IMAGE is not set: name an image" in done.stderr


# ---- the page


def test_the_page_names_every_file() -> None:
    page = (ROOT / "docs" / "clouds.md").read_text()
    assert len(page.splitlines()) <= LONGEST_PAGE
    assert all(f"deploy/{path.name}" in page for path in DEPLOY.iterdir())
    shown = re.findall(r"(?m)^    (SIG\w+) after step (\d+): exit code (-?\d+), the last", page)
    assert [(int(step), name) for name, step, _ in shown] == spot.stops(0)
    assert [int(code) for *_, code in shown] == [143, 140, -signal.SIGKILL]
    assert all("change:" in (DEPLOY / name).read_text() for name in (*MANIFESTS, "skypilot.yaml"))
