"""Seconds that a save stops training, and seconds until it is on the disk, against plain torch.distributed.checkpoint.

    python scripts/benchmarks/checkpoints.py --rounds 7 --json docs/measurements/checkpoints_cpu.json
    python scripts/benchmarks/checkpoints.py --device cuda --layers 20

Each round saves the same tensors of one trainer once in every way, with fsync: weights, and both moments in float32 (1
GB by default). The order of the ways is random in each round, and the first round is not counted. Plain is `dcp.save`
and `dcp.async_save` with a `FileSystemWriter`. A ratio compares two saves of the same round; the table has the median
over the rounds. Every tensor is updated between the saves, as in a training step.
"""

import argparse
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from a clone, installed or not

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter

from scripts.provenance import made_with
from trainer.checkpoint.checkpointer import Checkpointer, tensors_of
from trainer.config.loader import parse_command_line
from trainer.families.decoder_args import LLAMA3 as FLAVORS
from trainer.job import resolve
from trainer.runtime.process_group import Process, process_group
from trainer.stores.store import Store
from trainer.trainer import Trainer

Save = Callable[[Path, int], Callable[[], object]]
"""Saves into a folder at a step; returns a function that waits until everything is on the disk."""
PLAIN = {"disabled": "plain save", "async": "plain async_save", "async_with_pinned_mem": "plain async_save"}
"""Value of `checkpoint.async_mode` -> the plain way that it is compared with."""


@dataclass(frozen=True)
class Times:
    """Seconds of one save: until training continues, and until everything is on the disk."""

    stalled: float
    on_disk: float


def plain_save(tensors: dict[str, torch.Tensor]) -> Save:
    """Return a function that saves with `dcp.save`.

    Args:
        tensors: The tensors by name, any shape.
    """

    def save(folder: Path, _: int) -> Callable[[], object]:
        dcp.save(tensors, storage_writer=FileSystemWriter(folder))
        return lambda: None

    return save


def plain_async_save(tensors: dict[str, torch.Tensor]) -> Save:
    """Return a function that saves with `dcp.async_save`.

    Args:
        tensors: The tensors by name, any shape.
    """
    return lambda folder, _: dcp.async_save(tensors, storage_writer=FileSystemWriter(folder)).result


def ours(trainer: Trainer, mode: str) -> Save:
    """Return a function that saves as the trainer does.

    Args:
        trainer: The trainer whose state is saved.
        mode: Value of `checkpoint.async_mode`.
    """
    config = trainer.config
    job = replace(trainer.job, config=replace(config, checkpoint=replace(config.checkpoint, async_mode=mode)))
    parts = {"model_parts": trainer.model_parts, "optimizer": trainer.optimizer}
    checkpointer = Checkpointer(job, trainer.dims, **parts, lr_scheduler=trainer.lr_scheduler, loader=trainer.data)

    def save(folder: Path, step: int) -> Callable[[], object]:
        checkpointer.folder = Store(folder)
        folder.mkdir()
        checkpointer.save(step, tokens_seen=0)
        return checkpointer.wait

    return save


def timed(save: Save, folder: Path, step: int) -> Times:
    """Save once and wait until everything is on the disk.

    Args:
        save: The function that saves.
        folder: Folder of the checkpoint.
        step: Step of the checkpoint.

    Returns:
        The times of the save.
    """
    started = time.perf_counter()
    wait = save(folder, step)
    stalled = time.perf_counter() - started
    wait()
    return Times(stalled, time.perf_counter() - started)


@contextmanager
def opened(args: argparse.Namespace, folder: Path) -> Iterator[Trainer]:
    """Yield a trainer of one rank after one step, so that its optimizer has state.

    Args:
        args: The command line.
        folder: Folder of the run.
    """
    FLAVORS["checkpoints"] = replace(
        FLAVORS["debugmodel"], dim=args.dim, n_layers=args.layers, ffn_hidden_dim=4 * args.dim
    )
    settings = ["--model.flavor=checkpoints", f"--job.dump_folder={folder}", "--training.seq_len=32"]
    settings += ["--checkpoint.enable", "--checkpoint.interval=1", "--training.local_batch_size=1"]
    config = parse_command_line(settings).config
    device = torch.device(args.device)
    with process_group(Process(0, 0, 1), config.comm):
        trainer = Trainer(resolve(config, 1, device.type), device)
        trainer.train_step(1)
        yield trainer
        trainer.metrics.close()


def measured(trainer: Trainer, folder: Path, rounds: int) -> dict[str, list[Times]]:
    """Return the times of each way to save by its name, one entry per round.

    Args:
        trainer: The trainer whose state is saved.
        folder: Folder for the checkpoints, which are deleted after each save.
        rounds: Number of measured rounds.
    """
    tensors = tensors_of(trainer.model_parts, trainer.optimizer)
    ways = {"plain save": plain_save(tensors), "plain async_save": plain_async_save(tensors)}
    ways |= {mode: ours(trainer, mode) for mode in PLAIN}
    times_of_ways: dict[str, list[Times]] = {name: [] for name in ways}
    step = 0
    chance = random.Random(0)
    for number in range(rounds + 1):
        for name in chance.sample(list(ways), len(ways)):  # a random order, so that no way always follows the same way
            step += 1
            trainer.optimizer.step()
            times = timed(ways[name], folder / "saved", step)
            shutil.rmtree(folder / "saved")
            if number:
                times_of_ways[name].append(times)
    return times_of_ways


def rows(times_of_ways: dict[str, list[Times]]) -> list[dict[str, object]]:
    """Return the median times of each way, and the medians of its ratios to plain DCP.

    Args:
        times_of_ways: Times of each way to save by its name, one entry per round.
    """
    result: list[dict[str, object]] = []
    for name, times in times_of_ways.items():
        row: dict[str, object] = {"way": name}
        for column in ("stalled", "on_disk"):
            row[f"{column}_s"] = round(statistics.median(getattr(x, column) for x in times), 3)
            if name in PLAIN:
                pairs = zip(times, times_of_ways[PLAIN[name]], strict=True)
                ratios = [getattr(ours, column) / getattr(theirs, column) for ours, theirs in pairs]
                row[f"{column}_ratio"] = round(statistics.median(ratios), 3)
                row[f"{column}_ratio_range"] = [round(min(ratios), 3), round(max(ratios), 3)]
        result.append(row)
    return result


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    about = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    about.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    about.add_argument("--dim", type=int, default=1024, help="width of the model (default: 1024)")
    about.add_argument("--layers", type=int, default=5, help="layers of the model (default: 5, 1 GB of state)")
    about.add_argument("--rounds", type=int, default=5, help="saves of each way (default: 5)")
    about.add_argument("--folder", type=Path, help="where to save; default: the system's folder of temporary files")
    about.add_argument("--json", type=Path, metavar="FILE", help="write the result there, as an object")
    return about


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, and write the result to `--json`.

    Args:
        argv: The command line. None: the process's own.

    Returns:
        The exit code.
    """
    argv = sys.argv[1:] if argv is None else argv
    args = parser().parse_args(argv)
    device = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    head = made_with("scripts/benchmarks/checkpoints.py", argv, device=device) | {"threads": torch.get_num_threads()}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder, opened(args, Path(folder) / "run") as trainer:
        tensors = tensors_of(trainer.model_parts, trainer.optimizer)
        head |= {"bytes": sum(x.nbytes for x in tensors.values()), "tensors": len(tensors), "rounds": args.rounds}
        results = rows(measured(trainer, Path(folder), args.rounds))
    for row in results:
        ratios = f"{row['stalled_ratio']:>14} {row['on_disk_ratio']:>14}" if "stalled_ratio" in row else ""
        print(f"{row['way']:>22} {row['stalled_s']:>9} s stalled {row['on_disk_s']:>9} s to disk {ratios}")
    if args.json is not None:
        args.json.write_text(json.dumps(head | {"results": results}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
