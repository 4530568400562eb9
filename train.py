"""Train a model: `train.py --job.config_file FILE [--table.key value ...]`, alone or under a launcher.

Exit codes: 0 done; 1 the run failed; 2 a setting or an input is wrong (one sentence on stderr says which).
"""

import os
import sys
import time
import traceback
from collections.abc import Iterable

from trainer.config.degrees import Degrees
from trainer.config.errors import ConfigError
from trainer.config.loader import parse_command_line, to_toml
from trainer.config.schema import JobConfig
from trainer.config.validate import validate

PEER_FAILURE_GRACE_SECONDS = 5


def main(argv: list[str] | None = None) -> int:
    """Parse and check the configuration, then train. torch is imported only when there is something to train."""
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    try:
        command = parse_command_line(sys.argv[1:] if argv is None else argv)
        if command.print_config:
            print(to_toml(command.config), flush=True)
            if not command.check_config:
                return 0
        degrees = validate(command.config, command.world_size or world_size)
    except ConfigError as error:
        if rank == 0:  # every rank finds the same
            print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    if command.config.job.print_config and rank == 0:
        print(to_toml(command.config), flush=True)
    if command.check_config:
        return 0

    return train(command.config, degrees, command.notes)


def train(config: JobConfig, degrees: Degrees, notes: Iterable[str] = ()) -> int:
    """Train on this rank and report how it ended; returns the exit code."""
    from trainer.components.console import logger, set_up_logging
    from trainer.distributed.process_group import Process, is_peer_failure, process_group
    from trainer.trainer import Trainer, TrainingError

    process = Process.from_environment()
    set_up_logging(process.rank, color=config.metrics.enable_color_printing)
    for note in (config.job.description, *notes):
        if note:
            logger.info(note)
    try:
        with process_group(process, config.comm):
            Trainer(config, degrees, process.device).train()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    except TrainingError as error:
        if process.rank == 0:  # every rank finds the same
            print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    except Exception as error:
        if not is_peer_failure(error):
            print(f"rank {process.rank} failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
            return 1
        print(f"rank {process.rank} lost its peers: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
        # The launcher names the rank that ends first as the cause: let that be the one that has it.
        time.sleep(PEER_FAILURE_GRACE_SECONDS)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
