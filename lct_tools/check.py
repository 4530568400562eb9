"""Check a configuration and its weights, and print every decision and the peak of memory of a step.

A step is traced in a process that imports torch.
"""

import sys
from dataclasses import replace
from pathlib import Path

from trainer.commands.check import check
from trainer.commands.start import parse
from trainer.config.errors import ConfigError
from trainer.config.loader import parse_command_line, to_toml
from trainer.families.registry import ModelFolder, base_weights
from trainer.job.record import ResolvedJob, size_words
from trainer.runtime.time_limits import limits_raised
from trainer.stores.folder import step_to_load


def main(argv: list[str]) -> int:
    """Run `check [FILE] [--world-size N] [--ngpu N] [--table.key value ...]`.

    It checks the configuration and prints its summary. It compares initial weights with the model, and prints the
    estimated peak memory of a step. With --print-config, it only prints and checks the configuration.

    FILE and variables are the same as for `train`. --ngpu is the number of ranks of this machine. With --world-size,
    --ngpu is the number of ranks of each node.

    Args:
        argv: The words of the command line, without the command.

    Returns:
        The exit code, 0. A wrong configuration raises instead.

    Raises:
        ConfigError: A setting is wrong, the weights do not fit the model, or another run holds a folder of the job.
    """
    start = parse(argv)
    arguments = ["--check-config", *start.arguments]
    command = parse_command_line(arguments)
    if command.print_config:
        print(to_toml(command.config), flush=True)
    job = check(command, start)
    if not command.print_config:
        check_tensors(job)
        ranks = job.degrees.world_size
        peak, note = peak_of_a_step(arguments, ranks, job.device_type, node=start.ranks)
        print(peak)
        if note:
            print(f"note: {note}", file=sys.stderr)
    return 0


def check_tensors(job: ResolvedJob) -> None:
    """Compare names and shapes of a Hugging Face folder with the model, by the headers of its files.

    Nothing is compared if the job starts from no such folder, or resumes from its own checkpoint without LoRA.

    Args:
        job: The resolved job.

    Raises:
        ConfigError: A tensor is missing, unknown or of another shape.
    """
    config = job.user_config
    start = base_weights(config)
    if start is None or not ModelFolder(Path(start)).has_config:
        return
    if config.checkpoint.enable and not config.lora.rank and step_to_load(config) is not None:
        return  # it is not read
    from trainer.checkpoint.weights import RunWeights  # it imports torch

    RunWeights(config, job.model).initial(job.folder)


def peak_of_a_step(
    arguments: list[str], ranks: int, device_type: str, *, node: int | None = None
) -> tuple[str, str]:
    """Estimate the peak memory of a rank, and check the time-outs against the time of a step. Both are for an H100.

    Args:
        arguments: Settings of the job.
        ranks: Ranks of the job.
        device_type: "cuda" or "cpu".
        node: Ranks on one node; None for the usual number of H100s.

    Returns:
        The peak in words, or why it is unknown; and a note on time-outs. The note is empty if the time-outs are long
        enough, and on CPUs, where the time is unknown.
    """
    from lct_planner import shim
    from lct_planner.estimate import estimate
    from lct_planner.timing import device
    from lct_planner.worker import Worker

    traced = device_type if device_type == "cpu" or not shim.why_not() else "cpu"
    try:
        with Worker(has_shim=traced == "cuda") as worker:
            gpu = device("h100")
            step = estimate(
                worker, arguments, ranks, replace(gpu, type=traced, node=node or gpu.node)
            )
    except ConfigError as error:
        return f"the peak of a step is not known: {error}", ""
    sizes = ", ".join(
        f"{name} {size_words(size)}" for name, size in list(step.by_purpose.items())[:4]
    )
    peak = (
        f"at its peak a step of a rank needs {size_words(step.profile.peak)}, {size_words(step.reserved)} with what "
        f"PyTorch reserves: {sizes}; `lct estimate` says more"
    )
    has_peers = ranks > 1 and device_type == "cuda"
    return peak, limits_raised(step.job.config.comm, step.time.seconds) if has_peers else ""
