"""The model of a finished run, or of a Hugging Face folder, for commands that use its weights."""

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
# tables that whole weights need not
_RESET = ("parallelism", "validation", "activation_checkpoint", "compile")
_TEXT_COMMANDS = ("lct generate", "lct chat", "lct serve", "lct evaluate")


def model_options(parser: Parser, *, seed: str) -> None:
    """Add the options of all commands that use a language model.

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
    """Add the option of all commands that read a run.

    Args:
        parser: The parser of the command.
    """
    text = "import the packages that the run names (job.imports); their code runs"
    parser.add_argument("--allow-imports", action="store_true", help=text)


def configuration(
    folder: Path, step: int, *, command: str, task: str = "tokens", allow_imports: bool = False
) -> JobConfig:
    """Return the configuration of a run, changed for one device and whole weights.

    Args:
        folder: The folder of the run.
        step: The saved step; -1 for the latest.
        command: The command, for messages.
        task: The task for whose runs the command is.
        allow_imports: Whether to import the packages of the run.

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
    one_row = {"local_batch_size": 1, "global_batch_size": -1}
    config = replace(
        config,
        training=replace(
            config.training, **one_row, sequence_chunks=1, attention_mask="causal", **data
        ),
        **{table: getattr(JobConfig(), table) for table in _RESET},
    )
    _saved_weights(config)
    return config


def text_configuration(
    folder: Path,
    step: int,
    *,
    command: str,
    tokenizer: str | None,
    settings: Sequence[str],
) -> tuple[JobConfig, tuple[str, str | None]]:
    """Return a configuration with the language model of a run, or of a Hugging Face folder, and its weights.

    A run keeps its model, precision and parallelism, and its data need not exist: kind and path of the validation data,
    or of the training data without them, are returned too. Weights of a Hugging Face folder keep their data type.
    `step` -1 is the latest; `tokenizer` replaces the folder's; `settings` of the command line replace the folder's.

    Raises:
        ConfigError: The folder is neither, lacks weights or a tokenizer, or has no such step.
    """
    named = [] if tokenizer is None else ["--model.tokenizer_path", tokenizer]
    there = ModelFolder(folder)
    if there.has_config and not (folder / RUN_FILE).is_file():
        given = _of_hugging_face(there, step, [*named, *settings])
        weights = str(folder.absolute())
    else:
        given = _saved(
            folder, step, command=command, task="tokens", settings=[*named, *settings]
        )
        weights = _saved_weights(given)
    loads: dict[str, Any] = {"checkpoint": Checkpoint(initial_load_path=weights)}
    if given.lora.rank:
        saved = str(checkpoint_folder(given).path.absolute())  # wherever a command writes
        loads = {"checkpoint": replace(given.checkpoint, folder=saved), "lora": given.lora}
    training = given.training
    data = training.dataset, training.dataset_path
    if given.validation.enable:
        data = given.validation.source(training)
    return JobConfig(
        # not beside the weights
        job=Job(dump_folder=tempfile.gettempdir(), device=given.job.device),
        model=given.model,
        chat=given.chat,
        training=Training(
            local_batch_size=1, **{name: getattr(training, name) for name in _KEPT}
        ),
        parallelism=given.parallelism,
        float8=given.float8,
        comm=given.comm,
        **loads,
    ), data


def _of_hugging_face(there: ModelFolder, step: int, settings: Sequence[str]) -> JobConfig:
    """Return the configuration of a Hugging Face folder; raise a ConfigError if there is no tokenizer."""
    given = parse_command_line([*_hf_settings(there, step), *settings]).config
    if given.model.tokenizer_path is None and not there.has_tokenizer:
        files = ", ".join(TOKENIZER_FILES)
        raise ConfigError(
            f"{there.path} holds no tokenizer ({files}); name the model's own with --tokenizer"
        )
    return given


def _saved(
    folder: Path, step: int, *, command: str, task: str, settings: Sequence[str]
) -> JobConfig:
    """Return the saved configuration of a run, with settings of the command line over it, to load a step."""
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
        found = TASKS[config.task]
        other = TASKS[config.task].command.format(folder)
        raise ConfigError(
            f"the run in {folder} learned from {found.data}, and `{command}` is not for {found.data}; use `{other}`"
        )
    return config


def step_configuration(file: Path, step: int, settings: Sequence[str] = ()) -> JobConfig:
    """Return the configuration with which a step was saved, to load this step from its present folder.

    Args:
        file: The configuration of the folder's last run, which says where checkpoints are. It replaces the missing
            configuration of a step.
        step: The saved step; -1 for the latest.
        settings: Settings of the command line, over the settings of the step.

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
        found = parse_command_line(["--job.config_file", str(own), *settings], reading=True)
    return to_load(found.config, place)


def folder_of_checkpoints(file: Path) -> str:
    """Return `checkpoint.folder` of a run's configuration, without using anything else of it.

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
    return Checkpoint().folder


@contextmanager
def file_of_step(folder: Store, step: int | None, last: Path) -> Iterator[Path]:
    """Yield a file with the configuration of a saved step.

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
    """Return the saved step of a run; raise a ConfigError if it has saved none.

    A run that was killed early, or had no `checkpoint.enable`, has saved none. The weights that it started from are not
    its own.
    """
    step = step_to_load(config)
    if step is not None:
        return str(checkpoint_folder(config).step(step))
    start = config.checkpoint.initial_load_path
    there = "" if start is None else f"; the weights that it started from are in {start}"
    raise ConfigError(
        f"{checkpoint_folder(config)} holds no checkpoint; train with --checkpoint.enable to save the last step{there}"
    )


def weights_of(config: JobConfig) -> str:
    """Return in words which weights `open_weights` reads.

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


def _hf_settings(folder: ModelFolder, step: int) -> list[str]:
    """Return the settings of a Hugging Face folder's model, for its longest sequences."""
    if step != -1:
        raise ConfigError(
            f"--step {step}: {folder.path} is a Hugging Face folder, which has no steps; leave "
            "--step out"
        )
    return [
        f"--model.name={folder.family}",
        f"--model.flavor={folder.path.absolute()}",
        f"--training.seq_len={folder.args.max_seq_len}",
        f"--training.dtype={folder.dtype if folder.dtype in ('float64', 'bfloat16') else 'float32'}",
    ]


def loaded_model(job: ResolvedJob, device: "torch.device") -> "tuple[nn.Module, ParallelDims]":
    """Return this rank's part of the model, parallelised, with its weights. A collective over all ranks.

    The weights are from the run's checkpoint, or with `checkpoint.enable` off from `checkpoint.initial_load_path`.
    Rank 0 reports on stderr which they are.

    Args:
        job: The resolved job.
        device: The device of this rank.

    Returns:
        The model, and the meshes.

    Raises:
        SharedConfigError: On every rank, if one rank cannot read the weights.
    """
    import torch

    from trainer.checkpoint.weights import load_weights, open_weights
    from trainer.models.initialization import initialize, stored_as
    from trainer.models.model_spec import model_spec
    from trainer.parallel.parallel_dims import ParallelDims
    from trainer.runtime.agreement import raise_on_all_ranks, read_once

    spec = model_spec(job.config.model.name)
    dims = ParallelDims(job.degrees, device.type)
    with torch.device("meta"):
        model = stored_as(spec.build(job.model), getattr(torch, job.config.training.dtype))
    start = job.config.checkpoint.initial_load_path
    if (
        not job.config.checkpoint.enable
        and start is not None
        and ModelFolder(Path(start)).has_config
    ):
        model.by_length = True  # as transformers does it with the same folder
    spec.parallelize(model, dims, job)
    initialize(model, seed=0, device=device, offload=job.config.training.enable_cpu_offload)
    once = partial(read_once, over=dims["world"])
    raise_on_all_ranks(
        lambda: load_weights(open_weights(job.config, job.model, once), [model]), dims["world"]
    )
    if dims.is_first:
        print(f"weights: {weights_of(job.config)}", file=sys.stderr, flush=True)
    return model, dims
