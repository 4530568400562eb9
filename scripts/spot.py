"""Kill a run at random steps, start the same command again each time, and compare it with a run that nobody killed.

    python scripts/spot.py --output outputs/spot

Two signals give the run time to save, as a spot instance does; SIGKILL gives none, and its run resumes from the last
checkpoint. All losses must be equal, and so must all bits of the last checkpoint.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STEPS = 20
INTERVAL = 4
SIGNALS = ("SIGTERM", "SIGUSR2", "SIGKILL")
JOB = (
    *("debug_model", "--ngpu", "2", "--parallelism.context_parallel_degree", "2", "--metrics.no-enable_tensorboard"),
    *("--training.steps", str(STEPS), "--training.seq_len", "256", "--training.global_batch_size", "4"),
    *("--lr_scheduler.warmup_steps", "4", "--checkpoint.enable", "--checkpoint.interval", str(INTERVAL)),
)
EXACT = ("step", "loss", "loss_max", "grad_norm", "lr", "tokens_seen")
"""Keys of a line of metrics.jsonl that a stop must not change; times may differ."""
_SECONDS = 300


def start(folder: Path) -> subprocess.Popen:
    """Start the run, or resume it: the same command both times.

    Args:
        folder: The run's `job.dump_folder`.

    Returns:
        The process of deploy/resumable.sh, which leads a session of its own.
    """
    command = ["bash", str(ROOT / "deploy" / "resumable.sh"), sys.executable, "-m", "trainer", "train", *JOB]
    command += ["--job.dump_folder", str(folder)]
    with (folder.parent / f"{folder.name}.log").open("a") as log:
        streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
        return subprocess.Popen(command, cwd=ROOT, start_new_session=True, **streams)


def steps_of(folder: Path) -> list[dict[str, float]]:
    """Return the finished lines of a run's metrics.jsonl; empty before its first step.

    Args:
        folder: The run's `job.dump_folder`.
    """
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [{key: json.loads(line)[key] for key in EXACT} for line in lines if line.endswith("\n")]


def stops(seed: int) -> list[tuple[int, str]]:
    """Return the steps after which signals come, with the signals.

    Args:
        seed: The seed of the steps.
    """
    steps = sorted(random.Random(seed).sample(range(2, STEPS - 2), len(SIGNALS)))
    return [*zip(steps, SIGNALS, strict=True)]


def kill(folder: Path, step: int, name: str) -> int:
    """Start the run, and signal it once it has done a step.

    Args:
        folder: The run's `job.dump_folder`.
        step: The step after which the signal comes.
        name: The signal. SIGKILL ends all processes of the run, as a lost machine does.

    Returns:
        The exit code; negative if the signal itself ended the process.

    Raises:
        SystemExit: The run ended before the step, or took too long.
    """
    process = start(folder)
    deadline = time.monotonic() + _SECONDS
    while not any(line["step"] >= step for line in steps_of(folder)):
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"error: the run did not reach step {step}; {folder}.log has its log")
        time.sleep(0.02)
    if name == "SIGKILL":
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.send_signal(signal.Signals[name])
    return process.wait(timeout=_SECONDS)


def differences(whole: Path, killed: Path) -> list[str]:
    """Compare two runs bit by bit.

    Args:
        whole: The run that nobody killed.
        killed: The other run.

    Returns:
        A sentence for each difference; none if all losses and all tensors of the last step are equal.
    """
    texts = []
    lines = steps_of(whole), steps_of(killed)
    if len(lines[0]) != STEPS or len(lines[1]) != STEPS:
        texts.append(f"the runs have {len(lines[0])} and {len(lines[1])} steps, not {STEPS}")
    texts += [f"step {a['step']:.0f} differs: {a} and {b}" for a, b in zip(*lines, strict=False) if a != b]
    last = Path("checkpoint", f"step-{STEPS}")
    files = sorted(path.name for path in (whole / last).glob("*.distcp"))
    if not files or files != sorted(path.name for path in (killed / last).glob("*.distcp")):
        texts.append(f"{last} has other files of tensors")
        return texts
    equal = [(whole / last / name).read_bytes() == (killed / last / name).read_bytes() for name in files]
    return texts + [f"{last / name} has other bits" for name, same in zip(files, equal, strict=True) if not same]


def main(argv: Sequence[str] | None = None) -> int:
    """Run both, and print what happened.

    Args:
        argv: The words of the command line; None for the words of this process.

    Returns:
        The exit code: 1 if the runs differ.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="a new folder for both runs")
    parser.add_argument("--seed", type=int, default=0, help="seed of the steps at which signals come (0)")
    options = parser.parse_args(argv)
    options.output.mkdir(parents=True)
    whole, killed = (options.output.resolve() / name for name in ("whole", "killed"))
    for step, name in stops(options.seed):
        code = kill(killed, step, name)
        saved = sorted(int(path.name.removeprefix("step-")) for path in killed.glob("checkpoint/step-*[0-9]"))
        print(f"{name} after step {step}: exit code {code}, the last checkpoint is step {saved[-1] if saved else 0}")
    codes = [start(folder).wait(timeout=_SECONDS) for folder in (killed, whole)]
    texts = differences(whole, killed) if codes == [0, 0] else [f"the runs ended with the exit codes {codes}"]
    equal = f"{len(SIGNALS)} stops: the losses of {STEPS} steps and all bits of the last checkpoint are equal"
    print("\n".join(texts or [equal]))
    return int(bool(texts))


if __name__ == "__main__":
    sys.exit(main())
