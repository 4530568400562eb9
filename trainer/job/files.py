"""Check the dump folder and the checkpoint from which the run would resume. Torch-free."""

from pathlib import Path

from trainer.config.errors import ConfigError
from trainer.config.schema import JobConfig
from trainer.config.writable import is_address, is_writable, nearest_existing, writable_folder
from trainer.families.args import ModelArgs
from trainer.families.registry import hf_config
from trainer.stores.folder import check_fits, checkpoint_folder, read_state, step_to_load


def check_dump_folder(config: JobConfig) -> None:
    """Check, without a change, that the dump folder can be made: its nearest existing parent is writable.

    Args:
        config: The configuration of the run.

    Raises:
        ConfigError: The folder cannot be created or written, its name is empty, or it is an address.
    """
    folder = config.job.dump_folder
    if not folder:
        raise ConfigError("job.dump_folder = '' must name a folder, such as './outputs'")
    if is_address(folder):
        raise ConfigError(
            f"job.dump_folder = {folder!r} is an address, and only checkpoints may be in a remote store; name a "
            "folder, and the address as checkpoint.folder"
        )
    path = Path(folder)
    existing = nearest_existing(path)
    if not existing.is_dir():
        kind = "a file" if existing.exists() else "a broken link"
        raise ConfigError(
            f"job.dump_folder = {folder!r}: {existing} is {kind}; name a folder{writable_folder(path)}"
        )
    if not is_writable(path):
        raise ConfigError(
            f"job.dump_folder = {folder!r}: {existing} is not writable for this user; "
            f"name a folder that is{writable_folder(path)}"
        )


def check_checkpoint_keys(config: JobConfig) -> None:
    """Check the keys of the table [checkpoint] by themselves.

    Args:
        config: The configuration of the run.

    Raises:
        ConfigError: A key is wrong.
    """
    settings = config.checkpoint
    if settings.load_step != -1 and settings.load_step < 1:
        raise ConfigError(
            f"checkpoint.load_step = {settings.load_step} must be a saved step, or -1 for the latest"
        )
    if not settings.enable:
        return
    if not settings.folder:
        raise ConfigError(
            "checkpoint.folder = '' must name a folder inside job.dump_folder, such as 'checkpoint'"
        )
    if settings.last_save_in_hf and is_address(settings.folder):
        raise ConfigError(
            "checkpoint.last_save_in_hf writes into the folder of checkpoints, and checkpoint.folder = "
            f"{settings.folder!r} is in a remote store; leave it out, and use lct convert to-hf after the run"
        )
    if settings.keep_every % settings.interval:
        raise ConfigError(
            f"checkpoint.keep_every = {settings.keep_every} must be a multiple of checkpoint.interval = "
            f"{settings.interval}: other steps have no checkpoint to keep"
        )


def check_checkpoint(config: JobConfig, model: ModelArgs) -> None:
    """Check the checkpoint from which the run resumes, and that transformers has the model if it is exported.

    If checkpoints are off, nothing is checked. Without a checkpoint, the run begins anew, except with `load_only`.

    Args:
        config: The configuration of the run.
        model: The arguments of the model.

    Raises:
        ConfigError: The checkpoint does not fit, is missing, or transformers lacks the model.
    """
    settings = config.checkpoint
    if not settings.enable:
        return
    if settings.last_save_in_hf and config.task == "tokens":
        hf_config(config.model.name).write(model)  # refuses what transformers does not have
    step = step_to_load(config)
    if step is None and settings.load_only:
        raise ConfigError(
            f"checkpoint.load_only = true: {checkpoint_folder(config)} holds no checkpoint to resume from; name a "
            "folder that does with checkpoint.folder, or leave it out"
        )
    if step is not None:
        check_fits(read_state(checkpoint_folder(config), step), config, model)
