"""The options of `lct evaluate`, checked. Torch-free."""

import argparse
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from trainer.commands.evaluate_report import check_output
from trainer.commands.finished_run import text_configuration
from trainer.commands.ranks import all_ranks
from trainer.commands.start import CPU_RANKS
from trainer.config.errors import ConfigError
from trainer.config.schema import JobConfig
from trainer.data.sources.registry import DATASETS, DataSettings
from trainer.data.token_files.catalog import check_data
from trainer.job import ResolvedJob, resolve
from trainer.job.training import check_batch
from trainer.runtime.devices import this_machine

_DESCRIPTION = "Measure a run, or a Hugging Face folder, on long sequences: loss by position, needles in a haystack."
TASKS = ("positions", "needle")
_TABLES = ("model", "parallelism", "comm")
_KEYS = ("job.device", *(f"training.{key}" for key in ("dtype", "mixed_precision_param", "loss_chunk_tokens")))
_LONGEST, _SHORTEST_NEEDLE, _FIRST_BUCKET = 8192, 256, 1024
_DEPTHS = (0.0, 25.0, 50.0, 75.0, 100.0)


@dataclass(frozen=True)
class Wanted:
    """What an evaluation measures, with all defaults."""

    tasks: tuple[str, ...]
    seq_len: int
    """Tokens of the sequences whose loss is measured by position."""
    edges: tuple[int, ...]
    """Of the buckets of positions, from 0 to `seq_len`."""
    dataset: str
    dataset_path: str | None
    sequences: int
    lengths: tuple[int, ...]
    """Of the needle prompts."""
    depths: tuple[float, ...]
    samples: int
    seed: int
    rows: int
    """Sequences of a forward on each data-parallel rank."""
    output: Path
    ranks_here: int
    """Ranks on this machine."""
    trained_for: int
    """Tokens of the sequences that the model was trained with, or is made for."""

    @property
    def all_lengths(self) -> list[int]:
        """Every length of a sequence."""
        lengths = {"positions": [self.seq_len], "needle": self.lengths}
        return [length for task in self.tasks for length in lengths[task]]


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    described = argparse.ArgumentParser(
        prog="lct evaluate",
        usage="lct evaluate FOLDER [options] [--table.key value ...]",
        description=_DESCRIPTION,
        allow_abbrev=False,
    )
    add = described.add_argument
    add("folder", type=Path, help="job.dump_folder of the run, or a Hugging Face folder")
    add("--tasks", nargs="+", choices=TASKS, default=TASKS, help="what to measure (default: both)")
    add("--seq-len", type=int, metavar="N", help="tokens of a sequence (default: as in training, at most 8,192)")
    add("--sequences", type=int, default=16, metavar="N", help="documents whose first tokens are used (default: 16)")
    add("--dataset", choices=[*DATASETS], help="kind of the documents (default: the run's validation data, or its own)")
    add("--dataset-path", metavar="PATH", help="file, folder or glob of the documents")
    add("--buckets", nargs="+", type=int, metavar="N", help="where a bucket of positions ends (default: they double)")
    add("--lengths", nargs="+", type=int, metavar="N", help="of needle prompts (default: --seq-len, its half, quarter)")
    text = "of needles in percent (default: 0 25 50 75 100)"
    add("--depths", nargs="+", type=float, default=_DEPTHS, metavar="D", help=text)
    add("--samples", type=int, default=4, metavar="N", help="needle prompts of each length and depth (default: 4)")
    add("--seed", type=int, default=0, help="of the needle prompts (default: 0)")
    add("--batch-size", type=int, default=1, metavar="N", help="sequences of a forward on each rank (default: 1)")
    add("--step", type=int, default=-1, help="saved step of the run (default: the latest)")
    add("--tokenizer", metavar="PATH", help="tokenizer (default: the folder's own)")
    add("--ngpu", type=int, metavar="N", help=f"ranks (default: one a GPU, or {CPU_RANKS} on CPUs)")
    add("--output", type=Path, metavar="FOLDER", help="for JSON, CSV and pictures (default: evaluation in FOLDER)")
    return described


def arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options, and the settings as they are written.

    Raises:
        ConfigError: a value out of bounds, or a setting that an evaluation does not have.
    """
    own: list[str] = []
    settings: list[str] = []
    into = own
    for token in argv:
        if token.startswith("--") or token == "-h":
            into = settings if "." in token.partition("=")[0] else own
        into.append(token)
        name = token[2:].partition("=")[0].removeprefix("no-").replace("-", "_")
        if into is settings and token.startswith("--") and not (name.partition(".")[0] in _TABLES or name in _KEYS):
            raise ConfigError(
                f"{token} is no setting of lct evaluate; it takes those of [{'], ['.join(_TABLES)}], and "
                f"{', '.join(_KEYS)}"
            )
    args = parser().parse_args(own)
    for name, holds, rule in (
        *((name, getattr(args, name.replace("-", "_")) >= 1, "at least 1") for name in ("sequences", "samples")),
        ("batch-size", args.batch_size >= 1, "at least 1"),
        ("seq-len", args.seq_len is None or args.seq_len >= 1, "at least 1"),
        ("lengths", min(args.lengths or [1]) >= 1, "at least 1"),
        ("depths", all(0 <= depth <= 100 for depth in args.depths), "in [0, 100]"),
        ("ngpu", args.ngpu is None or args.ngpu >= 1, "at least 1"),
    ):
        if not holds:
            raise ConfigError(f"--{name} {getattr(args, name.replace('-', '_'))} must be {rule}")
    return args, settings


def checked(argv: list[str]) -> tuple[Wanted, ResolvedJob]:
    """Return what is wanted, and the job of all ranks.

    Raises:
        ConfigError: a wrong option or setting, or a folder without a model that this command can use.
    """
    args, settings = arguments(argv)
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
    try:
        return wanted, _resolved(wanted, config)
    except ConfigError as error:
        text = str(error)
        for key, name in (
            ("training.seq_len = ", "length "),
            ("training.dataset_path", "--dataset-path"),
            ("training.dataset", "--dataset"),
        ):
            text = text.replace(key, name)
        raise ConfigError(text) from None


def _wanted(args: argparse.Namespace, config: JobConfig, data: tuple[str, str | None]) -> Wanted:
    """Return the options with their defaults. data: kind and path of the run's own."""
    trained_for, gpus = config.training.seq_len, this_machine().gpus if config.job.device != "cpu" else 0
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
        ranks_here=args.ngpu or gpus or CPU_RANKS,
        trained_for=trained_for,
    )


def _resolved(wanted: Wanted, config: JobConfig) -> ResolvedJob:
    """Return the job for the longest sequences; check the other lengths, and the data.

    Raises:
        ConfigError: as `resolve`.
    """
    ranks = all_ranks(wanted.ranks_here)
    shape = {"seq_len": max(wanted.all_lengths), "local_batch_size": wanted.rows, "data_streams": None}
    own = replace(config.job, dump_folder=str(wanted.output))
    config = replace(config, job=own, training=replace(config.training, **shape))
    job = resolve(config, ranks, this_machine().device_type(config.job.device))
    for length in wanted.all_lengths:
        check_batch(replace(config, training=replace(config.training, seq_len=length)), job.degrees)
    if "positions" in wanted.tasks:
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
