"""Train a model: `train.py --job.config_file FILE [--table.key value ...]`, alone or under a launcher.

Exit codes: 0 done; 1 the run failed; 2 a setting or an input is wrong (one sentence on stderr says which); 3 another
rank failed. SIGUSR1 prints the stack of every thread of this process on stderr.
"""

import faulthandler
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from trainer.config.errors import ConfigError, SharedConfigError
from trainer.config.loader import parse_command_line, to_toml
from trainer.job import ResolvedJob, resolve
from trainer.runtime import end_with, folder_held, holder_of, launcher_of

_GRACE_SECONDS = 5


def main(argv: list[str] | None = None) -> int:
    """Parse and check the configuration, then train; return the exit code. Only training imports torch."""
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    try:
        command = parse_command_line(sys.argv[1:] if argv is None else argv)
        if command.print_config:
            print(to_toml(command.config), flush=True)
            if not command.check_config:
                return 0
        job = resolve(command.config, command.world_size or world_size)
    except ConfigError as error:
        if rank == 0:  # every rank has the same error
            print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    if command.config.job.print_config and rank == 0:
        print(to_toml(command.config), flush=True)
    notes = [f"note: {note}" for note in (*command.notes, *job.notes)]
    if command.check_config:
        for note in notes if rank == 0 else ():
            print(note, file=sys.stderr)  # stdout is for --print-config
        if taken := holder_of(Path(command.config.job.dump_folder)):
            print(f"error: {taken}", file=sys.stderr, flush=True)
            return 2
        return 0

    return train(job, notes)


def train(job: ResolvedJob, notes: Iterable[str] = ()) -> int:
    """Train on this rank, report how it ended, and return the exit code."""
    from trainer.checkpoint.checkpointer import CheckpointError
    from trainer.components.console import logger, set_up_logging
    from trainer.runtime.agreement import raise_on_all_ranks
    from trainer.runtime.out_of_memory import out_of_memory_explained
    from trainer.runtime.process_group import LOST_PEERS, Process, is_peer_failure, process_group
    from trainer.runtime.reports import Reports
    from trainer.trainer import Trainer, TrainingError

    process = Process.from_environment()
    job, config = job.on(process.device.type), job.config
    set_up_logging(process.rank, color=config.metrics.enable_color_printing)
    for note in (config.job.description, *notes):
        if note:
            logger.info(note)
    reports = Reports(process, config.comm)
    try:
        records = Path(config.job.dump_folder) / config.comm.save_traces_folder
        with (
            process_group(process, config.comm, records, reports.store),
            _shared_errors_printed_once(process.rank),
            ExitStack() as held,
            out_of_memory_explained(job),
        ):
            folder = folder_held(Path(config.job.dump_folder), logger.warning)
            raise_on_all_ranks(lambda: held.enter_context(folder) if process.rank == 0 else None)
            Trainer(job, process.device).train()
    except SharedConfigError:
        return 2
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    except (TrainingError, CheckpointError) as error:
        if process.rank == 0:  # every rank has the same error
            print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    except Exception as error:
        if not is_peer_failure(error):
            print(f"rank {process.rank} failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
            reports.failed(error)
            return 1
        _report_lost_peers(partial(reports.lost, error))
        return LOST_PEERS
    return 0


def _report_lost_peers(find: Callable[[], str | None]) -> None:
    """Print the line that `find` returns, if any, and give other ranks time to end first.

    A launcher ends all ranks when the first one has ended. The first should be the rank that has the cause, or else the
    rank that prints the line.
    """
    started = time.monotonic()
    line = find()
    if line is not None:
        print(f"error: {line}", file=sys.stderr, flush=True)
    grace = _GRACE_SECONDS if line is not None else 1.2 * _GRACE_SECONDS
    time.sleep(max(started + grace - time.monotonic(), 0))


@contextmanager
def _shared_errors_printed_once(rank: int) -> Iterator[None]:
    """Rank 0 prints an error that every rank has. No rank ends before, because the launcher would end the others."""
    try:
        yield
    except SharedConfigError as error:
        from torch.distributed import barrier

        if rank == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        barrier()
        raise


def command_line() -> int:
    """Run `main` in a shell: a closed pipe (`--help | head`) and Ctrl-C end it without a trace."""
    launcher, arguments = launcher_of(sys.argv[1:], os.environ)
    if launcher is not None:
        end_with(launcher)
    faulthandler.register(signal.SIGUSR1)
    try:
        try:
            code = main(arguments)
        finally:
            sys.stdout.flush()
        if code not in (0, 2):
            sys.stderr.flush()
            os._exit(code)  # threads that save, and NCCL, could wait for ever for a peer
        return code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the rest of the output goes there
        return 0
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(command_line())
