"""Check a configuration, then start one rank per GPU of this machine, or two on a CPU.

On several nodes, run the same command on each node (docs/several_nodes.md). Torch is imported after all checks and
notes.

State of the process: Environment variables for the ranks (threads, CUDA's allocator and queues, path), in the
launcher's process.
"""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from trainer.commands.check import print_or_check
from trainer.commands.ranks import launch, launch_options
from trainer.commands.start import Start, check_here, job_notes, opening, parse
from trainer.config.loader import CommandLine, parse_command_line
from trainer.config.schema import JobConfig
from trainer.config.writable import is_address
from trainer.data.job_data import all_data
from trainer.data.token_files.catalog import catalog_of
from trainer.families.registry import from_path
from trainer.job import resolve
from trainer.job.summary import summary
from trainer.runtime.console import logger, report, say_waiting, set_up_logging
from trainer.runtime.devices import this_machine
from trainer.runtime.dump_folder import ESTIMATE, folders_of, holder_of, remove_estimate
from trainer.runtime.nodes import Nodes
from trainer.runtime.output import outlasting_readers
from trainer.runtime.stop import Stopped, ends_by, handled_by
from trainer.stores.folder import checkpoint_folder

_WRONG_SETTING = 2  # exit code
# Signals that end the command before the ranks start.
_ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main(argv: list[str]) -> int:
    """Check the configuration, print what starts, and start the ranks of this machine.

    With --print-config or --check-config, no rank starts.

    Args:
        argv: The words of the command line, without the command.

    Returns:
        The exit code of the job.
    """
    start = parse(argv)
    command = parse_command_line(start.arguments)
    if print_or_check(command, start):
        return 0
    with outlasting_readers(is_log=True):
        try:
            with handled_by(dict.fromkeys(_ENDING, ends_by)):
                return _train(start, command)
        except Stopped as stopped:
            report(f"error: stopped by {stopped.number.name} before the training started")
            return 128 + stopped.number


def _train(start: Start, command: CommandLine) -> int:
    launch_arguments = _prepare(start, command)
    # The token files of this node are ready before the ranks start, so that no collective waits for hours.
    if not _tokenized(start, command.config):
        return _WRONG_SETTING  # the process has reported the error
    say_waiting("importing PyTorch")
    estimating = _start_estimate(start, command.config)
    code = launch([*launch_arguments, *start.arguments])
    if estimating is not None:
        estimating.kill()
    if code not in (0, _WRONG_SETTING) and (hint := _to_resume(command.config)):
        report(hint)
    return code


def _tokenized(start: Start, config: JobConfig) -> bool:
    """Make the catalogs of the data of a job, and missing token files; return whether all are there.

    Another process makes token files, because it may start more processes. This process must have no threads before it
    forks.
    """
    data = all_data(from_path(config))
    if all(catalog_of(settings, makes_files=False) is not None for settings in data):
        return True
    command = [sys.executable, "-m", "trainer.commands.tokenize_text", *start.arguments]
    return subprocess.run(command, check=False).returncode == 0


def _start_estimate(start: Start, config: JobConfig) -> subprocess.Popen[bytes] | None:
    """On GPUs of one node, start the process that estimates the memory of the run for its first log line; else None."""
    machine = this_machine()
    folder = Path(config.job.dump_folder)
    remove_estimate(config)
    if machine.device_type(config.job.device) != "cuda" or Nodes.from_environment().count > 1:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    ranks = str(start.world_size(config, machine))
    command = [sys.executable, "-m", "trainer", "estimate", *start.arguments]
    command += ["--world-size", ranks, "--ngpu", ranks, "--json"]
    with (folder / ESTIMATE).open("wb") as output:
        return subprocess.Popen(command, stdout=output, stderr=subprocess.DEVNULL)


def _to_resume(config: JobConfig) -> str:
    """Return a line on the last saved step and how to resume; empty for remote stores, which may answer late."""
    if is_address(config.checkpoint.folder):
        return ""
    if not config.checkpoint.enable:
        return "nothing is saved: with --checkpoint.enable a run saves, and the same command resumes it"
    folder = checkpoint_folder(config)
    with suppress(OSError):
        if steps := folder.steps():
            return f"step {steps[-1]:,} is saved in {folder}: the same command resumes from it"
    return f"no step is saved yet in {folder}: the same command starts again"


def _prepare(start: Start, command: CommandLine) -> list[str]:
    config = command.config
    machine = this_machine()
    nodes = Nodes.from_environment()
    here = start.ranks_here(config, machine)
    ranks = start.world_size(config, machine)
    device_type = machine.device_type(config.job.device)
    os.environ["LOG_RANK"] = start.log_rank
    set_up_logging(0)
    logger.info(opening(config, ranks, device_type))
    job = resolve(config, ranks, device_type, node=here)
    notes = (*command.notes, *job.notes, *job_notes(job, machine, here))
    if nodes.count == 1:  # on several nodes, rank 0 prints the summary once
        logger.info(summary(job))
        for note in notes:
            logger.info(f"note: {note}")
    check_here(config)
    if taken := holder_of(folders_of(config)):
        raise taken
    return launch_options(config, here, device_type)
