"""Measure a run, or a Hugging Face folder, on long sequences: loss by position, needles in a haystack.

Settings of the tables [parallelism], [model] and [comm], and a few others, may follow the options (docs/evaluation.md).
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from lct_inference.evaluation_defaults import lengths_of, set_defaults
from lct_inference.long_prompts import long_documents, needle_prompts
from trainer.commands.finished_run import loaded_model, model_options, text_configuration
from trainer.commands.options import COUNT, Parser, given_as, number
from trainer.commands.ranks import all_ranks, run
from trainer.commands.start import CPU_RANKS
from trainer.config.errors import ConfigError
from trainer.config.schema import JobConfig
from trainer.data.sources.registry import DATASETS, DataSettings
from trainer.data.token_files.catalog import check_data, documents_in_order
from trainer.data.tokenizers.tokenizer import open_tokenizer
from trainer.job import ResolvedJob, resolve
from trainer.job.training import check_batch
from trainer.runtime.devices import this_machine
from trainer.runtime.dump_folder import check_creatable, writing_to
from trainer.stores.folder import checkpoint_folder, step_to_load

if TYPE_CHECKING:
    import torch

    from lct_inference.evaluation import Evaluation

Row = dict[str, Any]
TASKS = ("positions", "needle")
_TABLES = ("model", "parallelism", "comm")
_KEYS = (
    "job.device",
    "training.dtype",
    "training.mixed_precision_param",
    "training.loss_chunk_tokens",
)
_DEPTHS = (0.0, 25.0, 50.0, 75.0, 100.0)


def parser() -> Parser:
    """Return the parser of the options."""
    described = Parser(
        "evaluate",
        __doc__.splitlines()[0],
        usage="lct evaluate FOLDER [options] [--table.key value ...]",
    )
    add = described.add_argument
    add("folder", type=Path, help="job.dump_folder of the run, or a Hugging Face folder")
    add(
        "--tasks",
        nargs="+",
        choices=TASKS,
        default=TASKS,
        help="what to measure (default: both)",
    )
    _data_options(add)
    add(
        "--batch-size",
        type=COUNT,
        default=1,
        metavar="N",
        help="sequences per forward and rank (default: 1)",
    )
    add(
        "--output",
        type=Path,
        metavar="FOLDER",
        help="folder of evaluation.json (default: outputs/evaluation/NAME)",
    )
    model_options(described, seed="seed of the needle prompts")
    add(
        "--ngpu",
        type=COUNT,
        metavar="N",
        help=f"number of ranks (default: one per GPU, or {CPU_RANKS} on CPUs)",
    )
    return described


def _data_options(add: Callable[..., object]) -> None:
    add_count = partial(add, type=COUNT, metavar="N")
    add_count("--seq-len", help="tokens of a sequence (default: as in training, at most 8,192)")
    add_count(
        "--sequences",
        default=16,
        help="number of documents; each gives its first tokens (default: 16)",
    )
    add(
        "--dataset",
        choices=[*DATASETS],
        help="kind of the documents (default: the run's validation data, or its own)",
    )
    add("--dataset-path", metavar="PATH", help="file, folder or glob of the documents")
    add(
        "--buckets",
        nargs="+",
        type=int,
        metavar="N",
        help="positions at which buckets end (default: each doubles the end before)",
    )
    add_count(
        "--lengths",
        nargs="+",
        help="lengths of needle prompts (default: --seq-len, its half, its quarter)",
    )
    add(
        "--depths",
        nargs="+",
        type=number(float, 0, 100),
        default=_DEPTHS,
        metavar="D",
        help="depths of needles in percent (default: 0 25 50 75 100)",
    )
    add_count(
        "--samples",
        default=4,
        help="needle prompts of each length and depth (default: 4)",
    )


def checked(argv: list[str]) -> tuple[argparse.Namespace, ResolvedJob]:
    """Check the command line, and return the options with all defaults and the job of all ranks.

    The job has the longest sequence length that the options name.

    Args:
        argv: The words of the command line, without the command.

    Returns:
        The options and the job. The options have two further entries: `edges`, the edges of the buckets of positions,
        from 0 to `seq_len`; and `trained_for`, the sequence length of the training or of the model's configuration.

    Raises:
        ConfigError: An option or a setting is wrong.
    """
    args, settings = parser().parse_known_args(argv)
    _check_settings(settings)
    config, data = text_configuration(args, settings, command="lct evaluate")
    if (degree := config.parallelism.pipeline_parallel_degree) > 1:
        raise ConfigError(
            f"parallelism.pipeline_parallel_degree = {degree}: lct evaluate runs no pipeline; add "
            "--parallelism.pipeline_parallel_degree 1, which leaves more ranks for the other degrees"
        )
    set_defaults(args, config.training.seq_len, data)
    check_creatable(args.output, "--output")
    machine = this_machine()
    lengths = lengths_of(args)
    here = args.ngpu or (machine.gpus if config.job.device != "cpu" else 0) or CPU_RANKS
    shape = {"seq_len": max(lengths), "local_batch_size": args.batch_size, "data_streams": None}
    own = replace(config.job, dump_folder=str(args.output))
    config = replace(config, job=own, training=replace(config.training, **shape))
    with given_as(seq_len="--seq-len or --lengths"):
        job = resolve(
            config, all_ranks(here), machine.device_type(config.job.device), node=here
        )
        # LongRoPE chooses its factors by this length.
        made_for = max(job.model.max_seq_len, args.trained_for)
        job = replace(job, model=replace(job.model, max_seq_len=made_for))
        for length in lengths:
            check_batch(
                replace(config, training=replace(config.training, seq_len=length)), job.degrees
            )
    if "positions" in args.tasks:
        with given_as(dataset="--dataset", dataset_path="--dataset-path"):
            check_data(_documents(args, config))
    return args, job


def _documents(args: argparse.Namespace, config: JobConfig) -> DataSettings:
    return DataSettings.of(args.dataset, args.dataset_path, config.model, config.training)


def _check_settings(settings: list[str]) -> None:
    """Raise a ConfigError for a setting that this command does not take."""
    for token in settings:
        name = token.partition("=")[0].removeprefix("--").removeprefix("no-")
        if token.startswith("--") and not (
            name.partition(".")[0] in _TABLES or name.replace("-", "_") in _KEYS
        ):
            raise ConfigError(
                f"{token} is no setting of lct evaluate; it takes the settings of [{'], ['.join(_TABLES)}], and "
                f"{', '.join(_KEYS)}"
            )


def positions(
    args: argparse.Namespace, evaluation: "Evaluation", job: ResolvedJob
) -> list[Row]:
    """Measure the loss by position. A collective over all ranks.

    Args:
        args: The options of the command line, with defaults.
        evaluation: Runs the model.
        job: The resolved job.

    Returns:
        A row for each bucket of positions, see `Evaluation.by_position`.

    Raises:
        SharedConfigError: On every rank, if the documents of one rank cannot be read.
    """
    from trainer.runtime.agreement import raise_on_all_ranks

    texts = long_documents(
        documents_in_order(_documents(args, job.config)), args.seq_len, args.sequences
    )
    return evaluation.by_position(raise_on_all_ranks(lambda: list(texts)), args.edges)


def needle(args: argparse.Namespace, evaluation: "Evaluation", job: ResolvedJob) -> list[Row]:
    """Measure answers to needle prompts. A collective over all ranks.

    Args:
        args: The options of the command line, with defaults.
        evaluation: Runs the model.
        job: The resolved job.

    Returns:
        A row for each length and depth. `accuracy` is the share of right answers; `log_probability` is the mean
        log-probability of an answer's token.

    Raises:
        SharedConfigError: On every rank, if the prompts of one rank cannot be made.
    """
    from trainer.runtime.agreement import raise_on_all_ranks

    tokenizer = open_tokenizer(job.config.model.tokenizer_file)
    cells = []
    for length in args.lengths:
        make = partial(needle_prompts, tokenizer, length, args.depths, args.samples, args.seed)
        prompts = raise_on_all_ranks(make)
        answers = evaluation.needles(prompts)
        for depth in args.depths:
            cell_answers = [
                answer
                for prompt, answer in zip(prompts, answers, strict=True)
                if prompt.depth == depth
            ]
            shares = {
                "accuracy": fmean(x.correct for x in cell_answers),
                "log_probability": fmean(x.log_probability for x in cell_answers),
            }
            cells.append(
                {"length": length, "depth": depth, "prompts": len(cell_answers), **shares}
            )
    return cells


def evaluate(
    args: argparse.Namespace, job: ResolvedJob, device: "torch.device"
) -> dict[str, Any]:
    """Load the model and run the tasks. A collective over all ranks; see `loaded_model`.

    Args:
        args: The options of the command line, with defaults.
        job: The resolved job.
        device: The device of this rank.

    Returns:
        The settings, under "settings", and the rows of each task, under the name of the task.
    """
    from lct_inference.evaluation import Evaluation
    from trainer.tasks.language import LanguageTask

    model, dims = loaded_model(job, device)
    evaluation = Evaluation(LanguageTask(job, dims), dims, model, rows=args.batch_size)
    settings = {
        name: getattr(args, name)
        for name in ("seq_len", "dataset", "dataset_path", "sequences", "seed")
    }
    settings |= {
        "weights": job.config.checkpoint.initial_load_path,
        "compute_dtype": job.compute_dtype,
        "ranks": job.degrees.world_size,
    }
    if job.config.lora.rank:
        settings["adapters"] = str(checkpoint_folder(job.config).step(step_to_load(job.config)))
    results = {"settings": settings}
    for name, measure in (("positions", positions), ("needle", needle)):
        if name in args.tasks:
            results[name] = measure(args, evaluation, job)
    return results


def tables(results: Mapping[str, Any]) -> str:
    """Return the results as tables for a terminal.

    Args:
        results: The results of `evaluate`.
    """
    lines = []
    if "positions" in results:
        lines += ["positions                  tokens       loss  perplexity"]
    for row in results.get("positions", ()):
        place = f"{row['first']:,} to {row['last'] - 1:,}"
        perplexity = math.inf if row["perplexity"] is None else row["perplexity"]
        lines.append(f"{place:22}{row['tokens']:11,}{row['loss']:11.4f}{perplexity:12.2f}")
    if "needle" in results:
        lines += [""] * bool(lines) + [
            "needle: share of right answers, and log-probability of a token, by depth"
        ]
        depths = dict.fromkeys(cell["depth"] for cell in results["needle"])
        lines.append("length    " + "".join(f"{f'{depth:g} %':>16}" for depth in depths))
    for length, row in groupby(results.get("needle", ()), itemgetter("length")):
        shown = (f"{cell['accuracy']:.0%}  {cell['log_probability']:7.2f}" for cell in row)
        lines.append(f"{length:<10,}" + "".join(f"{text:>16}" for text in shown))
    return "\n".join(lines)


def write(results: Mapping[str, Any], folder: Path) -> str:
    """Write the results to evaluation.json.

    Args:
        results: The results of `evaluate`.
        folder: The folder of the file.

    Returns:
        The path of the file.

    Raises:
        ConfigError: The file cannot be written.
    """
    file = folder / "evaluation.json"
    with writing_to(folder, "--output"):
        file.write_text(json.dumps(results, indent=2) + "\n", "utf-8")
    return str(file)


def work(args: argparse.Namespace, job: ResolvedJob, device: "torch.device") -> str:
    """Evaluate the model, and write evaluation.json on rank 0. A collective over all ranks.

    Args:
        args: The options of the command line, with defaults.
        job: The resolved job.
        device: The device of this rank.

    Returns:
        The tables and the path of the file on rank 0; an empty text on other ranks.
    """
    from torch.distributed import get_rank

    results = evaluate(args, job, device)
    if get_rank():
        return ""
    if (longest := max(lengths_of(args))) > args.trained_for:
        made = f"{args.trained_for:,} tokens"
        print(
            f"note: the model was made for {made}, and {longest:,} are asked for",
            file=sys.stderr,
        )
    return f"{tables(results)}\n{write(results, args.output)}"


main = partial(run, __name__)
