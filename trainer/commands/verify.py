"""Read all files of checkpoints, and print for each saved step whether it is whole or damaged.

verify outputs/debug_model                           all steps of a run
verify outputs/debug_model/checkpoint/step-500       one of them

The command checks lengths, check sums, names and shapes against the model of the run, and that values are finite.
The exit code is 0 if all steps are whole, 1 if one is damaged, and 2 if there is none.
"""

import argparse
import sys
import time
from pathlib import Path

from trainer.commands.finished_run import file_of_step, folder_of_checkpoints
from trainer.config.errors import ConfigError
from trainer.config.loader import RUN_FILE, UntrustedImports, parse_command_line
from trainer.config.schema import Checkpoint, Job, JobConfig
from trainer.families.args import ModelArgs
from trainer.job.resolution import resolve_model
from trainer.stores.addresses import named_step, saved_step, store_of
from trainer.stores.folder import checkpoint_folder
from trainer.stores.store import Store, reason_of


def steps_of(path: str) -> tuple[Store, list[int], Path]:
    """Return the folder of checkpoints of a path, the steps in it, and the file of the run's configuration.

    The file may not exist.

    Args:
        path: The path of the user: the folder of a run, its folder of checkpoints, or one saved step.

    Raises:
        ConfigError: There is no saved step.
    """
    run = Path(path).absolute() / RUN_FILE
    if (step := saved_step("path", path)) is not None:
        folder = named_step("path", path)[0]
        return folder, [step], Path(str(folder)).parent / RUN_FILE
    if run.is_file():
        settings = Checkpoint(folder=folder_of_checkpoints(run))
        folder = checkpoint_folder(JobConfig(job=Job(dump_folder=path), checkpoint=settings))
    else:
        folder = store_of("path", path)
        run = run.parent.parent / RUN_FILE
    steps = folder.steps()
    if not steps:
        raise ConfigError(
            f"{folder} holds no whole checkpoint: there is no step-N with a state.json; name the job.dump_folder of a "
            "run, its folder of checkpoints, or one step-N"
        )
    return folder, steps, run


def model_of(
    folder: Store, step: int, last: Path
) -> tuple[tuple[JobConfig, ModelArgs] | None, str]:
    """Return configuration and model of a saved step, or None and the reason why they are unknown.

    Args:
        folder: The folder of checkpoints.
        step: The step.
        last: The configuration file of the folder's last run, for a step without its own configuration.

    Raises:
        ConfigError: The step's configuration is damaged.
    """
    missing = []
    with file_of_step(folder, step, last) as run:
        if not run.is_file():
            return None, f"its {run.name} is missing"
        try:
            config = parse_command_line(["--job.config_file", str(run)], reading=True).config
            model = resolve_model(config, missing)
        except UntrustedImports:
            return None, f"job.imports in its {RUN_FILE} names code, and lct verify runs none"
        except ConfigError as error:
            return None, str(error)
    return (None, missing[0]) if missing else ((config, model), "")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    described = argparse.ArgumentParser(prog="lct verify", description=__doc__.splitlines()[0])
    described.add_argument(
        "path", help="job.dump_folder of a run, or one saved step of it, step-N"
    )
    return described


def main(argv: list[str] | None = None) -> int:
    """Verify each saved step, and print a line for each.

    Args:
        argv: The words of the command line, without the command.

    Returns:
        The exit code: 0 if all steps are whole, 1 if a step is damaged.

    Raises:
        ConfigError: There is no saved step, or the path cannot be read.
    """
    args = parser().parse_args(argv)
    try:
        folder, steps, file = steps_of(args.path)
    except OSError as error:
        raise ConfigError(f"{args.path} cannot be read ({reason_of(error)})") from None
    from trainer.checkpoint.verify import verify_step

    damaged = False
    printed_reason = ""
    for step in steps:
        started = time.monotonic()
        try:
            run, why_not = model_of(folder, step, file)
            if run is None and why_not != printed_reason:
                print(
                    f"note: entries are not compared with a model ({why_not})", file=sys.stderr
                )
                printed_reason = why_not
            files, size, tensors = verify_step(folder, step, run)
        except ConfigError as error:
            print(f"{folder.step(step).name}: damaged: {error}", flush=True)
            damaged = True
            continue
        counts = f"{files} files, {size / 2**20:,.1f} MiB, {tensors:,} tensors"
        print(
            f"{folder.step(step).name}: whole: {counts} ({time.monotonic() - started:.1f} s)",
            flush=True,
        )
    return int(damaged)
