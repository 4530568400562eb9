"""Runs of `lct train` and of the peers with the same settings, for scripts/benchmarks/peers.py."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lct_planner.estimate import estimate
from lct_planner.timing import device
from lct_planner.worker import Worker
from scripts.benchmarks.peers_data import BETAS, DPO_BETA, EPS, LR, MAX_NORM
from scripts.benchmarks.start import cpu_seconds

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "examples" / "about_itself.jsonl"
_POLL_SECONDS = 0.02
ROWS = 2
"""Sequences of a step, over all ranks."""
LAYOUTS = {"1 rank": (1, 1), "FSDP 2": (2, 1), "CP 2": (2, 2)}
"""Ranks and context-parallel degree."""


@dataclass(frozen=True)
class Case:
    """A kind of fine-tuning.

    Attributes:
        preset: Preset of `lct train`.
        arguments: Further arguments of `lct train`.
        seq_len: Tokens of a sequence of `lct train`. About 90 % of it is filled, as of the batches of the peers.
        peers: Names of the peers, as in peers_loops.py.
    """

    preset: str
    arguments: tuple[str, ...]
    seq_len: int
    peers: tuple[str, ...]


CASES = {
    "sft": Case("sft", (), 224, ("transformers", "TRL SFTTrainer")),
    "lora": Case("lora", ("--lora.rank=16", "--lora.alpha=32"), 224, ("peft",)),
    "dpo": Case(
        "sft",
        ("--training.dataset=preferences", f"--dpo.beta={DPO_BETA}", "--dpo.reference=copy"),
        304,
        ("TRL DPOTrainer",),
    ),
}


@dataclass(frozen=True)
class Setting:
    """What all contenders of a case have in common.

    Attributes:
        name: Name of the case.
        model: Folder of the model.
        data: File that `lct train` reads.
        folder: Folder for everything that the contenders write.
        steps: Number of steps.
        seq_len: Tokens of a sequence of `lct train`.
        threads: Threads of a contender.
    """

    name: str
    model: Path
    data: Path
    folder: Path
    steps: int
    seq_len: int
    threads: int

    def arguments(self, layout: str, dtype: str = "float32") -> list[str]:
        """Return the arguments of `lct train`, behind its preset.

        Args:
            layout: A name of `LAYOUTS`.
            dtype: Data type of weights and computation.
        """
        ranks, degree = LAYOUTS[layout]
        return [
            f"--model.path={self.model}",
            f"--training.dataset_path={self.data}",
            f"--training.steps={self.steps}",
            f"--training.seq_len={self.seq_len}",
            f"--training.local_batch_size={ROWS * degree // ranks}",
            f"--training.global_batch_size={ROWS}",
            "--training.data_streams=1",
            f"--training.dtype={dtype}",
            f"--training.max_norm={MAX_NORM}",
            f"--parallelism.context_parallel_degree={degree}",
            f"--optimizer.lr={LR}",
            f"--optimizer.beta1={BETAS[0]}",
            f"--optimizer.beta2={BETAS[1]}",
            f"--optimizer.eps={EPS}",
            "--lr_scheduler.warmup_steps=0",
            "--lr_scheduler.decay_ratio=0",
            "--activation_checkpoint.mode=none",
            "--job.device=cpu",
            *CASES[self.name].arguments,
        ]


# ---- contenders


class Usage(NamedTuple):
    """What a program used.

    Attributes:
        peak_gib: The largest resident size of its largest process, GiB.
        cpu: CPU seconds of all its processes, read when it wrote each line of the watched file.
    """

    peak_gib: float
    cpu: list[float]


def run(command: Sequence[str], threads: int, log: Path, watched: Path = Path(os.devnull)) -> Usage:
    """Run a program.

    Args:
        command: Its words.
        threads: Threads of each of its processes.
        log: File for what it prints.
        watched: File to which it adds a line after each step.

    Returns:
        What it used.

    Raises:
        SystemExit: The program failed.
    """
    own = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": ""}
    cpu: list[float] = []
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=os.environ | own, stdout=output, stderr=subprocess.STDOUT)
        try:
            while True:
                pid, status, usage = os.wait4(process.pid, os.WNOHANG)
                lines = len(watched.read_text().splitlines()) if watched.exists() else 0
                if pid:
                    cpu += [usage.ru_utime + usage.ru_stime] * (lines - len(cpu))
                    break
                if lines > len(cpu):
                    with suppress(OSError):  # a process has ended meanwhile
                        cpu += [cpu_seconds(process.pid)] * (lines - len(cpu))
                time.sleep(_POLL_SECONDS)
        except BaseException:
            process.terminate()  # `lct train` then ends its ranks
            raise
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{log.read_text()[-3000:]}")
    return Usage(usage.ru_maxrss / 2**20, cpu)


def ours(setting: Setting, layout: str, further: Sequence[str] = (), dtype: str = "float32") -> dict[str, Any]:
    """Train by `lct train`.

    Args:
        setting: What to train.
        layout: A name of `LAYOUTS`.
        further: Arguments that come last.
        dtype: Data type of weights and computation.

    Returns:
        Losses, gradient norms, seconds and CPU seconds of each step, and the memory.
    """
    ranks = LAYOUTS[layout][0]
    folder = Path(tempfile.mkdtemp(dir=setting.folder))
    preset = [CASES[setting.name].preset, f"--ngpu={ranks}", *setting.arguments(layout, dtype)]
    command = [sys.executable, "-m", "trainer", "train", *preset, f"--job.dump_folder={folder}"]
    further = further or ["--checkpoint.no_enable"]
    metrics = folder / "metrics.jsonl"
    usage = run([*command, *further], max(setting.threads // ranks, 1), folder / "log", metrics)
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    columns = {"losses": "loss", "norms": "grad_norm", "seconds": "seconds_per_step"}
    values = {name: [step[key] for step in steps] for name, key in columns.items()}
    return values | usage._asdict() | {"folder": folder}


def memory(setting: Setting) -> dict[str, float]:
    """Return what the planner predicts for a rank of `lct train` that trains alone, and what the process has before.

    The planner knows GPUs: it predicts what PyTorch would allocate on a GPU with the same settings.

    Args:
        setting: What to train.

    Returns:
        `allocated`: the largest sum of tensors by the planner. `process`: the largest resident size of a process that
        trains a model of a few MB. Both in GiB.
    """
    arguments = [word for word in setting.arguments("1 rank") if not word.startswith("--job.device")]
    preset = f"--job.config_file={ROOT / 'train_configs' / CASES[setting.name].preset}.toml"
    with Worker(has_shim=True) as worker:
        answer = estimate(
            worker,
            [preset, *arguments, "--checkpoint.no_enable", "--training.mixed_precision_param=float32"],
            ranks=1,
            device=device("a100"),
        )
    folder = Path(tempfile.mkdtemp(dir=setting.folder))
    tiny = ["--training.seq_len=64", "--training.steps=2", "--job.device=cpu", f"--job.dump_folder={folder}"]
    command = [sys.executable, "-m", "trainer", "train", "debug_model", "--ngpu=1", *tiny]
    usage = run(command, setting.threads, folder / "log")
    return {"allocated": answer.profile.peak / 2**30, "process": usage.peak_gib}


def peer(setting: Setting, loop: str, steps: list[list[int]], **further: Any) -> dict[str, Any]:
    """Train by a peer.

    Args:
        setting: What to train.
        loop: Name of the peer.
        steps: Numbers of the conversations of each step.
        **further: Further values of `Work` of peers_loops.py; float32 by default.

    Returns:
        Losses, gradient norms (the peer's, and in float64), seconds and CPU seconds of each step, and the memory.

    Raises:
        ValueError: The peer had another number of threads.
    """
    folder = Path(tempfile.mkdtemp(dir=setting.folder))
    work, result = folder / "work.json", folder / "result.json"
    content = {"loop": loop, "model": str(setting.model), "data": str(DATA), "steps": steps}
    work.write_text(json.dumps(content | {"folder": str(folder), "dtype": "float32"} | further))
    script = ROOT / "scripts" / "benchmarks" / "peers_loops.py"
    usage = run([sys.executable, str(script), str(work), str(result)], setting.threads, folder / "log")
    values = json.loads(result.read_text())
    if values.pop("threads") != setting.threads:
        raise ValueError(f"{loop} did not run with {setting.threads} threads")
    return values | {"peak_gib": usage.peak_gib}


def first_adapters(setting: Setting) -> str:
    """Return a folder of the adapters with which `lct train` begins, in peft's format.

    A step at a learning rate of 1e-30 changes no adapter in float32.

    Args:
        setting: What to train.
    """
    further = ["--training.steps=1", "--optimizer.lr=1e-30", "--checkpoint.enable", "--checkpoint.no_last_save_in_hf"]
    run_folder = ours(setting, "1 rank", further)["folder"]
    adapters = setting.folder / "adapters"
    command = [sys.executable, "-m", "trainer", "convert", "to-peft", str(run_folder), str(adapters)]
    run(command, setting.threads, setting.folder / "convert.log")
    return str(adapters)
