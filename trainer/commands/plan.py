"""Show a plan of context parallelism: which rank owns which tokens, computes which tiles, and sends how much.

    python scripts/show_plan.py --seq-len 65536 --degree 4
    python scripts/show_plan.py --seq-len 65536 --degree 8 --load-balancer contiguous --mask window:4096
    python scripts/show_plan.py --seq-len 65536 --degree 4 --load-balancer balanced --mask document \
        --documents random:0 --output plan.svg

It reads the same plans that training runs. It computes no attention, and needs no GPU.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import numpy as np

from trainer.commands.plan_tables import Case, report
from trainer.config.errors import ConfigError, did_you_mean
from trainer.distributed.context_parallel.planning.cost import AttentionShape
from trainer.distributed.context_parallel.planning.heads import check_heads
from trainer.distributed.context_parallel.planning.mask import Mask, causal, documents, full, sliding_window
from trainer.distributed.context_parallel.planning.methods import METHODS
from trainer.distributed.context_parallel.planning.options import ContextParallelOptions
from trainer.distributed.sharding.layout import LOAD_BALANCERS

MASKS = ("causal", "full", "window:4096", "document")
OUTPUTS = (".svg", ".png")


def random_documents(seq_len: int, seed: int) -> list[int]:
    """Return lengths of documents, log-normal with a median of a sixteenth of the sequence; the last one is cut."""
    rng, lengths, left = np.random.default_rng(seed), [], seq_len
    while left:
        lengths.append(min(int(rng.lognormal(0, 1) * seq_len / 16) + 1, left))
        left -= lengths[-1]
    return lengths


def parse_documents(text: str, seq_len: int) -> list[int]:
    """Return the lengths of documents from `5000,3000,...`, or `random:SEED`.

    Raises:
        ConfigError: another text, or lengths that do not add up to the sequence.
    """
    name, _, seed = text.partition(":")
    if name == "random" and seed.isdecimal():
        return random_documents(seq_len, int(seed))
    words = text.split(",")
    if not all(word.strip().isdecimal() for word in words):
        raise ConfigError(
            f"--documents {text!r} must be lengths, such as 5000,3000, or random: and a seed, as random:0"
        )
    lengths = [int(word) for word in words]
    if sum(lengths) != seq_len:
        raise ConfigError(
            f"--documents {text} are {sum(lengths):,} tokens and must be --seq-len {seq_len}; "
            + (f"add one of {seq_len - sum(lengths)}" if sum(lengths) < seq_len else f"or use --seq-len {sum(lengths)}")
        )
    return lengths


def parse_mask(text: str, seq_len: int, document_text: str | None) -> tuple[Mask, Mask | None, str]:
    """Return the mask, the mask of the batch's documents (by which `balanced` deals) or None, and the mask's name.

    Raises:
        ConfigError: an unknown mask, or documents that have no effect.
    """
    if document_text is not None and text != "document":
        raise ConfigError(f"--documents has no effect with --mask {text}; leave it out, or use --mask document")
    if text == "document":
        lengths = parse_documents(document_text or "random:0", seq_len)
        packed = documents(lengths)
        return (
            causal(seq_len) & packed,
            packed,
            f"causal mask within {len(lengths)} packed document{'s' * (len(lengths) > 1)}",
        )
    if text in ("causal", "full"):
        return {"causal": causal, "full": full}[text](seq_len), None, f"{text} mask"
    name, _, window = text.partition(":")
    if name != "window" or not window.isdecimal() or not int(window):
        raise ConfigError(
            f"--mask {text!r} must be causal, full, document, or window: and a number of tokens of at least 1, as "
            "window:4096" + (did_you_mean(text, MASKS) if name != "window" else "")
        )
    return sliding_window(seq_len, int(window)), None, f"sliding window of {int(window):,}"


def build(args: argparse.Namespace) -> Case:
    """Return the case that the arguments describe.

    Raises:
        ConfigError: a wrong value.
    """
    for name in ("seq_len", "degree", "heads", "kv_heads", "head_dim", "bytes"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least 1")
    if args.seq_len < args.degree:
        raise ConfigError(
            f"--seq-len {args.seq_len} gives some of --degree {args.degree} ranks no token; use a length of at least "
            f"{args.degree}, or fewer ranks"
        )
    if args.heads % args.kv_heads:
        works = ", ".join(str(n) for n in range(1, args.heads + 1) if args.heads % n == 0)
        raise ConfigError(f"--kv-heads {args.kv_heads} must divide --heads {args.heads}; use one of {works}")
    head_degree = _head_degree(args)
    if args.rank is not None and not 0 <= args.rank < args.degree:
        raise ConfigError(f"--rank {args.rank} is none of --degree {args.degree} ranks; use 0 to {args.degree - 1}")
    if args.output is not None and args.output.suffix not in OUTPUTS:
        raise ConfigError(f"--output {args.output} must end in {' or '.join(OUTPUTS)}, the two kinds of picture")
    if args.output is not None and not args.output.parent.is_dir():
        raise ConfigError(f"--output {args.output} lies in no folder: make {args.output.parent} first")
    mask, batch_mask, mask_name = parse_mask(args.mask, args.seq_len, args.documents)
    degrees = {"hybrid_degrees": (head_degree, args.degree // head_degree)} if args.method == "hybrid" else {}
    options = ContextParallelOptions(method=args.method, load_balancer=args.load_balancer, **degrees)
    layout = options.layout(args.seq_len, args.degree, batch_mask)
    shape = AttentionShape(1, args.heads, args.kv_heads, args.head_dim, args.bytes)
    return Case(layout, mask, mask_name, args.method, head_degree, args.direction, shape)


def _head_degree(args: argparse.Namespace) -> int:
    """Return how many ranks divide the heads.

    Raises:
        ConfigError: a number that cannot divide them, or has no effect.
    """
    number, name = args.head_degree, "--head-degree"
    if (number is None) != (args.method != "hybrid"):
        raise ConfigError(
            "--method hybrid needs --head-degree, the number of ranks that divide the heads, such as 2"
            if number is None
            else f"--head-degree {number} has no effect with --method {args.method}; leave it out, or use hybrid"
        )
    if args.method == "all_to_all":
        number, name = args.degree, "--degree"
    if number is None:
        return 1
    if number < 1 or args.degree % number:
        works = ", ".join(str(n) for n in range(1, args.degree + 1) if args.degree % n == 0)
        raise ConfigError(f"--head-degree {number} must divide --degree {args.degree}; use one of {works}")
    try:
        check_heads(args.heads, number)
    except ValueError as error:
        raise ConfigError(f"{name} {number} does not go with --heads {args.heads}: {error}") from None
    return number


def painter() -> Callable[[Case, Path, int | None], None]:
    """Return the function that draws; it is imported at its use, because matplotlib is optional.

    Raises:
        ConfigError: matplotlib is missing.
    """
    try:
        from trainer.commands.plan_picture import draw
    except ModuleNotFoundError as error:
        raise ConfigError(f"--output needs {error.name}: pip install {error.name}, or leave --output out") from None
    return draw


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one sentence."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{message}; see --help\n")


def parser() -> argparse.ArgumentParser:
    described = _Parser(description=__doc__.splitlines()[0])
    add = described.add_argument
    add("--seq-len", type=int, required=True, help="tokens of the sequence")
    add("--degree", type=int, required=True, help="ranks that share the sequence")
    add("--method", choices=METHODS, default="ring", help="how attention reaches the other ranks' keys")
    add("--head-degree", type=int, help="with --method hybrid: ranks that divide the heads")
    add("--load-balancer", choices=LOAD_BALANCERS, default="head_tail", help="who owns which tokens")
    add("--mask", default="causal", help="causal (default), full, window:4096, or document (causal within documents)")
    add("--documents", help="lengths, such as 5000,3000, or random:SEED (default random:0), with --mask document")
    add("--heads", type=int, default=32, help="query heads")
    add("--kv-heads", type=int, default=8, help="key/value heads")
    add("--head-dim", type=int, default=128, help="size of a head")
    add("--bytes", type=int, default=2, help="bytes of an element of q, k, v")
    add("--direction", choices=("forward", "backward"), default="forward", help="direction of training")
    add("--rank", type=int, help="show all tiles of this rank only")
    add("--output", type=Path, help="picture to write, .svg or .png")
    return described


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        case = build(args)
        draw = None if args.output is None else painter()
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    print(report(case, args.rank))
    if draw is not None:
        draw(case, args.output, args.rank)
        print(f"\n{args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
