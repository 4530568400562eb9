"""The common part of commands that start ranks on this machine. Torch-free.

State of the process: Environment variables for the ranks (threads, CUDA's allocator and queues, path), in the
launcher's process.
"""

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.commands.start import ROOT
from trainer.config.errors import ConfigError
from trainer.config.schema import JobConfig
from trainer.job import ResolvedJob
from trainer.runtime.console import report
from trainer.runtime.dump_folder import FLIGHT_RECORDS
from trainer.runtime.nodes import Nodes

if TYPE_CHECKING:
    import torch

_CPP_LOGS = "TORCH_CPP_LOG_LEVEL"


def launch_options(config: JobConfig, here: int, device_type: str) -> list[str]:
    """Return the options of the launcher, and set the environment variables of the ranks.

    Args:
        config: The configuration of the run.
        here: Ranks on this machine.
        device_type: "cuda" or "cpu".
    """
    # Each rank gets its share of the cores.
    os.environ.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // here, 1)))
    if (ROOT / "train.py").is_file():  # a clone that may not be installed
        os.environ["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
        )
    # Ranks must not import a folder `trainer` of the working directory.
    os.environ["PYTHONSAFEPATH"] = "1"
    options = [
        "--nproc-per-node",
        str(here),
        "--start-timeout",
        str(config.comm.init_timeout_seconds),
        "--end-timeout",  # a rank may save a checkpoint at the end
        str(config.comm.checkpoint_timeout_seconds),
        "--stop-signals",
        ",".join(config.job.stop_signals),
    ]
    if device_type == "cpu":  # forked ranks are untested on GPUs
        options += ["--preload", "trainer.trainer"]
    if device_type == "cuda" and config.comm.trace_buf_size:
        options += [
            "--flight-records",
            str(Path(config.job.dump_folder, FLIGHT_RECORDS).absolute()),
        ]
    return options


def launch(arguments: list[str]) -> int:
    """Run the launcher in this process until the job ends.

    Args:
        arguments: The options of the launcher.

    Returns:
        The exit code of the job.
    """
    user_level = os.environ.get(_CPP_LOGS)
    # Without this level, the store of a node that ends prints C++ traces. torch reads the variable once.
    os.environ.setdefault(_CPP_LOGS, "ERROR")
    from trainer.runtime.launch import main

    if user_level is None:
        del os.environ[_CPP_LOGS]  # the ranks log as usual
    return main(arguments)


def all_ranks(here: int) -> int:
    """Return the number of ranks on all nodes together.

    Args:
        here: Ranks on each node.
    """
    return here * Nodes.from_environment().count


def run(module: str, argv: list[str]) -> int:
    """Run a command on the ranks of this machine; a job of one rank runs in this process.

    Args:
        module: The module of the command. Its function `checked` returns the options and the job of all ranks. Its
            function `work` takes options, job and device, runs the work of one rank, and returns the text that rank 0
            prints.
        argv: The words of the command line, without the command.

    Returns:
        The exit code.

    Raises:
        ConfigError: `checked` has found a wrong option or setting.
    """
    _, job = import_module(module).checked(argv)
    if job.degrees.world_size == 1:
        return work_on_rank([module, *argv])
    here = job.degrees.world_size // all_ranks(1)
    options = launch_options(job.config, here, job.device_type)
    return launch([*options, "--program", "trainer.commands.ranks", module, *argv])


def work_on_rank(argv: list[str], *, launched: bool = False) -> int:
    """Run one rank of a command, see `run`. If a setting is wrong, rank 0 reports it.

    Args:
        argv: The module and the words of the command line.
        launched: Whether our launcher started this rank.

    Returns:
        The exit code.
    """
    from trainer.commands.rank import on_rank

    command = import_module(argv[0])
    is_first = os.environ.get("RANK", "0") == "0"
    try:
        args, job = command.checked(argv[1:])
    except ConfigError as error:
        if is_first:
            report(f"error: {error}")
        return 2

    def print_work(job: ResolvedJob, device: "torch.device") -> None:
        text = command.work(args, job, device)
        if is_first:
            print(text, flush=True)

    return on_rank(job, print_work)


def rank_process() -> int:
    """Return the exit code of a rank of a command, after running it with the arguments of sys.argv."""
    from trainer.commands.rank import command_line

    return command_line(work_on_rank)


if __name__ == "__main__":
    sys.exit(rank_process())
