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
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from trainer.commands.finished_run import loaded_model, model_options, text_configuration
from trainer.commands.options import Parser, given_as, number
from trainer.commands.ranks import all_ranks, run
from trainer.commands.start import CPU_RANKS
from trainer.config.errors import ConfigError
from trainer.config.schema import Job
from trainer.data.evaluation import long_documents, needle_prompts
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

    from trainer.tasks.evaluation import Evaluation

Row = dict[str, Any]
TASKS = ("positions", "needle")
_TABLES = ("model", "parallelism", "comm")
_KEYS = (
    "job.device",
    "training.dtype",
    "training.mixed_precision_param",
    "training.loss_chunk_tokens",
)
_LONGEST, _SHORTEST_NEEDLE, _FIRST_BUCKET = 8192, 256, 1024
_DEPTHS = (0.0, 25.0, 50.0, 75.0, 100.0)


def parser() -> Parser:
    """Return the parser of the options."""
    described = Parser(
        "evaluate",
        __doc__.splitlines()[0],
        usage="lct evaluate FOLDER [options] [--table.key value ...]",
    )
    add = described.add_argument
    some = number(int, 1)
    add("folder", type=Path, help="job.dump_folder of the run, or a Hugging Face folder")
    add(
        "--tasks",
        nargs="+",
        choices=TASKS,
        default=TASKS,
        help="what to measure (default: both)",
    )
    _document_options(add)
    add(
        "--buckets",
        nargs="+",
        type=int,
        metavar="N",
        help="where a bucket of positions ends (default: they double)",
    )
    _needle_options(add)
    add(
        "--batch-size",
        type=some,
        default=1,
        metavar="N",
        help="sequences of a forward on each rank (default: 1)",
    )
    add(
        "--output",
        type=Path,
        metavar="FOLDER",
        help="for evaluation.json (default: outputs/evaluation/NAME)",
    )
    model_options(described, seed="of the needle prompts")
    add(
        "--ngpu",
        type=some,
        metavar="N",
        help=f"ranks (default: one a GPU, or {CPU_RANKS} on CPUs)",
    )
    return described


def _document_options(add: Callable[..., object]) -> None:
    add(
        "--seq-len",
        type=number(int, 1),
        metavar="N",
        help="tokens of a sequence (default: as in training, at most 8,192)",
    )
    add(
        "--sequences",
        type=number(int, 1),
        default=16,
        metavar="N",
        help="documents whose first tokens are used (default: 16)",
    )
    add(
        "--dataset",
        choices=[*DATASETS],
        help="kind of the documents (default: the run's validation data, or its own)",
    )
    add("--dataset-path", metavar="PATH", help="file, folder or glob of the documents")


def _needle_options(add: Callable[..., object]) -> None:
    add(
        "--lengths",
        nargs="+",
        type=number(int, 1),
        metavar="N",
        help="of needle prompts (default: --seq-len, its half, quarter)",
    )
    text = "of needles in percent (default: 0 25 50 75 100)"
    add(
        "--depths",
        nargs="+",
        type=number(float, 0, 100),
        default=_DEPTHS,
        metavar="D",
        help=text,
    )
    add(
        "--samples",
        type=number(int, 1),
        default=4,
        metavar="N",
        help="needle prompts of each length and depth (default: 4)",
    )


def checked(argv: list[str]) -> tuple[argparse.Namespace, ResolvedJob]:
    """Return the options with all defaults, and the job of all ranks, which is for the longest sequences.

    Beside the options of the command line: edges, of the buckets of positions, from 0 to `seq_len`; trained_for, tokens
    of the sequences that the model was trained with, or is made for.
    """
    wanted, settings = parser().parse_known_args(argv)
    _check_settings(settings)
    settings += ["--allow-imports"] * wanted.allow_imports
    config, data = text_configuration(
        wanted.folder,
        wanted.step,
        command="lct evaluate",
        tokenizer=wanted.tokenizer,
        settings=settings,
    )
    _check_no_pipeline(config.parallelism.pipeline_parallel_degree)
    _set_defaults(wanted, config.training.seq_len, data)
    check_creatable(wanted.output, "--output")
    machine = this_machine()
    lengths = lengths_of(wanted)
    here = wanted.ngpu or (machine.gpus if config.job.device != "cpu" else 0) or CPU_RANKS
    shape = {
        "seq_len": max(lengths),
        "local_batch_size": wanted.batch_size,
        "data_streams": None,
    }
    own = replace(config.job, dump_folder=str(wanted.output))
    config = replace(config, job=own, training=replace(config.training, **shape))
    with given_as(seq_len="--seq-len or --lengths"):
        job = resolve(
            config, all_ranks(here), machine.device_type(config.job.device), node=here
        )
        # by which LongRoPE chooses its factors
        made_for = max(job.model.max_seq_len, wanted.trained_for)
        job = replace(job, model=replace(job.model, max_seq_len=made_for))
        for length in lengths:
            check_batch(
                replace(config, training=replace(config.training, seq_len=length)), job.degrees
            )
    if "positions" in wanted.tasks:
        with given_as(dataset="--dataset", dataset_path="--dataset-path"):
            check_data(
                DataSettings.of(
                    wanted.dataset, wanted.dataset_path, config.model, config.training
                )
            )
    return wanted, job


def _check_no_pipeline(degree: int) -> None:
    if degree > 1:
        raise ConfigError(
            f"parallelism.pipeline_parallel_degree = {degree}: lct evaluate runs no pipeline; add "
            "--parallelism.pipeline_parallel_degree 1, which leaves more ranks for the other degrees"
        )


def _check_settings(settings: list[str]) -> None:
    """Raise a ConfigError for a setting that this command does not take."""
    for token in settings:
        name = token.partition("=")[0].removeprefix("--").removeprefix("no-")
        if token.startswith("--") and not (
            name.partition(".")[0] in _TABLES or name.replace("-", "_") in _KEYS
        ):
            raise ConfigError(
                f"{token} is no setting of lct evaluate; it takes those of [{'], ['.join(_TABLES)}], and "
                f"{', '.join(_KEYS)}"
            )


def _set_defaults(
    wanted: argparse.Namespace, trained_for: int, data: tuple[str, str | None]
) -> None:
    """Set the options that were not given, by those that were. data: kind and path of the run's own."""
    wanted.trained_for = trained_for
    wanted.seq_len = wanted.seq_len or min(trained_for, _LONGEST)
    wanted.edges = edges_of(wanted.seq_len, wanted.buckets)
    if wanted.dataset is None and wanted.dataset_path is None:
        wanted.dataset_path = data[1]
    wanted.dataset = wanted.dataset or data[0]
    by_default = [
        n
        for n in (wanted.seq_len // 4, wanted.seq_len // 2, wanted.seq_len)
        if n >= _SHORTEST_NEEDLE
    ]
    wanted.lengths = sorted(set(wanted.lengths or by_default or [wanted.seq_len]))
    wanted.depths = sorted(set(wanted.depths))
    # Not in the folder that is measured, which may be somebody else's.
    wanted.output = wanted.output or Path(
        Job().dump_folder, "evaluation", wanted.folder.resolve().name
    )


def lengths_of(wanted: argparse.Namespace) -> list[int]:
    """Return every length of a sequence."""
    lengths = {"positions": [wanted.seq_len], "needle": wanted.lengths}
    return [length for task in wanted.tasks for length in lengths[task]]


def edges_of(seq_len: int, given: list[int] | None) -> tuple[int, ...]:
    """Return the edges of the buckets of positions, from 0 to `seq_len`: given ones, or 0, n, 2n, 4n ..."""
    if given is not None:
        edges = [0, *given, *([seq_len] if given[-1] != seq_len else [])]
        if any(a >= b for a, b in pairwise(edges)):
            raise ConfigError(
                f"--buckets {' '.join(map(str, given))} must rise from 1 or more to {seq_len} or less"
            )
        return tuple(edges)
    edge = _FIRST_BUCKET if seq_len >= 8 * _FIRST_BUCKET else max(seq_len // 8, 1)
    edges = [0]
    while edge < seq_len:
        edges.append(edge)
        edge *= 2
    return *edges, seq_len


def positions(
    wanted: argparse.Namespace, evaluation: "Evaluation", job: ResolvedJob
) -> list[Row]:
    """Return the loss by position. A collective over all ranks."""
    from trainer.runtime.agreement import raise_on_all_ranks

    settings = DataSettings.of(
        wanted.dataset, wanted.dataset_path, job.config.model, job.config.training
    )
    found = long_documents(documents_in_order(settings), wanted.seq_len, wanted.sequences)
    return evaluation.by_position(
        raise_on_all_ranks(lambda: list(found), evaluation.dims["world"]), wanted.edges
    )


def needle(wanted: argparse.Namespace, evaluation: "Evaluation", job: ResolvedJob) -> list[Row]:
    """Return the answers by length and depth; log_probability: mean of a token of them. A collective over all ranks."""
    from trainer.runtime.agreement import raise_on_all_ranks

    tokenizer = open_tokenizer(job.config.model.tokenizer_file)
    cells = []
    for length in wanted.lengths:
        make = partial(
            needle_prompts, tokenizer, length, wanted.depths, wanted.samples, wanted.seed
        )
        prompts = raise_on_all_ranks(make, evaluation.dims["world"])
        found = evaluation.needles(prompts)
        for depth in wanted.depths:
            of = [
                answer
                for prompt, answer in zip(prompts, found, strict=True)
                if prompt.depth == depth
            ]
            shares = {
                "accuracy": fmean(x.correct for x in of),
                "log_probability": fmean(x.log_probability for x in of),
            }
            cells.append({"length": length, "depth": depth, "prompts": len(of), **shares})
    return cells


def evaluate(
    wanted: argparse.Namespace, job: ResolvedJob, device: "torch.device"
) -> dict[str, Any]:
    """Return the settings, and the rows of what was asked for. A collective over all ranks; see `loaded_model`."""
    from trainer.tasks.evaluation import Evaluation
    from trainer.tasks.language import LanguageTask

    model, dims = loaded_model(job, device)
    evaluation = Evaluation(LanguageTask(job, dims), dims, model, rows=wanted.batch_size)
    settings = {
        name: getattr(wanted, name)
        for name in ("seq_len", "dataset", "dataset_path", "sequences", "seed")
    }
    settings |= {
        "weights": job.config.checkpoint.initial_load_path,
        "compute_dtype": job.compute_dtype,
        "ranks": job.degrees.world_size,
    }
    if job.config.lora.rank:
        settings["adapters"] = str(checkpoint_folder(job.config).step(step_to_load(job.config)))
    found = {"settings": settings}
    for name, measure in (("positions", positions), ("needle", needle)):
        if name in wanted.tasks:
            found[name] = measure(wanted, evaluation, job)
    return found


def tables(found: Mapping[str, Any]) -> str:
    """Return the tables that are printed."""
    lines = []
    if "positions" in found:
        lines += ["positions                  tokens       loss  perplexity"]
    for row in found.get("positions", ()):
        place = f"{row['first']:,} to {row['last'] - 1:,}"
        perplexity = math.inf if row["perplexity"] is None else row["perplexity"]
        lines.append(f"{place:22}{row['tokens']:11,}{row['loss']:11.4f}{perplexity:12.2f}")
    if "needle" in found:
        lines += [""] * bool(lines) + [
            "needle: share of right answers, and log-probability of a token, by depth"
        ]
        depths = dict.fromkeys(cell["depth"] for cell in found["needle"])
        lines.append("length    " + "".join(f"{f'{depth:g} %':>16}" for depth in depths))
    for length, row in groupby(found.get("needle", ()), itemgetter("length")):
        shown = (f"{cell['accuracy']:.0%}  {cell['log_probability']:7.2f}" for cell in row)
        lines.append(f"{length:<10,}" + "".join(f"{text:>16}" for text in shown))
    return "\n".join(lines)


def write(found: Mapping[str, Any], folder: Path) -> str:
    """Write evaluation.json, and return its path."""
    file = folder / "evaluation.json"
    with writing_to(folder, "--output"):
        file.write_text(json.dumps(found, indent=2) + "\n", "utf-8")
    return str(file)


def work(wanted: argparse.Namespace, job: ResolvedJob, device: "torch.device") -> str:
    """Return the tables, and write the file on rank 0. A collective over all ranks."""
    from torch.distributed import get_rank

    found = evaluate(wanted, job, device)
    if get_rank():
        return ""
    if (longest := max(lengths_of(wanted))) > wanted.trained_for:
        made = f"{wanted.trained_for:,} tokens"
        print(
            f"note: the model was made for {made}, and {longest:,} are asked for",
            file=sys.stderr,
        )
    return f"{tables(found)}\n{write(found, wanted.output)}"


main = partial(run, __name__)
