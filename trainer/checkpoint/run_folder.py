"""The folder of a run's checkpoints before the first step: the step to resume from, and the best one so far."""

import json
import math

import torch
from torch.distributed.device_mesh import DeviceMesh

from longshard.sharding.exchange import all_reduce
from trainer.config.errors import ConfigError, SharedConfigError
from trainer.config.schema import JobConfig
from trainer.runtime.agreement import raise_on_all_ranks
from trainer.runtime.process_group import Process
from trainer.stores.folder import step_to_load
from trainer.stores.kept import BEST_FILE, best_saved
from trainer.stores.store import Store, reason_of


def agreed_step(config: JobConfig, folder: Store, world: DeviceMesh) -> int:
    """Return the step to resume from, 0 for none. A collective over all ranks.

    One process of each machine looks for the step, and all must find the same.

    Args:
        config: The configuration.
        folder: The folder of checkpoints.
        world: The mesh of all ranks.

    Raises:
        SharedConfigError: On every rank, if machines find different steps, or the step of the configuration is missing.
    """
    looks = Process.from_environment().local_rank == 0
    step = raise_on_all_ranks(lambda: (step_to_load(config) or 0) if looks else None, world)
    bounds = [0, -(2**62)] if step is None else [step, -step]
    most, least = all_reduce(
        torch.tensor(bounds, device=world.device_type), world, "max"
    ).tolist()
    if most != -least:
        raise SharedConfigError(
            f"checkpoint.folder = {config.checkpoint.folder!r}: one rank finds step {most} in {folder}, another "
            f"step {-least}; job.dump_folder must be one folder that all machines share"
        )
    return most


def prepare(config: JobConfig, folder: Store) -> None:
    """Make the folder of checkpoints, and remove the files of an interrupted save. One process calls it.

    Args:
        config: The configuration.
        folder: The folder of checkpoints.

    Raises:
        ConfigError: It cannot be written.
    """
    try:
        folder.prepare()
    except OSError as error:
        raise ConfigError(
            f"checkpoint.folder = {config.checkpoint.folder!r}: {error.filename or folder} cannot be written "
            f"({reason_of(error)}); {folder.remedy}"
        ) from None


def best_before(folder: Store) -> bytes:
    """Return `[step, loss]` of the best checkpoint in the folder, as JSON.

    Without one, or if its record is damaged, the result is `[0, Infinity]`.

    Args:
        folder: The folder of checkpoints.

    Raises:
        ConfigError: The file of the record is there, and cannot be read.
    """
    try:
        return json.dumps(best_saved(folder) or (0, math.inf)).encode()
    except OSError as error:
        raise ConfigError(
            f"{folder.path / BEST_FILE} cannot be read ({reason_of(error)}); {folder.remedy}"
        ) from None
