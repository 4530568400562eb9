"""Measure a run, or a Hugging Face folder, on long sequences: loss by position, needles in a haystack.

evaluate outputs/debug_model --seq-len 2048 --ngpu 2 --parallelism.context_parallel_degree 2

A run is evaluated with the parallelism that it was trained with. Settings of the tables [parallelism], [model] and
[comm], and a few others, may follow the options (docs/evaluation.md).
"""

import argparse
import sys
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.commands.evaluate_report import Cell, Findings, check_output, tables, write
from trainer.commands.finished_run import loaded_model, model_options, text_configuration
from trainer.commands.options import Parser, given_as, number
from trainer.commands.ranks import all_ranks, run, work_on_rank
from trainer.commands.start import CPU_RANKS
from trainer.config.errors import ConfigError
from trainer.config.schema import JobConfig
from trainer.data.sources.registry import DATASETS, DataSettings
from trainer.data.token_files.catalog import check_data
from trainer.job import ResolvedJob, resolve
from trainer.job.training import check_batch
from trainer.runtime.devices import this_machine
from trainer.stores.folder import checkpoint_folder, step_to_load

if TYPE_CHECKING:
    import torch

    from trainer.data.evaluation.needle import NeedlePrompt
    from trainer.data.packing.sequence import PackedSequence
    from trainer.tasks.evaluation import Bucket, Evaluation

TASKS = ("positions", "needle")
_TABLES = ("model", "parallelism", "comm")
_KEYS = ("job.device", *(f"training.{key}" for key in ("dtype", "mixed_precision_param", "loss_chunk_tokens")))
_LONGEST, _SHORTEST_NEEDLE, _FIRST_BUCKET = 8192, 256, 1024
_DEPTHS = (0.0, 25.0, 50.0, 75.0, 100.0)


@dataclass(frozen=True)
class Wanted:
    """What an evaluation measures, with all defaults.

    seq_len, lengths: tokens of the sequences whose loss is measured by position, and of the needle prompts; edges: of
    the buckets of positions, from 0 to `seq_len`; rows: sequences of a forward on each data-parallel rank; trained_for:
    tokens of the sequences that the model was trained with, or is made for.
    """

    tasks: tuple[str, ...]
    seq_len: int
    edges: tuple[int, ...]
    dataset: str
    dataset_path: str | None
    sequences: int
    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    samples: int
    seed: int
    rows: int
    output: Path
    trained_for: int

    @property
    def all_lengths(self) -> list[int]:
        """Every length of a sequence."""
        lengths = {"positions": [self.seq_len], "needle": self.lengths}
        return [length for task in self.tasks for length in lengths[task]]


def parser() -> Parser:
    """Return the parser of the options."""
    described = Parser(
        "evaluate", __doc__.splitlines()[0], usage="lct evaluate FOLDER [options] [--table.key value ...]"
    )
    add, some = described.add_argument, number(int, 1)
    add("folder", type=Path, help="job.dump_folder of the run, or a Hugging Face folder")
    add("--tasks", nargs="+", choices=TASKS, default=TASKS, help="what to measure (default: both)")
    add("--seq-len", type=some, metavar="N", help="tokens of a sequence (default: as in training, at most 8,192)")
    add("--sequences", type=some, default=16, metavar="N", help="documents whose first tokens are used (default: 16)")
    add("--dataset", choices=[*DATASETS], help="kind of the documents (default: the run's validation data, or its own)")
    add("--dataset-path", metavar="PATH", help="file, folder or glob of the documents")
    add("--buckets", nargs="+", type=int, metavar="N", help="where a bucket of positions ends (default: they double)")
    add(
        "--lengths", nargs="+", type=some, metavar="N", help="of needle prompts (default: --seq-len, its half, quarter)"
    )
    text = "of needles in percent (default: 0 25 50 75 100)"
    add("--depths", nargs="+", type=number(float, 0, 100), default=_DEPTHS, metavar="D", help=text)
    add("--samples", type=some, default=4, metavar="N", help="needle prompts of each length and depth (default: 4)")
    add("--batch-size", type=some, default=1, metavar="N", help="sequences of a forward on each rank (default: 1)")
    add("--output", type=Path, metavar="FOLDER", help="for evaluation.json (default: evaluation in FOLDER)")
    model_options(described, seed="of the needle prompts")
    add("--ngpu", type=some, metavar="N", help=f"ranks (default: one a GPU, or {CPU_RANKS} on CPUs)")
    return described


def checked(argv: list[str]) -> tuple[Wanted, ResolvedJob]:
    """Return what is wanted, and the job of all ranks.

    Raises:
        ConfigError: a wrong option or setting, or a folder without a model that this command can use.
    """
    args, settings = parser().parse_known_args(argv)
    for token in settings:
        name = token.partition("=")[0].removeprefix("--").removeprefix("no-")
        if token.startswith("--") and not (name.partition(".")[0] in _TABLES or name.replace("-", "_") in _KEYS):
            raise ConfigError(
                f"{token} is no setting of lct evaluate; it takes those of [{'], ['.join(_TABLES)}], and "
                f"{', '.join(_KEYS)}"
            )
    config, data = text_configuration(
        args.folder, args.step, command="lct evaluate", tokenizer=args.tokenizer, settings=settings
    )
    if (degree := config.parallelism.pipeline_parallel_degree) > 1:
        raise ConfigError(
            f"parallelism.pipeline_parallel_degree = {degree}: lct evaluate runs no pipeline; add "
            "--parallelism.pipeline_parallel_degree 1, which leaves more ranks for the other degrees"
        )
    wanted = _wanted(args, config, data)
    check_output(wanted.output)
    return wanted, _resolved(wanted, args.ngpu, config)


def _wanted(args: argparse.Namespace, config: JobConfig, data: tuple[str, str | None]) -> Wanted:
    """Return the options with their defaults. data: kind and path of the run's own."""
    trained_for = config.training.seq_len
    seq_len = args.seq_len or min(trained_for, _LONGEST)
    by_default = [n for n in (seq_len // 4, seq_len // 2, seq_len) if n >= _SHORTEST_NEEDLE]
    own_data = args.dataset is None and args.dataset_path is None
    return Wanted(
        tasks=tuple(args.tasks),
        seq_len=seq_len,
        edges=edges_of(seq_len, args.buckets),
        dataset=args.dataset or data[0],
        dataset_path=data[1] if own_data else args.dataset_path,
        sequences=args.sequences,
        lengths=tuple(sorted(set(args.lengths or by_default or [seq_len]))),
        depths=tuple(sorted(set(args.depths))),
        samples=args.samples,
        seed=args.seed,
        rows=args.batch_size,
        output=args.output or args.folder / "evaluation",
        trained_for=trained_for,
    )


def _resolved(wanted: Wanted, ngpu: int | None, config: JobConfig) -> ResolvedJob:
    """Return the job for the longest sequences; check the other lengths, and the data.

    Raises:
        ConfigError: as `resolve`.
    """
    machine = this_machine()
    here = ngpu or (machine.gpus if config.job.device != "cpu" else 0) or CPU_RANKS
    shape = {"seq_len": max(wanted.all_lengths), "local_batch_size": wanted.rows, "data_streams": None}
    own = replace(config.job, dump_folder=str(wanted.output))
    config = replace(config, job=own, training=replace(config.training, **shape))
    with given_as(seq_len="--seq-len or --lengths"):
        job = resolve(config, all_ranks(here), machine.device_type(config.job.device))
        for length in wanted.all_lengths:
            check_batch(replace(config, training=replace(config.training, seq_len=length)), job.degrees)
    if "positions" in wanted.tasks:
        with given_as(dataset="--dataset", dataset_path="--dataset-path"):
            check_data(DataSettings.of(wanted.dataset, wanted.dataset_path, config.model, config.training))
    return job


def edges_of(seq_len: int, given: list[int] | None) -> tuple[int, ...]:
    """Return the edges of the buckets of positions, from 0 to `seq_len`: given ones, or 0, n, 2n, 4n ...

    Raises:
        ConfigError: given ones do not rise, or lie outside the sequence.
    """
    if given is not None:
        edges = [0, *given, *([seq_len] if given[-1] != seq_len else [])]
        if any(a >= b for a, b in pairwise(edges)):
            raise ConfigError(f"--buckets {' '.join(map(str, given))} must rise from 1 or more to {seq_len} or less")
        return tuple(edges)
    edge = _FIRST_BUCKET if seq_len >= 8 * _FIRST_BUCKET else max(seq_len // 8, 1)
    edges = [0]
    while edge < seq_len:
        edges.append(edge)
        edge *= 2
    return *edges, seq_len


def positions(wanted: Wanted, evaluation: "Evaluation", job: ResolvedJob) -> "list[Bucket]":
    """Return the loss by position. A collective over all ranks."""
    from trainer.data.evaluation.long_documents import long_documents
    from trainer.data.sources.registry import DataSettings
    from trainer.data.token_files.catalog import documents_in_order
    from trainer.runtime.agreement import raise_on_all_ranks

    settings = DataSettings.of(wanted.dataset, wanted.dataset_path, job.config.model, job.config.training)

    def sequences() -> "list[PackedSequence]":
        return list(long_documents(documents_in_order(settings), wanted.seq_len, wanted.sequences))

    return evaluation.by_position(raise_on_all_ranks(sequences, evaluation.dims["world"]), wanted.edges)


def needle(wanted: Wanted, evaluation: "Evaluation", job: ResolvedJob) -> list[Cell]:
    """Return the answers by length and depth. A collective over all ranks."""
    from trainer.data.evaluation.needle import needle_prompts
    from trainer.data.tokenizers.tokenizer import open_tokenizer
    from trainer.runtime.agreement import raise_on_all_ranks

    tokenizer = open_tokenizer(job.config.model.tokenizer_file)

    def prompts_of(length: int) -> "list[NeedlePrompt]":
        return needle_prompts(tokenizer, length, wanted.depths, wanted.samples, wanted.seed)

    cells = []
    for length in wanted.lengths:
        prompts = raise_on_all_ranks(partial(prompts_of, length), evaluation.dims["world"])
        found = evaluation.needles(prompts)
        for depth in wanted.depths:
            of = [answer for prompt, answer in zip(prompts, found, strict=True) if prompt.depth == depth]
            accuracy = sum(answer.correct for answer in of) / len(of)
            cells.append(Cell(length, depth, len(of), accuracy, sum(a.log_probability for a in of) / len(of)))
    return cells


def evaluate(wanted: Wanted, job: ResolvedJob, device: "torch.device") -> Findings:
    """Return what was asked for. A collective over all ranks.

    Raises:
        SharedConfigError: the weights are damaged, or of another model; or no document is long enough.
    """
    from trainer.tasks.evaluation import Evaluation
    from trainer.tasks.language import LanguageTask

    model, dims = loaded_model(job, device)
    evaluation = Evaluation(LanguageTask(job, dims), dims, model, rows=wanted.rows)
    settings = {name: getattr(wanted, name) for name in ("seq_len", "dataset", "dataset_path", "sequences", "seed")}
    settings |= {"weights": job.config.checkpoint.initial_load_path, "compute_dtype": job.compute_dtype}
    settings |= {"ranks": job.degrees.world_size}
    if job.config.lora.rank:
        settings["adapters"] = str(checkpoint_folder(job.config).step(step_to_load(job.config)))
    return Findings(
        settings,
        positions(wanted, evaluation, job) if "positions" in wanted.tasks else (),
        needle(wanted, evaluation, job) if "needle" in wanted.tasks else (),
    )


def work(wanted: Wanted, job: ResolvedJob, device: "torch.device") -> str:
    """Return the tables, and write the file on rank 0. A collective over all ranks."""
    from torch.distributed import get_rank

    findings = evaluate(wanted, job, device)
    if get_rank():
        return ""
    if (longest := max(wanted.all_lengths)) > wanted.trained_for:
        made = f"{wanted.trained_for:,} tokens"
        print(f"note: the model was made for {made}, and {longest:,} are asked for", file=sys.stderr)
    return f"{tables(findings)}\n{write(findings, wanted.output)}"


main = partial(run, "trainer.commands.evaluate", checked, work)

if __name__ == "__main__":
    from trainer.commands.rank import command_line

    sys.exit(command_line(partial(work_on_rank, checked, work)))
