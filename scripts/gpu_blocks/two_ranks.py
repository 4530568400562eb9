"""NCCL between ranks that share one GPU: attention, the program with its checkpoints, and a time-out.

NCCL refuses two ranks of one machine on one GPU. Each rank names another host, so NCCL assumes two machines and sends
through sockets. The order and the bytes of messages are real. Their speed is not.
"""

import json
import math
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

from scripts.gpu_blocks.block import Check, Skipped, largest, own_host
from scripts.gpu_blocks.training import ROOT
from trainer.config.schema import Comm
from trainer.runtime import process_group as groups

_GATE = 40.0  # seconds until two ranks must have met, most of them for imports
METHODS = ("ring", "all_gather", "all_to_all")
_STEPS = 6
_SAVED = 3
_NEAR = 1e-4  # relative difference of a loss in float32 from the loss of one rank
_LATE = 5.0  # seconds of the planted time-out
_LAYOUTS = {
    "fsdp": [],
    "ring": ["--parallelism.context_parallel_degree=2"],
    "all_to_all": ["--parallelism.context_parallel_degree=2", "--parallelism.context_parallel_method=all_to_all"],
    "pipeline": ["--parallelism.pipeline_parallel_degree=2"],
}
_SAVING = ["--checkpoint.enable", f"--checkpoint.interval={_SAVED}"]
_ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # there are many processes


def two_ranks(check: Check) -> None:
    """Let two ranks meet; then check attention of every method, runs of the program, and a time-out that ends a rank.

    On two and four ranks: each method with each mask, hybrid, uneven and empty messages, and split groups. The program
    runs with FSDP, ring, all-to-all and pipeline, and resumes from a checkpoint.

    What must hold: outputs, gradients, messages and bytes as on one process and as planned; losses within 1e-4 of one
    rank; the rank that waits ends, with its flight record.

    Args:
        check: The run of the block.

    Raises:
        Skipped: Two ranks of NCCL do not meet on one GPU here.
    """
    met = on_ranks(check, 2, "scripts.gpu_blocks.two_ranks:gate", (), _GATE)
    if isinstance(met, str):
        raise Skipped(f"two ranks of NCCL do not meet on one GPU here: {met}")
    check.note(gate=met)
    with ThreadPoolExecutor() as pool:
        late_rank = pool.submit(_time_out, check)  # it waits for over a minute
        parts = [pool.submit(_attention, check, method) for method in METHODS]
        parts.append(pool.submit(_hybrid, check))
        for part in parts:
            part.result()
        _program(check)
        late_rank.result()
    facts = check.facts
    shares = {name: facts[name] for name in (*METHODS, "hybrid")}
    check.headline(f"{met[0]['backend']}: worst shares {shares}; losses differ by {facts['differences']}")


# ---- ranks


def on_ranks(check: Check, world_size: int, entry: str, args: tuple[Any, ...], limit: float) -> list[Any] | str:
    """Run `module:function(*args)` on ranks of this machine.

    Args:
        check: The run of the block.
        world_size: Number of ranks.
        entry: `module:function`.
        args: The arguments, which pickle can write.
        limit: Time limit in seconds.

    Returns:
        The result of each rank, or why there are none.
    """
    import torch

    gpus = 0 if check.is_dry else torch.cuda.device_count()
    folder = Path(tempfile.mkdtemp(prefix="ranks_"))
    (folder / "arguments").write_bytes(pickle.dumps((entry, args)))
    command = [sys.executable, "-m", "scripts.gpu_blocks.two_ranks", str(folder)]
    shared = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    processes = []
    for rank in range(world_size):
        log = (folder / f"log_{rank}").open("w")
        environment = os.environ | shared | own_host(rank, gpus) | _ONE_THREAD | {"RANK": str(rank)}
        processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log))
    end = time.monotonic() + min(limit, check.left() or 1)
    try:
        codes = [process.wait(max(end - time.monotonic(), 0.1)) for process in processes]
    except subprocess.TimeoutExpired:
        return f"no end in {limit:.0f} s: " + _last_lines(folder, world_size)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(codes):
        return f"exit codes {codes}: " + _last_lines(folder, world_size)
    return [pickle.loads((folder / f"result_{rank}").read_bytes()) for rank in range(world_size)]


def free_port() -> int:
    """Return a free port."""
    import socket

    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def _last_lines(folder: Path, world_size: int) -> str:
    lines = [(folder / f"log_{rank}").read_text(errors="replace").splitlines()[-4:] for rank in range(world_size)]
    return " || ".join(" | ".join(each) for each in lines)[:1500]


def gate() -> dict[str, Any]:
    """Meet, send in both directions, split off a group, and leave.

    Returns:
        Back end, whether the group is split off, a sum, and seconds.
    """
    import torch
    import torch.distributed as dist

    from longshard.context.execution import build

    process = groups.Process.from_environment()
    started = time.monotonic()
    with groups.process_group(process, Comm(init_timeout_seconds=30)):
        own = build.own_group(dist.group.WORLD, "kv", process.device.type)
        x = torch.full((4,), float(process.rank), device=process.device)
        dist.all_reduce(x, group=own)
        # Rank 0 sends 0 and 3 rows, rank 1 sends 2 and 5: uneven and empty messages.
        sent, received = ([0, 3], [0, 2]) if process.rank == 0 else ([2, 5], [3, 5])
        rows = torch.empty(sum(received), device=process.device)
        dist.all_to_all_single(rows, torch.ones(sum(sent), device=process.device), received, sent)
        facts = {"backend": str(dist.get_backend()), "is_split": own is not dist.group.WORLD, "sum": x.tolist()}
    return facts | {"seconds": round(time.monotonic() - started, 2)}


# ---- parts


def _attention(check: Check, method: str) -> None:
    """Check every mask by one method: lengths that 2 does not divide, and a length shorter than the ranks."""
    import torch

    from longshard.context.planning.options import ContextParallelOptions
    from tests.distributed.attention_cases import MASKS, Case

    options = ContextParallelOptions(method)
    cases = [
        Case(seq_len, (8, 4), 64, dtype, options, **mask)
        for mask in MASKS
        for seq_len, dtype in ((37, torch.float64), (253, torch.float32), (253, torch.bfloat16))
    ]
    # With one token, the gradients of queries and keys are zero, so that errors are absolute.
    cases.append(Case(1, (8, 4), 64, torch.float64, options))
    _compare(check, method, 2, cases)


def _hybrid(check: Check) -> None:
    """Check two groups of two ranks, in float32 and bfloat16, causal and with documents."""
    import torch

    from longshard.context.planning.options import ContextParallelOptions
    from tests.distributed.attention_cases import Case

    options = ContextParallelOptions("hybrid", hybrid_degrees=(2, 2))
    masks: list[dict[str, Any]] = [{}, {"mask": "documents"}, {"window": 7}]
    types = (torch.float32, torch.bfloat16)
    cases = [Case(253, (8, 4), 64, dtype, options, **mask) for mask in masks for dtype in types]
    _compare(check, "hybrid", 4, cases)


def _compare(check: Check, name: str, world_size: int, cases: Sequence[Any]) -> None:
    """Compare outputs, gradients, collectives and bytes of the cases with one process and with the plan."""
    from tests.distributed.attention_cases import TOLERANCE

    entry = "tests.distributed.attention_cases:attention_case"
    outcomes = on_ranks(check, world_size, entry, (list(cases),), 120)
    if isinstance(outcomes, str):
        check.note(**{name: None})
        check.expect(False, f"{name}: {outcomes}")
        return
    worst = 0.0
    for rank, results in enumerate(outcomes):
        for case, result in zip(cases, results, strict=True):
            share = largest(*result["errors"]) / TOLERANCE[case.dtype]
            worst = largest(worst, share)
            check.expect(share <= 1, f"{name}, rank {rank}, {case}: errors {result['errors']}")
            sent = {kind: size for kind, size in result["sent"].items() if size}
            as_planned = result["calls"] == result["planned calls"] and sent == result["planned"]
            check.expect(as_planned, f"{name}, rank {rank}, {case}: sent {result['calls']}, {sent}")
    check.note(**{name: round(worst, 2), f"{name}_cases": f"{len(cases)} on {world_size} ranks"})


def _program(check: Check) -> None:
    """Compare runs on two ranks with one rank; then a resumed run with FSDP buffers in NCCL's memory."""
    layouts = {name: _LAYOUTS[name] for name in ("fsdp", "ring")} if check.is_dry else _LAYOUTS
    runs = {"one": (1, []), **{name: (2, options) for name, options in layouts.items()}}
    runs["fsdp"] = (2, _SAVING)
    losses: dict[str, list[float]] = {}
    differences: dict[str, float] = {}

    def run(name: str, world_size: int, options: list[str], folder: str) -> None:
        outcome = _train(check, folder, world_size, options)
        check.expect(not isinstance(outcome, str), f"{name} on {world_size} ranks: {outcome}")
        losses[name] = [] if isinstance(outcome, str) else outcome

    def compare(name: str, other: str) -> None:
        differences[name] = _difference(losses[name], losses[other])
        check.note(differences=differences)
        check.expect(differences[name] <= _NEAR, f"{name}: losses {losses[name]}, and of {other} {losses[other]}")

    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda name: run(name, *runs[name], name), runs))
    for name in layouts:
        compare(name, "one")
    run("resumed", 2, [*_SAVING, f"--checkpoint.load_step={_SAVED}", "--parallelism.fsdp_zero_copy"], "fsdp")
    compare("resumed", "fsdp")


def _train(check: Check, name: str, world_size: int, options: list[str]) -> list[float] | str:
    """Return the losses of a run of the program, with one launcher for each rank; or why there are none."""
    import torch

    gpus = 0 if check.is_dry else torch.cuda.device_count()
    dump = Path(tempfile.gettempdir(), name)
    command = [sys.executable, "-m", "trainer", "train", "debug_model", f"--job.dump_folder={dump}"]
    command += ["--training.seq_len=128", "--training.local_batch_size=2", "--training.global_batch_size=4"]
    command += [f"--training.steps={_STEPS}", "--training.mixed_precision_param=float32", "--metrics.log_freq=1"]
    command += ["--metrics.no-enable_tensorboard", "--training.data_streams=4", *options]
    if check.is_dry:
        command.append("--job.device=cpu")
    ours = ("CONFIG_FILE", "LOG_RANK", "RANK", "LOCAL_RANK", "WORLD_SIZE")
    shared = {key: value for key, value in os.environ.items() if key not in ours}
    shared |= {"NGPU": "1", "NNODES": str(world_size), "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    launchers = []
    for rank in range(world_size):
        node = own_host(rank, gpus)
        del node["LOCAL_RANK"]
        log = dump.with_name(f"{name}_{rank}.log").open("w")
        environment = shared | node | _ONE_THREAD | {"NODE_RANK": str(rank)}
        launchers.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log))
    end = time.monotonic() + (check.left() or 1)
    try:
        codes = [launcher.wait(max(end - time.monotonic(), 0.1)) for launcher in launchers]
    except subprocess.TimeoutExpired:
        codes = ["no end in the time that the block had left"]
    finally:
        for launcher in launchers:
            launcher.terminate()
    if any(codes):
        logs = [dump.with_name(f"{name}_{rank}.log").read_text().splitlines()[-5:] for rank in range(world_size)]
        return f"{codes}: " + " || ".join(" | ".join(lines) for lines in logs)[:1500]
    lines = [json.loads(line) for line in (dump / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line][-_STEPS:]


def _difference(losses: list[float], expected: list[float]) -> float:
    """Return the largest relative difference of losses; infinite if a step is missing."""
    if not len(losses) == len(expected) == _STEPS:
        return math.inf
    return largest(*(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True)))


def _time_out(check: Check) -> None:
    """Check that a rank that waits for a missing rank ends by itself, and leaves its flight record."""
    folder = Path(tempfile.mkdtemp(prefix="late_"))
    started = time.monotonic()
    outcome = on_ranks(check, 2, "scripts.gpu_blocks.two_ranks:late", (str(folder),), 90)
    records = sorted(path.name for path in folder.iterdir())
    check.note(
        time_out={"seconds": round(time.monotonic() - started, 1), "records": records, "end": str(outcome)[:600]}
    )
    check.expect(
        isinstance(outcome, str) and outcome.startswith("exit codes"), f"the waiting rank did not end: {outcome}"
    )
    check.expect("rank_0" in records, f"no flight record of the waiting rank: {records}")


def late(folder: str) -> None:
    """Run two sums; rank 1 leaves before the second one.

    Args:
        folder: The folder of the flight records.
    """
    import torch
    import torch.distributed as dist

    process = groups.Process.from_environment()
    with groups.process_group(process, Comm(init_timeout_seconds=60), Path(folder)):
        x = torch.ones(4, device=process.device)
        dist.all_reduce(x)
        groups.set_timeout(_LATE)
        if process.rank == 1:
            time.sleep(4 * _LATE)
            os._exit(0)
        dist.all_reduce(x)
        print(x.tolist())


def main(folder: str) -> None:
    """Run on this rank the function that `on_ranks` has pickled.

    Args:
        folder: The folder of arguments and results.
    """
    rank = os.environ["RANK"]
    entry, args = pickle.loads(Path(folder, "arguments").read_bytes())
    module, _, name = entry.partition(":")
    function: Callable[..., Any] = getattr(import_module(module), name)
    result = function(*args)
    Path(folder, f"result_{rank}").write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
