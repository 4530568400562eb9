"""Show what a job trains on: counts of its data, and one packed sequence with its documents, positions and labels.

data show my.toml                                the first sequence of the run
data show my.toml --sample 7 --html seven.html   the eighth, also as a page
data show my.toml --characters 0                 with the whole text of each document

Learned tokens are green, or stand between ⟦ and ⟧ without colours. If the token files of the job are missing, the
command makes them.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from html import escape
from itertools import accumulate, groupby, islice
from operator import itemgetter
from pathlib import Path

import numpy as np

from trainer.commands.options import Parser, number
from trainer.commands.start import parse
from trainer.config.errors import ConfigError
from trainer.config.loader import parse_command_line
from trainer.config.schema import JobConfig
from trainer.data.contents import lacking_parts, table
from trainer.data.tokenizers.tokenizer import Tokenizer, open_tokenizer
from trainer.families.registry import from_path
from trainer.runtime.console import escaped, set_up_logging

_GREEN, _DIM, _PLAIN = "\x1b[32m", "\x1b[2m", "\x1b[0m"
_STYLE = "body{font:14px/1.5 monospace;white-space:pre-wrap}b{color:#060;background:#dfd}h2{font-size:1em}"

Parts = list[tuple[str, bool]]
"""Texts, and whether each is learned."""
Document = tuple[str, Parts]
"""The heading of a document, and its text in parts: the text of a part, and whether its tokens are learned."""


def parser() -> Parser:
    """Return the parser of the options."""
    described = Parser("data show", __doc__)
    add = described.add_argument
    add(
        "--sample",
        type=number(int, 0),
        default=0,
        metavar="N",
        help="number of the sequence in the run, from 0 (default: 0)",
    )
    add("--html", type=Path, metavar="FILE", help="also write the sequence as a page")
    add(
        "--characters",
        type=number(int, 0),
        default=2000,
        metavar="N",
        help="largest number of characters of a document, from start and end (default: 2000; 0: all)",
    )
    return described


def documents_of(batch: dict, tokenizer: Tokenizer) -> Iterator[Document]:
    """Yield the documents of the packed sequence in a batch of one. Padding is a last document without parts.

    Args:
        batch: A batch of the loader: tokens, labels, positions and document_ids, (1, S), and padding,
            the number of padding tokens.
        tokenizer: The tokenizer.
    """
    tokens, labels, positions, ids = (
        batch[name][0].numpy() for name in ("tokens", "labels", "positions", "document_ids")
    )
    for document in range(int(ids[-1]) + 1):
        start, stop = np.searchsorted(ids, [document, document + 1]).tolist()
        targets = labels[start:stop]
        if document == ids[-1] and batch["padding"] == stop - start:
            yield f"padding: {stop - start:,} tokens", []
            continue
        learned = targets >= 0
        head = (
            f"document {document}: places {start:,} to {stop - 1:,}, positions {positions[start]:,} to "
            f"{positions[stop - 1]:,}, {int(learned.sum()):,} of {stop - start:,} tokens learned"
        )
        # The label of a place is the next token. The next token of the last place may follow the sequence.
        shown = np.append(tokens[start:stop], targets[-1:][learned[-1:]])
        marks = np.concatenate([[False], learned[: len(shown) - 1]])
        runs = groupby(zip(shown.tolist(), marks.tolist(), strict=True), itemgetter(1))
        yield head, [(tokenizer.decode([id for id, _ in run]), mark) for mark, run in runs]


def shortened(parts: Parts, most: int) -> Parts:
    """Return the first and the last characters of a text, with a note on the characters between them.

    Args:
        parts: The parts of the text, each with whether it is learned.
        most: Number of characters to keep; 0 for all.
    """
    length = sum(len(text) for text, _ in parts)
    if not most or length <= most:
        return parts
    head = most // 2
    tail = length - (most - head)
    gap = f"\n... {tail - head:,} characters ...\n", False
    return [*_cut(parts, 0, head), gap, *_cut(parts, tail, length)]


def _cut(parts: Parts, start: int, stop: int) -> Parts:
    """Return the characters [start, stop) of a text in parts."""
    places = accumulate((len(text) for text, _ in parts), initial=0)
    cut = [
        (text[max(start - at, 0) : max(stop - at, 0)], learned)
        for (text, learned), at in zip(parts, places, strict=False)
    ]
    return [(text, learned) for text, learned in cut if text]


def on_console(documents: list[Document], *, color: bool) -> str:
    """Return the documents as text for a terminal.

    Args:
        documents: The documents.
        color: Whether learned tokens are green; otherwise they stand between ⟦ and ⟧.
    """
    first, last = (_GREEN, _PLAIN) if color else ("⟦", "⟧")
    lines = []
    for head, parts in documents:
        lines.append(f"{_DIM}-- {head}{_PLAIN}" if color else f"-- {head}")
        shown = ((escaped(text), learned) for text, learned in parts)
        lines.append(
            "".join(f"{first}{text}{last}" if learned else text for text, learned in shown)
        )
    return "\n".join(lines)


def page(documents: list[Document], title: str) -> str:
    """Return the documents as a page of HTML.

    Args:
        documents: The documents.
        title: The title of the page.
    """
    body = (
        f"<h2>{escape(head)}</h2>"
        + "".join(
            f"<b>{escape(text)}</b>" if learned else escape(text) for text, learned in parts
        )
        for head, parts in documents
    )
    head = f"<!doctype html><meta charset=utf-8><title>{escape(title)}</title><style>{_STYLE}</style>"
    return f"{head}<h1>{escape(title)}</h1>{''.join(body)}\n"


def show(config: JobConfig, args: argparse.Namespace) -> str:
    """Return the counts of a job's data and a packed sequence as text; with --html, also write the sequence as a page.

    Args:
        config: The configuration of the run.
        args: The options of the command line.

    Raises:
        ConfigError: The data have no tokens.
        OSError: The page cannot be written.
    """
    from trainer.data.job_data import open_training_data
    from trainer.data.loader import BatchLoader

    if config.task != "tokens":
        raise ConfigError(
            f"training.dataset = {config.training.dataset!r} has no tokens; `lct data show` is for text"
        )
    data = open_training_data(config)
    training = config.training
    one_row = replace(training, local_batch_size=1)
    loader = BatchLoader(data, one_row, dp_rank=0, dp_degree=1)
    batch = next(islice(iter(loader), args.sample, None))
    title = f"sequence {args.sample}, {training.seq_len:,} tokens"
    if "sources" in batch:
        title += f", of {config.mixture.names[int(batch['sources'][0])]}"
    documents = documents_of(batch, open_tokenizer(config.model.tokenizer_file))
    documents = [(head, shortened(parts, args.characters)) for head, parts in documents]
    if args.html is not None:
        args.html.write_text(page(documents, title), "utf-8")
    color = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    contents = data.contents()
    counts = [table(contents, training.seq_len)] if contents else []
    counts += [f"note: {sentence}" for sentence in lacking_parts(contents)]
    return "\n\n".join([*counts, title, on_console(documents, color=color)])


def main(argv: list[str]) -> int:
    """Run `data show [FILE] [options] [--table.key value ...]`.

    Args:
        argv: The words after `lct data`. The first one is `show`, or asks for help.

    Returns:
        The exit code.
    """
    if argv[:1] in (["-h"], ["--help"]):
        argv = ["show", *argv]
    if argv[:1] != ["show"]:
        raise ConfigError("`lct data` has one command: lct data show my.toml")
    args, settings = parser().parse_known_args(argv[1:])
    config = from_path(parse_command_line(parse(settings).arguments, reading=True).config)
    set_up_logging(0)
    print(show(config, args))
    return 0
