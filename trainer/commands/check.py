"""Check a configuration for a number of ranks, and print every decision with its reason. Torch-free."""

import os
import sys

from trainer.commands.notes import job_notes, opening
from trainer.config.errors import ConfigError
from trainer.config.loader import CommandLine, parse_command_line, to_toml
from trainer.job import resolve
from trainer.job.memory import check_memory
from trainer.job.summary import summary
from trainer.runtime import folders_of, holder_of
from trainer.runtime.devices import this_machine

CPU_RANKS = 2
"""Ranks that are started on a machine without GPUs."""


def acted(command: CommandLine) -> int | None:
    """Do what --print-config and --check-config ask for, and return the exit code; None: the run is to start.

    Raises:
        ConfigError: a setting is wrong.
    """
    if command.print_config:
        print(to_toml(command.config), flush=True)
        if not command.check_config:
            return 0
    return check(command) if command.check_config else None


def check(command: CommandLine) -> int:
    """Check the configuration, print its summary (but not beside --print-config), and return the exit code.

    With --world-size the job may be for another machine: `job.device = "auto"` then means GPUs, and files that are not
    here yet are notes.

    Raises:
        ConfigError: a setting is wrong.
    """
    machine, config = this_machine(), command.config
    elsewhere = command.world_size is not None
    ranks = command.world_size or int(os.environ.get("WORLD_SIZE", machine.gpus or CPU_RANKS))
    device_type = "cuda" if elsewhere and config.job.device == "auto" else machine.device_type(config.job.device)
    missing: list[str] = []
    job = resolve(config, ranks, device_type, missing=missing if elsewhere else None)
    here = [] if elsewhere else job_notes(job, machine, ranks)
    check_memory(job, None)
    if not command.print_config:
        print(opening(config, ranks, device_type))
        print(summary(job))
        print("the settings are valid", flush=True)
    for note in (*(f"missing here: {text}" for text in dict.fromkeys(missing)), *command.notes, *job.notes, *here):
        print(f"note: {note}", file=sys.stderr)
    if taken := holder_of(folders_of(config)):
        raise taken
    return 0


def main(argv: list[str]) -> int:
    """`check [FILE] [--world-size N] [--table.key value ...]`."""
    if argv and not argv[0].startswith("-"):
        argv = ["--job.config_file", *argv]
    try:
        return check(parse_command_line(["--check-config", *argv]))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
