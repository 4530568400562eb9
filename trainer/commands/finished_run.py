"""The model of a finished run, or of a Hugging Face folder, for commands that use its weights."""

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.commands.options import Parser
from trainer.config.data import CONVERSATIONS
from trainer.config.errors import ConfigError
from trainer.config.loader import RUN_FILE, parse_command_line
from trainer.config.schema import TOKENIZER_FILES, Checkpoint, Job, JobConfig, Training
from trainer.config.toml import with_bases
from trainer.families.registry import ModelFolder
from trainer.hugging_face.config_json import CONFIG_FILE
from trainer.job import ResolvedJob
from trainer.job.resolution import TASKS
from trainer.stores.folder import checkpoint_folder, saved_configuration, step_to_load
from trainer.stores.store import Store

if TYPE_CHECKING:
    import torch
    from torch import nn

    from trainer.parallel.parallel_dims import ParallelDims

# Settings of [training] with which commands read text and compute.
_KEPT = (
    "seq_len",
    "steps",
    "seed",
    "data_streams",
    "dataset_text_field",
    "on_bad_record",
    "loss_chunk_tokens",
    "dtype",
    "mixed_precision_param",
    "enable_cpu_offload",
)
# Tables that have no meaning for whole weights.
_RESET = ("parallelism", "validation", "activation_checkpoint", "compile")
_TEXT_COMMANDS = ("lct generate", "lct chat", "lct serve", "lct evaluate")


def model_options(parser: Parser, *, seed: str) -> None:
    """Add --seed, --step, --tokenizer and --allow-imports, for all commands that use a language model.

    Args:
        parser: The parser of the command.
        seed: The use of the seed, for the help.
    """
    add = parser.add_argument
    add("--seed", type=int, default=0, help=f"{seed} (default: 0)")
    add("--step", type=int, default=-1, help="saved step of the run (default: the latest)")
    add("--tokenizer", metavar="PATH", help="tokenizer (default: the folder's own)")
    imports_option(parser)


def imports_option(parser: argparse.ArgumentParser) -> None:
    """Add --allow-imports, for all commands that read a run.

    Args:
        parser: The parser of the command.
    """
    parser.add_argument(
        "--allow-imports",
        action="store_true",
        help="import the packages that the run names (job.imports); their code runs",
    )


def configuration(
    folder: Path, step: int, *, command: str, task: str = "tokens", allow_imports: bool = False
) -> JobConfig:
    """Return the configuration of a run's step, changed to load its whole weights on one device.

    Parallelism, validation, activation checkpointing and compilation get their defaults, and the batch size is 1.

    Args:
        folder: The folder of the run.
        step: The saved step; -1 for the latest.
        command: The command, for messages.
        task: The task for whose runs the command is.
        allow_imports: Whether to import the packages that the run names; their code runs.

    Raises:
        ConfigError: There is no run or no such step, or the run is of another task.
    """
    config = _saved(
        folder, step, command=command, task=task, settings=["--allow-imports"] * allow_imports
    )
    # No data are read, and only training on conversations needs their mask.
    data = (
        {"dataset": "python_stdlib", "dataset_path": None}
        if config.training.dataset in CONVERSATIONS
        else {}
    )
    config = replace(
        config,
        training=replace(
            config.training,
            local_batch_size=1,
            global_batch_size=-1,
            sequence_chunks=1,
            attention_mask="causal",
            **data,
        ),
        **{table: getattr(JobConfig, table) for table in _RESET},
    )
    _saved_weights(config)
    return config


def text_configuration(
    args: argparse.Namespace, settings: Sequence[str] = (), *, command: str
) -> tuple[JobConfig, tuple[str, str | None]]:
    """Return a configuration that loads the language model of a run, or of a Hugging Face folder.

    It keeps the model, precision and parallelism of a run, and the data type of a Hugging Face folder. The data of the
    run need not exist. The batch size is 1, and output goes to the temporary folder of the system.

    Args:
        args: The options of `model_options`, and `folder`, the folder of the run or the Hugging Face folder.
        settings: Settings of the command line, which replace the folder's settings.
        command: The command, for messages.

    Returns:
        The configuration; and kind and path of the validation data, or of the training data if validation is off.

    Raises:
        ConfigError: The folder is neither, lacks weights or a tokenizer, or has no such step.
    """
    settings = [*settings, *["--allow-imports"] * args.allow_imports]
    if args.tokenizer is not None:
        settings = ["--model.tokenizer_path", args.tokenizer, *settings]
    folder = ModelFolder(args.folder)
    if folder.has_config and not (folder.path / RUN_FILE).is_file():
        source = _hugging_face_configuration(folder, args.step, settings)
        weights = str(folder.path.absolute())
    else:
        source = _saved(
            args.folder, args.step, command=command, task="tokens", settings=settings
        )
        weights = _saved_weights(source)
    loads = {"checkpoint": Checkpoint(initial_load_path=weights)}
    if source.lora.rank:
        saved = str(checkpoint_folder(source).path.absolute())
        loads = {"checkpoint": replace(source.checkpoint, folder=saved), "lora": source.lora}
    training = source.training
    data = training.dataset, training.dataset_path
    if source.validation.enable:
        data = source.validation.source(training)
    return JobConfig(
        # Output must not go to the folder of the weights.
        job=Job(dump_folder=tempfile.gettempdir(), device=source.job.device),
        model=source.model,
        chat=source.chat,
        training=Training(local_batch_size=1, **{n: getattr(training, n) for n in _KEPT}),
        parallelism=source.parallelism,
        float8=source.float8,
        comm=source.comm,
        **loads,
    ), data


def _hugging_face_configuration(
    folder: ModelFolder, step: int, settings: Sequence[str]
) -> JobConfig:
    """Return the configuration of a Hugging Face folder, with its longest sequence length.

    Raises:
        ConfigError: The folder has no tokenizer, or a step is asked for.
    """
    if step != -1:
        raise ConfigError(
            f"--step {step}: {folder.path} is a Hugging Face folder, which has no steps; leave "
            "--step out"
        )
    own = [
        f"--model.name={folder.family}",
        f"--model.flavor={folder.path.absolute()}",
        f"--training.seq_len={folder.args.max_seq_len}",
        f"--training.dtype={folder.dtype if folder.dtype in ('float64', 'bfloat16') else 'float32'}",
    ]
    config = parse_command_line([*own, *settings]).config
    if config.model.tokenizer_path is None and not folder.has_tokenizer:
        raise ConfigError(
            f"{folder.path} holds no tokenizer ({', '.join(TOKENIZER_FILES)}); name the model's own "
            "with --tokenizer"
        )
    return config


def _saved(
    folder: Path, step: int, *, command: str, task: str, settings: Sequence[str]
) -> JobConfig:
    """Return the saved configuration of a run, changed by `settings` of the command line, to load a step.

    step: -1 for the latest. command: for messages. task: the task that the run must have.
    Raises ConfigError if there is no run or no such step, or if the run is of another task.
    """
    file = folder / RUN_FILE
    if not file.is_file():
        also = f", or a Hugging Face folder with its {CONFIG_FILE}" * (
            command in _TEXT_COMMANDS
        )
        raise ConfigError(
            f"{folder} holds no run: {file} is missing; give a folder that a run had as job.dump_folder{also}"
        )
    config = step_configuration(file, step, settings)
    if config.task != task:
        task_record = TASKS[config.task]
        raise ConfigError(
            f"the run in {folder} learned from {task_record.data}, and `{command}` is not for them; "
            f"use `{task_record.command.format(folder)}`"
        )
    return config


def step_configuration(file: Path, step: int, settings: Sequence[str] = ()) -> JobConfig:
    """Return the configuration with which a step was saved, changed to load this step from its present folder.

    Args:
        file: The configuration of the folder's last run, which names the folder of checkpoints. It stands in for the
            missing configuration of a step.
        step: The saved step; -1 for the latest.
        settings: Settings of the command line, which replace settings of the step.

    Raises:
        ConfigError: There is no such step, or it is damaged.
    """

    def to_load(config: JobConfig, where: str) -> JobConfig:
        settings = Checkpoint(
            True, where, load_step=step, initial_load_path=config.checkpoint.initial_load_path
        )
        return replace(
            config, job=replace(config.job, dump_folder=str(file.parent)), checkpoint=settings
        )

    place = folder_of_checkpoints(file)
    last = to_load(JobConfig(), place)
    with file_of_step(checkpoint_folder(last), step_to_load(last), file) as own:
        command_line = parse_command_line(
            ["--job.config_file", str(own), *settings], reading=True
        )
    return to_load(command_line.config, place)


def folder_of_checkpoints(file: Path) -> str:
    """Return `checkpoint.folder` of a run's configuration. No other key is read or checked.

    Args:
        file: The file of the configuration.

    Raises:
        ConfigError: The value is wrong.
    """
    for source, content in with_bases(file):
        table = content.get("checkpoint", {})
        place = table.get("folder") if isinstance(table, dict) else table
        if isinstance(place, str):
            return place
        if place is not None:
            raise ConfigError(
                f"checkpoint.folder = {place!r} (in {source}) must be a text; write the path of a folder"
            )
    return Checkpoint.folder


@contextmanager
def file_of_step(folder: Store, step: int | None, last: Path) -> Iterator[Path]:
    """Yield a file with the configuration of a saved step. It may not exist after this context.

    Args:
        folder: The checkpoints.
        step: The step; None for no step.
        last: The file to use if there is no step, or the step has no configuration.
    """
    content = None if step is None else saved_configuration(folder, step)
    if content is None:
        yield last
        return
    with tempfile.TemporaryDirectory() as made:
        file = Path(made) / RUN_FILE
        file.write_bytes(content)
        yield file


def _saved_weights(config: JobConfig) -> str:
    """Return the path of the step that `checkpoint.load_step` names; raise a ConfigError if the run has saved none.

    A run that was killed early, or had no `checkpoint.enable`, has saved no step. The weights that such a run started
    from do not stand in for its own.
    """
    step = step_to_load(config)
    if step is not None:
        return str(checkpoint_folder(config).step(step))
    start = config.checkpoint.initial_load_path
    origin = "" if start is None else f"; the weights that it started from are in {start}"
    raise ConfigError(
        f"{checkpoint_folder(config)} holds no checkpoint; train with --checkpoint.enable to save the last step{origin}"
    )


def weights_of(config: JobConfig) -> str:
    """Return the name of the weights that `RunWeights.latest` opens, for messages.

    Args:
        config: The configuration of the run.
    """
    settings = config.checkpoint
    start = settings.initial_load_path
    step = step_to_load(config) if settings.enable else None
    if step is None:
        return str(start)
    saved = str(checkpoint_folder(config).step(step))
    return f"{start} with the adapters of {saved}" if config.lora.rank else saved


def loaded_model(job: ResolvedJob, device: "torch.device") -> "tuple[nn.Module, ParallelDims]":
    """Build this rank's part of the parallelized model, and load its weights. A collective over all ranks.

    The weights come from the run's checkpoint. If `checkpoint.enable` is off, they come from
    `checkpoint.initial_load_path`. Rank 0 prints their name on stderr.

    Args:
        job: The resolved job.
        device: The device of this rank.

    Returns:
        The model, and the meshes.

    Raises:
        SharedConfigError: On every rank, if one rank cannot read the weights.
    """
    from trainer.checkpoint.weights import RunWeights, load_weights
    from trainer.models.model_parts import build_model_parts
    from trainer.models.model_spec import model_spec
    from trainer.parallel.parallel_dims import ParallelDims
    from trainer.runtime.agreement import raise_on_all_ranks, read_once

    config = job.config
    spec = model_spec(config.model.name)
    dims = ParallelDims(job.degrees, device.type)
    (model,) = build_model_parts(spec, job, dims, device)
    start = config.checkpoint.initial_load_path
    if (
        not config.checkpoint.enable
        and start is not None
        and ModelFolder(Path(start)).has_config
    ):
        model.by_length = True  # as transformers does for the same folder
    weights = RunWeights(config, job.model, read_once)
    raise_on_all_ranks(lambda: load_weights(weights.latest(), [model]))
    if dims.is_first:
        print(f"weights: {weights_of(config)}", file=sys.stderr, flush=True)
    return model, dims
