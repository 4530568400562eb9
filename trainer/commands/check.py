"""Check a configuration for a number of ranks, and print every decision with its reason. Torch-free.

`lct train --check-config` and `lct check` (`lct_tools/check.py`) call it.
"""

import sys

from trainer.commands.start import Start, check_here, job_notes, opening
from trainer.config.loader import CommandLine, to_toml
from trainer.data.job_data import first_start
from trainer.job import resolve
from trainer.job.data import conversation_notes
from trainer.job.memory import check_memory
from trainer.job.record import ResolvedJob
from trainer.job.summary import summary
from trainer.runtime.devices import this_machine
from trainer.runtime.dump_folder import folders_of, holder_of


def print_or_check(command: CommandLine, start: Start) -> bool:
    """Run what --print-config and --check-config ask for.

    Args:
        command: The parsed command line.
        start: The ranks to start.

    Returns:
        Whether the command line has one of the two options.
    """
    if command.print_config:
        print(to_toml(command.config), flush=True)
    if command.check_config:
        check(command, start)
    return command.print_config or command.check_config


def check(command: CommandLine, start: Start) -> ResolvedJob:
    """Check the configuration and print its summary, unless --print-config is given.

    Without --world-size, check the job that `lct train` would start here. With --world-size, the job may be for another
    machine: `job.device = "auto"` then means GPUs, and a missing file is a note instead of an error.

    Args:
        command: The parsed command line.
        start: The ranks to start.

    Returns:
        The resolved job.

    Raises:
        ConfigError: A setting is wrong, or another run holds a folder of the job.
    """
    machine = this_machine()
    config = command.config
    elsewhere = command.world_size is not None
    ranks = command.world_size or start.world_size(config, machine)
    is_gpu = elsewhere and config.job.device != "cpu"
    device_type = "cuda" if is_gpu else machine.device_type(config.job.device)
    missing = []
    node = start.ranks if elsewhere else start.ranks_here(config, machine)
    job = resolve(config, ranks, device_type, node=node, missing=missing if elsewhere else None)
    here = [] if elsewhere else job_notes(job, machine, node)
    check_memory(job, None)
    if not elsewhere:
        check_here(config)
    if not command.print_config:
        print(opening(config, ranks, device_type))
        print(summary(job))
        for text in first_start(config):
            print(text)
        print("the settings are valid", flush=True)
    absent = [f"missing here: {text}" for text in dict.fromkeys(missing)]
    data = [] if missing else conversation_notes(config)
    for note in (*absent, *command.notes, *job.notes, *here, *data):
        print(f"note: {note}", file=sys.stderr)
    if taken := holder_of(folders_of(config)):
        raise taken
    return job
