"""The program of one rank: `--job.config_file FILE [--table.key value ...]`, alone or under a launcher.

SIGUSR1 prints the stack of every thread of this process on stderr. Exit codes: docs/architecture.md.

State of the process: SIGUSR1, and a crash in native code, show what every thread does, until the process ends.
"""

import atexit
import faulthandler
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from trainer.commands.check import print_or_check
from trainer.commands.start import CUDA_CONNECTIONS, Start, job_notes, opening
from trainer.config.errors import ConfigError, SharedConfigError
from trainer.config.loader import parse_command_line
from trainer.job import ResolvedJob, resolve
from trainer.job.attention import options_as_keys
from trainer.job.resolution import on_device
from trainer.job.summary import summary
from trainer.runtime.console import (
    end_live_line,
    logger,
    report,
    say_waiting,
    set_up_logging,
)
from trainer.runtime.devices import this_machine
from trainer.runtime.dump_folder import FLIGHT_RECORDS, folder_held, folders_of, remove_estimate
from trainer.runtime.garbage import imports_uncollected
from trainer.runtime.launcher_watch import end_with, launcher_of
from trainer.runtime.nodes import ranks_of_each_node
from trainer.runtime.output import outlast_readers
from trainer.runtime.rank_processes import LOST_PEERS

if TYPE_CHECKING:
    import torch

    from trainer.runtime.reports import Reports

_GRACE_SECONDS = 5
# PyTorch reads the first of these variables that is set.
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def main(argv: list[str] | None = None, *, launched: bool = False) -> int:
    """Parse and check the configuration, then train. Only training imports torch.

    Args:
        argv: The words of the command line; None for the words of this process.
        launched: Whether our launcher started this rank.

    Returns:
        The exit code: 0, 2 for a wrong configuration, LOST_PEERS if another rank is lost, otherwise 1 or the code of
        `sys.exit`.
    """
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"} | os.environ
    rank, local_rank, world_size = (
        int(variables[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    )
    try:
        command = parse_command_line(sys.argv[1:] if argv is None else argv)
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        if command.print_config or command.check_config:
            if rank == 0:
                print_or_check(command, Start(ranks_here, "0", [], launched_ranks=world_size))
            return 0
        outlast_readers(buffered=False, is_log=True)
        machine = this_machine()
        device_type = machine.device_type(command.config.job.device)
        # Our launcher has checked all files. Without it, the first rank of a node checks data files, which may be many.
        checked = {"data_checked": launched or local_rank > 0, "weights_checked": launched}
        node = ranks_of_each_node(variables, world_size)
        job = resolve(command.config, world_size, device_type, node=node, **checked)
        set_up_logging(rank)
        if not launched and rank == 0:
            remove_estimate(job.config)
        # On one node, our launcher has already printed these lines.
        if not launched or ranks_here < world_size:
            logger.info(opening(command.config, world_size, job.device_type))
            logger.info(summary(job))
            for note in (*command.notes, *job.notes, *job_notes(job, machine, ranks_here)):
                logger.info(f"note: {note}")
            say_waiting("importing PyTorch")
    except ConfigError as error:
        if local_rank == 0:  # every rank of the node has the same error
            report(f"error: {error}")
        return 2
    return on_rank(job, _train)


def _train(job: ResolvedJob, device: "torch.device") -> None:
    from torch.distributed import get_rank

    from trainer.runtime.agreement import raise_on_all_ranks
    from trainer.trainer import Trainer

    with ExitStack() as held:

        def hold() -> None:
            for key, folder in folders_of(job.config).items() if get_rank() == 0 else ():
                held.enter_context(folder_held(folder, key=key))

        raise_on_all_ranks(hold)
        Trainer(job, device).train()


def on_rank(job: ResolvedJob, work: "Callable[[ResolvedJob, torch.device], None]") -> int:
    """Return the exit code of this rank after running `work` in the job's process group. Report errors.

    Args:
        job: The resolved job.
        work: Takes the job and the device of this rank.
    """
    with imports_uncollected():
        import_module("trainer.trainer")  # `work` imports it later, with garbage collection
        from trainer.checkpoint.failed_save import CheckpointError
        from trainer.components.out_of_memory import out_of_memory_explained
        from trainer.components.step_outcome import TrainingError
        from trainer.runtime.process_group import Process, is_peer_failure, process_group
        from trainer.runtime.reports import Reports

    config = job.config
    process = Process.from_environment(job.user_config.job.device)  # auto: PyTorch's devices
    try:
        job = _with_device_of_torch(job, process.device.type)
    except ConfigError as error:
        _report_on_rank_0(process.rank, error)
        return 2
    reports = Reports(process, config.comm)
    try:
        records = Path(config.job.dump_folder) / FLIGHT_RECORDS
        host = config.training.enable_cpu_offload
        group = process_group(process, config.comm, records, reports.store, cpu_tensors=host)
        printed_once = _shared_errors_printed_once(process.rank)
        with group, printed_once, out_of_memory_explained(job), options_as_keys():
            work(job, process.device)
    except SharedConfigError:
        return 2
    except ConfigError as error:
        report(f"error: {error}")
        return 2
    except (TrainingError, CheckpointError) as error:
        _report_on_rank_0(process.rank, error)
        return 1
    except SystemExit as error:
        return _left_early(reports, error)
    except Exception as error:
        if not is_peer_failure(error):
            report(f"rank {process.rank} failed:\n{traceback.format_exc()}")
            reports.failed(error)
            return 1
        _report_lost_peers(reports, error)
        return LOST_PEERS
    finally:
        end_live_line()
    return 0


def _report_on_rank_0(rank: int, error: Exception) -> None:
    """Report an error that every rank has."""
    if rank == 0:
        report(f"error: {error}")


def _with_device_of_torch(job: ResolvedJob, device_type: str) -> ResolvedJob:
    """Return the job on the type of device that PyTorch uses; log a note if the machine has another type."""
    if device_type != job.device_type:
        logger.info(
            f"note: this machine has {job.device_type}, and the installed PyTorch uses {device_type}: so does the run"
        )
    return on_device(job, device_type)


def _left_early(reports: "Reports", error: SystemExit) -> int:
    """Report that the work of this rank called `sys.exit`; return an exit code above 0."""
    report(
        f"error: rank {reports.process.rank} called sys.exit({error.code!r}) before its work was done"
    )
    reports.failed(error)
    return error.code if isinstance(error.code, int) and error.code > 0 else 1


def _report_lost_peers(reports: "Reports", error: Exception) -> None:
    """Report the failure of another rank, if it is this rank's turn; then wait, so that other ranks end first.

    A launcher ends all ranks as soon as one has ended. So this rank sleeps before it returns, and sleeps longer if
    another rank prints the report.
    """
    started = time.monotonic()
    line = reports.lost(error)
    if line is not None:
        report(f"error: {line}")
    grace = _GRACE_SECONDS if line is not None else 1.2 * _GRACE_SECONDS
    time.sleep(max(started + grace - time.monotonic(), 0))


@contextmanager
def _shared_errors_printed_once(rank: int) -> Iterator[None]:
    """Let rank 0 print an error that every rank has, a SharedConfigError; then every rank raises it.

    All ranks meet at a barrier first, because the first rank that ends would end all ranks. Other errors pass through.

    Args:
        rank: This rank.
    """
    try:
        yield
    except SharedConfigError as error:
        from torch.distributed import barrier

        _report_on_rank_0(rank, error)
        barrier()
        raise


def set_allocator(environ: MutableMapping[str, str] = os.environ) -> None:
    """Use expandable segments in the GPU allocator, unless the user has set the allocator.

    Sequences of varying lengths fragment segments of fixed sizes. The ranks of every launcher call this function
    before they import torch, which reads the variable once.

    Args:
        environ: The environment variables of the process, changed in place.
    """
    if not any(name in environ for name in _ALLOCATOR):
        environ[_ALLOCATOR[-1]] = "expandable_segments:True"


def set_connections(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set the number of hardware queues for CUDA streams to 32, unless the user set it.

    CUDA makes 8 queues by default. Computation, FSDP, keys and values, their gradients and copies run on about ten
    streams, and two streams in one queue wait for each other. CUDA reads the variable when it starts.

    Args:
        environ: The environment variables of the process, changed in place.
    """
    environ.setdefault(CUDA_CONNECTIONS, "32")  # CUDA has no more


def command_line(program: Callable[..., int] = main) -> int:
    """Run the program of a rank as a process: Ctrl-C prints no traceback, and a closed pipe does not end it.

    If torch was imported, this ends the process and does not return.

    Args:
        program: Takes the arguments, and `launched`, whether our launcher started this rank; returns the exit code.

    Returns:
        The exit code.
    """
    set_allocator()
    set_connections()
    outlast_readers(buffered=False, is_log=False)
    launcher, arguments = launcher_of(sys.argv[1:], os.environ)
    if launcher is not None:
        end_with(launcher)
    faulthandler.enable()  # a crash in native code prints where Python was
    faulthandler.register(signal.SIGUSR1)
    try:
        code = program(arguments, launched=sys.argv[1:2] == ["--launched-by"])
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    if "torch" in sys.modules:
        _end(code)
    return code


def _end(code: int) -> NoReturn:
    """End this process without ending the interpreter; `atexit` functions run only if `code` is 0 or 2.

    Gloo's threads outlive their process group. If such a thread frees a tensor while Python ends, the process aborts
    (pytorch#190489). After a failure, NCCL and the threads that save could wait forever for another rank.
    """
    if code in (0, 2):
        atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def rank_process() -> int:
    """Return the exit code of a rank that a launcher has started, after running it with the arguments of sys.argv."""
    return command_line(main)


if __name__ == "__main__":
    sys.exit(rank_process())
