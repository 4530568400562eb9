"""The model of a finished run, on one device: for commands that use its weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.checkpoint.folder import checkpoint_folder, step_to_load
from trainer.config.errors import ConfigError
from trainer.config.loader import parse_command_line
from trainer.config.schema import ActivationCheckpoint, Checkpoint, Compile, JobConfig, Parallelism, Validation
from trainer.job import ResolvedJob

if TYPE_CHECKING:
    from torch import nn

    from trainer.distributed.parallel_dims import ParallelDims


def configuration(folder: Path, step: int, *, command: str) -> JobConfig:
    """Return the configuration of the run in `folder`, changed for one device and whole weights.

    Raises:
        ConfigError: there is no run, no such step, or one of other data than `command` is for.
    """
    file = folder / "config.toml"
    if not file.is_file():
        raise ConfigError(f"{folder} holds no run: {file} is missing; give a folder that a run had as job.dump_folder")
    config = parse_command_line(["--job.config_file", str(file)]).config
    if config.trains_fields != (command == "forecast"):
        other = "forecast" if config.trains_fields else "generate"
        what = "fields" if config.trains_fields else "text"
        raise ConfigError(f"the run in {folder} is about {what}, which `lct {command}` is not for; use `lct {other}`")
    # No data are read, and only training on conversations needs their mask.
    data = {"dataset": "python_stdlib", "dataset_path": None} if config.training.dataset == "chat" else {}
    config = replace(
        config,
        job=replace(config.job, dump_folder=str(folder)),
        parallelism=Parallelism(),
        training=replace(config.training, local_batch_size=1, global_batch_size=-1, attention_mask="causal", **data),
        validation=Validation(),
        activation_checkpoint=ActivationCheckpoint(),
        compile=Compile(),
        checkpoint=Checkpoint(
            enable=True,
            folder=config.checkpoint.folder,
            load_step=step,
            initial_load_path=config.checkpoint.initial_load_path,
        ),
    )
    if step_to_load(config) is None and config.checkpoint.initial_load_path is None:
        raise ConfigError(
            f"{checkpoint_folder(config)} holds no checkpoint; train with --checkpoint.enable to save the last step"
        )
    return config


@contextmanager
def opened_model(job: ResolvedJob) -> "Iterator[tuple[nn.Module, ParallelDims, ResolvedJob]]":
    """Enter a context with the model and its saved weights, in a process group of one rank.

    Raises:
        ConfigError: the checkpoint is damaged, or of another model.
    """
    import torch

    from trainer.checkpoint.weights import load_weights, open_weights
    from trainer.distributed.parallel_dims import ParallelDims
    from trainer.models.initialization import initialize
    from trainer.models.model_spec import model_spec
    from trainer.runtime.process_group import Process, process_group

    process = Process(0, 0, 1, job.config.job.device)
    job, spec = job.on(process.device.type), model_spec(job.config.model.name)
    with process_group(process, job.config.comm):
        dims = ParallelDims(job.degrees, process.device.type)
        with torch.device("meta"):
            model = spec.build(job.model).to(getattr(torch, job.config.training.dtype))
        spec.parallelize(model, dims, job)
        initialize(model, seed=0, device=process.device)
        load_weights(open_weights(job.config, job.model), [model])
        yield model, dims, job
