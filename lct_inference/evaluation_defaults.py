"""Defaults of the options of `lct evaluate`: sequence lengths, buckets of positions, documents, output. Torch-free."""

import argparse
from itertools import pairwise
from pathlib import Path

from trainer.config.errors import ConfigError
from trainer.config.schema import Job

_LONGEST, _SHORTEST_NEEDLE, _FIRST_BUCKET = 8192, 256, 1024


def set_defaults(
    args: argparse.Namespace, trained_for: int, data: tuple[str, str | None]
) -> None:
    """Set the defaults of missing options, in place.

    Args:
        args: The options of the command line. Entries `trained_for` and `edges` are added.
        trained_for: Sequence length of the training, or of the model's configuration.
        data: Kind and path of the data of the run.

    Raises:
        ConfigError: The ends of the buckets do not rise to the sequence length.
    """
    args.trained_for = trained_for
    args.seq_len = args.seq_len or min(trained_for, _LONGEST)
    args.edges = edges_of(args.seq_len, args.buckets)
    if args.dataset is None and args.dataset_path is None:
        args.dataset_path = data[1]
    args.dataset = args.dataset or data[0]
    by_default = [
        n for n in (args.seq_len // 4, args.seq_len // 2, args.seq_len) if n >= _SHORTEST_NEEDLE
    ]
    args.lengths = sorted(set(args.lengths or by_default or [args.seq_len]))
    args.depths = sorted(set(args.depths))
    # Not in the measured folder, which may belong to another user.
    args.output = args.output or Path(
        Job().dump_folder, "evaluation", args.folder.resolve().name
    )


def lengths_of(args: argparse.Namespace) -> list[int]:
    """Return the sequence lengths of all tasks to run, in tokens.

    Args:
        args: The options of the command line, with defaults.
    """
    lengths = {"positions": [args.seq_len], "needle": args.lengths}
    return [length for task in args.tasks for length in lengths[task]]


def edges_of(seq_len: int, ends: list[int] | None) -> tuple[int, ...]:
    """Return the edges of the buckets of positions, from 0 to `seq_len`. Without `ends`, each bucket doubles the edge.

    Args:
        seq_len: Tokens of a sequence.
        ends: Where the buckets end; the last bucket ends at `seq_len` in any case. None for 0, n, 2n, 4n, ...,
            where n is 1024, or seq_len / 8 if that is less.

    Raises:
        ConfigError: The ends do not rise from 1 or more to `seq_len` or less.
    """
    if ends is not None:
        edges = [0, *ends, *([seq_len] if ends[-1] != seq_len else [])]
        if any(a >= b for a, b in pairwise(edges)):
            raise ConfigError(
                f"--buckets {' '.join(map(str, ends))} must rise from 1 or more to {seq_len} or less"
            )
        return tuple(edges)
    edge = _FIRST_BUCKET if seq_len >= 8 * _FIRST_BUCKET else max(seq_len // 8, 1)
    edges = [0]
    while edge < seq_len:
        edges.append(edge)
        edge *= 2
    return *edges, seq_len
