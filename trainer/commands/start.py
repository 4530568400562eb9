"""The ranks that a command line and its variables start on this machine, and the notes before the start. Torch-free."""

import argparse
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trainer.config.errors import ConfigError
from trainer.config.schema import JobConfig
from trainer.config.writable import is_address
from trainer.job import ResolvedJob
from trainer.job.memory import check_memory
from trainer.runtime.devices import Machine
from trainer.runtime.dump_folder import check_creatable, folders_of
from trainer.runtime.nodes import Nodes, whole_number
from trainer.stores.folder import checkpoint_folder

ROOT = Path(__file__).resolve().parents[2]
CUDA_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
"""The environment variable for the number of hardware queues, among which CUDA divides the streams of a process."""
CPU_RANKS = 2
"""Number of ranks on a machine without GPUs."""
DEFAULT_CONFIG = ROOT / "train_configs" / "debug_model.toml"
FINE_TUNING = ROOT / "train_configs" / "finetune.toml"
"""The configuration of a command line that names a folder of weights and no file."""


@dataclass(frozen=True)
class Start:
    """The ranks to start on this machine.

    Attributes:
        ranks: Number of ranks on this machine; None for one per GPU.
        log_rank: The ranks whose log is shown, separated by commas.
        arguments: The settings of every rank, as words of a command line.
        launched_ranks: Number of ranks of the job on all nodes, if a launcher has started them; otherwise None.
    """

    ranks: int | None
    log_rank: str
    arguments: list[str]
    launched_ranks: int | None = None

    def ranks_here(self, config: JobConfig, machine: Machine) -> int:
        """Return the number of ranks on this machine.

        Args:
            config: The configuration of the run.
            machine: This machine.
        """
        return self.ranks or (machine.gpus if config.job.device != "cpu" else 0) or CPU_RANKS

    def world_size(self, config: JobConfig, machine: Machine) -> int:
        """Return the number of ranks of the job; all nodes have the same number.

        Args:
            config: The configuration of the run.
            machine: This machine.
        """
        return (
            self.launched_ranks
            or self.ranks_here(config, machine) * Nodes.from_environment().count
        )


def check_here(config: JobConfig) -> None:
    """Check that this machine knows MASTER_ADDR, if there are several nodes, and can write the folders of the job.

    Args:
        config: The configuration of the run.

    Raises:
        ConfigError: A variable of the nodes is wrong, MASTER_ADDR is no known address (on the first node: no address of
            this machine), or a folder cannot be written.
    """
    nodes = Nodes.from_environment()
    if nodes.count > 1:
        nodes.check_address()
    for key, folder in folders_of(config).items():
        check_creatable(folder, key)


def parse(argv: list[str]) -> Start:
    """Return the ranks to start, from the command line and the variables NGPU, CONFIG_FILE and LOG_RANK.

    Args:
        argv: The words of the command line, without the command.

    Raises:
        ConfigError: A word is neither the file nor an option, or a number of ranks is wrong.
    """
    config = argv[0] if argv and not argv[0].startswith("-") else None
    options = argv if config is None else argv[1:]
    if options and not options[0].startswith("--") and options[0] != "-h":
        after = f" after {config!r}" if config else ""
        raise ConfigError(
            f"{options[0]!r}{after} is neither the one file nor an option; write FILE --table.key value, such as "
            "debug_model --training.steps 300"
        )
    parser = argparse.ArgumentParser(
        add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS
    )
    for option in ("--ngpu", "--log-rank"):
        parser.add_argument(option, nargs="?", const="")
    known, settings = parser.parse_known_args(options)
    ranks = None
    if "ngpu" in known:
        ranks = whole_number("--ngpu", known.ngpu, such_as="--ngpu 2")
    elif "NGPU" in os.environ:
        ranks = whole_number("NGPU", os.environ["NGPU"], such_as="NGPU=2")
    names_weights = any(
        word.partition("=")[0] in ("--model.path", "--model-path") for word in settings
    )
    without_file = FINE_TUNING if names_weights else DEFAULT_CONFIG
    config = config or os.environ.get("CONFIG_FILE") or str(without_file)
    log_rank = getattr(known, "log_rank", os.environ.get("LOG_RANK", "0"))
    return Start(ranks, log_rank, ["--job.config_file", config, *settings])


def opening(config: JobConfig, ranks: int, device_type: str) -> str:
    """Return the first line of output: the name of the run, its ranks, and the folder of its output.

    Args:
        config: The configuration of the run.
        ranks: Ranks of the job.
        device_type: "cuda" or "cpu".
    """
    job_name = (
        config.job.description or config.job.config_file or "training with default settings"
    )
    device = {"cuda": "GPU", "cpu": "CPU rank"}[device_type]
    return f"{job_name} on {ranks} {device}{'s' * (ranks > 1)}; output goes to {config.job.dump_folder}"


def job_notes(job: ResolvedJob, machine: Machine, ranks_here: int) -> list[str]:
    """Return a line for each property of the job on this machine that may surprise the user.

    Args:
        job: The resolved job.
        machine: This machine.
        ranks_here: Number of ranks on this machine.

    Raises:
        ConfigError: The job needs more memory than this machine has.
    """
    available = machine.memory(job.device_type)
    if available is not None and job.device_type == "cpu":
        available //= ranks_here
    check_memory(job, available)
    notes = (
        machine.note,
        _one_connection(job.device_type),
        _left_checkpoints(job),
        _log_rank(job.degrees.world_size),
        _tokenizer_of_python(job.config),
    )
    return [note for note in notes if note]


def _one_connection(device_type: str) -> str:
    if device_type != "cuda" or os.environ.get(CUDA_CONNECTIONS) != "1":
        return ""
    return (
        f"{CUDA_CONNECTIONS} = 1 puts all streams of a GPU into one queue, so messages and copies do not overlap with "
        "computation; unset it, and a rank takes 32"
    )


def _left_checkpoints(job: ResolvedJob) -> str:
    # A remote store may answer late.
    if job.config.checkpoint.enable or is_address(job.config.checkpoint.folder):
        return ""
    folder = checkpoint_folder(job.config)
    with suppress(OSError):
        if steps := folder.steps():
            return (
                f"{folder} has a checkpoint of step {steps[-1]:,}, and checkpoint.enable is off: this run starts from "
                "the beginning and saves none; --checkpoint.enable resumes"
            )
    return ""


def _tokenizer_of_python(config: JobConfig) -> str:
    is_shipped = config.model.tokenizer_file == JobConfig.model.tokenizer_file
    if (
        not is_shipped
        or config.task != "tokens"
        or config.training.dataset in ("python_stdlib", "tokens")
    ):
        return ""
    return (
        "the shipped tokenizer was made of Python's sources: a token has 4.0 characters of Python, 2.8 of English, 1.9 "
        "of German, 0.5 of Russian, 0.35 of Chinese; train one of your text (lct tokenizer train), or name one "
        "in model.tokenizer_path"
    )


def _log_rank(ranks: int) -> str:
    words = [word.strip() for word in os.environ.get("LOG_RANK", "0").split(",")]
    unknown = [word for word in words if not (word.isdecimal() and int(word) < ranks)]
    if not unknown:
        return ""
    silent = "no rank logs its steps" if unknown == words else "the others log"
    return f"LOG_RANK names {', '.join(map(repr, unknown))}, and there are the ranks 0 to {ranks - 1}: {silent}"
