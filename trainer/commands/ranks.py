"""What every command does that starts ranks on this machine. Torch-free."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.commands.start import ROOT
from trainer.config.errors import ConfigError
from trainer.config.schema import JobConfig
from trainer.job import ResolvedJob
from trainer.runtime.console import report
from trainer.runtime.nodes import Nodes

if TYPE_CHECKING:
    import torch

_CPP_LOGS = "TORCH_CPP_LOG_LEVEL"


def launch_options(config: JobConfig, here: int, device_type: str) -> list[str]:
    """Set the variables of the ranks, and return the options of the launcher. here: ranks on this machine."""
    # Ranks share the cores instead of fighting over them.
    os.environ.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // here, 1)))
    if (ROOT / "train.py").is_file():  # a clone, which need not be installed
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    os.environ["PYTHONSAFEPATH"] = "1"  # a folder `trainer` where the user stands is not this program
    options = ["--nproc-per-node", str(here), "--start-timeout", str(config.comm.init_timeout_seconds)]
    if device_type == "cuda" and config.comm.trace_buf_size:
        options += ["--flight-records", str(Path(config.job.dump_folder, config.comm.save_traces_folder).absolute())]
    return options


def launch(arguments: list[str]) -> int:
    """Start the launcher, and return the exit code of the job."""
    given = os.environ.get(_CPP_LOGS)
    os.environ.setdefault(_CPP_LOGS, "ERROR")  # torch reads it once; the store of a node that ends prints C++ traces
    from trainer.runtime.launch import main

    if given is None:
        del os.environ[_CPP_LOGS]  # the ranks log as usual
    return main(arguments)


def all_ranks(here: int) -> int:
    """Return the ranks of a command that has `here` ranks on each node.

    Raises:
        ConfigError: the variables that name the nodes are wrong.
    """
    return here * Nodes.from_environment(os.environ).count


def run_on_ranks(module: str, arguments: list[str], job: ResolvedJob, here: int) -> int:
    """Start a command of the program on several ranks of this machine, and return the exit code.

    module: of the command. Each rank runs it as a program, with these arguments.
    """
    return launch([*launch_options(job.config, here, job.device_type), "--program", module, *arguments])


def work_on_rank(prepare: Callable[[], "tuple[ResolvedJob, Callable[[ResolvedJob, torch.device], None]]"]) -> int:
    """Do a command's work on this rank, and return the exit code. prepare: returns the job and the work.

    A wrong setting, which every rank finds, is told by rank 0.
    """
    from trainer.commands.rank import on_rank

    try:
        job, work = prepare()
    except ConfigError as error:
        if os.environ.get("RANK", "0") == "0":
            report(f"error: {error}")
        return 2
    return on_rank(job, work)
