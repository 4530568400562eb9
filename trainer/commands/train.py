"""Check a configuration, then start one rank per GPU of this machine, or two on a CPU.

    train [FILE] [--ngpu N] [--log-rank RANKS] [--table.key value ...]

The variables NGPU, CONFIG_FILE and LOG_RANK stand for FILE and the two options. On several nodes the same command runs
on each (docs/several_nodes.md). Torch is imported when everything has been checked and said.
"""

import argparse
import os
from dataclasses import dataclass

from trainer.commands.check import CPU_RANKS, acted
from trainer.commands.notes import job_notes, opening
from trainer.commands.ranks import ROOT, launch_options
from trainer.config.errors import ConfigError
from trainer.config.loader import CommandLine, parse_command_line
from trainer.job import resolve
from trainer.job.summary import summary
from trainer.runtime import folders_of, holder_of
from trainer.runtime.console import logger, report, say_waiting, set_up_logging
from trainer.runtime.devices import this_machine
from trainer.runtime.nodes import Nodes, whole_number

DEFAULT_CONFIG = ROOT / "train_configs" / "debug_model.toml"


@dataclass(frozen=True)
class Start:
    """What to start on this machine."""

    ranks: int | None
    """None: one per GPU."""
    log_rank: str
    arguments: list[str]
    """The settings, for every rank."""


def parse(argv: list[str]) -> Start:
    """Return what the arguments and the variables NGPU, CONFIG_FILE and LOG_RANK say.

    Raises:
        ConfigError: a number of ranks that is none.
    """
    config = argv[0] if argv and not argv[0].startswith("-") else None
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for option in ("--ngpu", "--log-rank"):
        parser.add_argument(option, nargs="?", const="")
    known, rest = parser.parse_known_args(argv[1:] if config else argv)
    ranks = None
    if "ngpu" in known:
        ranks = whole_number("--ngpu", known.ngpu, such_as="--ngpu 2")
    elif "NGPU" in os.environ:
        ranks = whole_number("NGPU", os.environ["NGPU"], such_as="NGPU=2")
    config = config or os.environ.get("CONFIG_FILE") or str(DEFAULT_CONFIG)
    log_rank = getattr(known, "log_rank", os.environ.get("LOG_RANK", "0"))
    return Start(ranks, log_rank, ["--job.config_file", config, *rest])


def main(argv: list[str]) -> int:
    """Check, say what starts, start the ranks of this machine, and return the exit code of the job."""
    try:
        start = parse(argv)
        command = parse_command_line(start.arguments)
        if (code := acted(command)) is not None:
            return code
        launch_arguments = _prepare(start, command)
    except ConfigError as error:
        report(f"error: {error}")
        return 2
    say_waiting("importing PyTorch, here and in the ranks")
    from trainer.runtime.launch import main as launch

    return launch([*launch_arguments, *start.arguments])


def _prepare(start: Start, command: CommandLine) -> list[str]:
    """Say what starts, check it, set the variables of the ranks, and return the options of the launcher."""
    config, machine = command.config, this_machine()
    nodes = Nodes.from_environment(os.environ)
    here = start.ranks or (machine.gpus if config.job.device != "cpu" else 0) or CPU_RANKS
    ranks, device_type = here * nodes.count, machine.device_type(config.job.device)
    os.environ["LOG_RANK"] = start.log_rank
    set_up_logging(0, color=config.metrics.enable_color_printing)
    logger.info(opening(config, ranks, device_type))
    job = resolve(config, ranks, device_type)
    told = [summary(job), *(f"note: {note}" for note in (*command.notes, *job.notes, *job_notes(job, machine, here)))]
    for text in told if nodes.count == 1 else ():  # of several nodes rank 0 tells it, once
        logger.info(text)
    if taken := holder_of(folders_of(config)):
        raise taken
    return launch_options(config, here, device_type)
