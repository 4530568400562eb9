"""Show a plan of context parallelism: which rank owns which tokens, computes which tiles, and sends how much.

It reads the same plans that training runs. It computes no attention, and needs neither torch nor a GPU.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import numpy as np

from trainer.commands.plan_case import DIRECTIONS, MOST_RANKS, Case
from trainer.commands.plan_summary import summary
from trainer.commands.plan_tables import TABLES, tables
from trainer.config.errors import ConfigError, did_you_mean
from trainer.distributed.context_parallel.planning.auto import choose
from trainer.distributed.context_parallel.planning.balance import LOAD_BALANCERS
from trainer.distributed.context_parallel.planning.cost import AttentionShape
from trainer.distributed.context_parallel.planning.heads import check_heads
from trainer.distributed.context_parallel.planning.mask import Mask, causal, documents, full, sliding_window
from trainer.distributed.context_parallel.planning.methods import METHODS
from trainer.distributed.context_parallel.planning.options import ContextParallelOptions

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
    check(args)
    mask, packed, mask_name = parse_mask(args.mask, args.seq_len, args.documents)
    shape = AttentionShape(1, args.heads, args.kv_heads, args.head_dim, args.bytes)
    options, reason = method_of(args, shape, mask, packed)
    layout = options.layout(args.seq_len, args.degree, packed)
    return Case(layout, mask, mask_name, options, args.direction or DIRECTIONS[0], shape, reason)


def check(args: argparse.Namespace) -> None:
    """Check the numbers, and that no option is without effect.

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
        raise ConfigError(
            f"--kv-heads {args.kv_heads} must divide --heads {args.heads}; use one of {divisors(args.heads)}"
        )
    if args.rank is not None and not 0 <= args.rank < args.degree:
        raise ConfigError(f"--rank {args.rank} is none of --degree {args.degree} ranks; use 0 to {args.degree - 1}")
    if args.output is None:
        return
    if args.output.suffix not in OUTPUTS:
        raise ConfigError(f"--output {args.output} must end in {' or '.join(OUTPUTS)}, the two kinds of picture")
    if not args.output.parent.is_dir():
        raise ConfigError(f"--output {args.output} lies in no folder: make {args.output.parent} first")
    if args.degree > MOST_RANKS:
        raise ConfigError(
            f"--output draws at most {MOST_RANKS} ranks, and --degree is {args.degree}; draw fewer ranks, or leave "
            "--output out"
        )


def divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


def method_of(
    args: argparse.Namespace, shape: AttentionShape, mask: Mask, packed: Mask | None
) -> tuple[ContextParallelOptions, str]:
    """Return the options of the method, and why `auto` chose it (empty if it is named).

    Raises:
        ConfigError: a head degree that is missing, does not fit, or has no effect.
    """
    options, number, name = ContextParallelOptions(load_balancer=args.load_balancer), args.head_degree, "--head-degree"
    spread = METHODS.get(args.method)
    two_level = spread is not None and spread.two_level
    if two_level and number is None:
        raise ConfigError(f"--method {args.method} needs {name}, the number of ranks that divide the heads, such as 2")
    if not two_level and number is not None:
        others = " or ".join(each for each, record in METHODS.items() if record.two_level)
        raise ConfigError(f"{name} {number} has no effect with --method {args.method}; leave it out, or use {others}")
    if spread is None:
        # As training does: with packed documents, for the batch, and on the mesh that stands before the first batch.
        masks = (causal(args.seq_len) if packed else mask,)
        return choose(options, masks, args.degree, shape, batch=packed, hybrids=packed is None)
    if number is not None and (number < 1 or args.degree % number):
        raise ConfigError(f"{name} {number} must divide --degree {args.degree}; use one of {divisors(args.degree)}")
    hybrid = (number, args.degree // number) if number is not None else None
    try:
        check_heads(args.heads, spread.head_degree(args.degree, hybrid), args.method)
    except ValueError as error:
        flag, value = ("--degree", args.degree) if number is None else (name, number)
        raise ConfigError(f"{flag} {value} does not go with --heads {args.heads}: {error}") from None
    return replace(options, method=args.method, hybrid_degrees=hybrid), ""


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
        self.exit(2, f"error: {message}; see lct plan --help\n")


_EXAMPLES = """examples:
  lct plan --seq-len 1048576 --degree 64 --method auto
      a summary, with the method that training would choose
  lct plan --seq-len 65536 --degree 8 --mask window:4096 --load-balancer contiguous --tables ranks stages
      a sliding window, with tables of ranks and stages
  lct plan --seq-len 65536 --degree 4 --mask document --load-balancer balanced --output plan.svg
      packed documents, as a picture
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    described = _Parser(
        prog="lct plan",
        description=__doc__.splitlines()[0],
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = described.add_argument_group("sequence and ranks").add_argument
    add("--seq-len", type=int, required=True, metavar="TOKENS", help="tokens of the sequence")
    add("--degree", type=int, required=True, metavar="RANKS", help="ranks that share the sequence")
    add("--mask", default="causal", help="causal (default), full, window:4096, or document (causal within documents)")
    add("--documents", metavar="LENGTHS", help="with --mask document: 5000,3000,... or random:SEED (default random:0)")
    add = described.add_argument_group("method and layout").add_argument
    add(
        "--method",
        choices=(*METHODS, "auto"),
        default="ring",
        help="how attention reaches other ranks' keys (default: ring); auto: the choice of training, with its reason",
    )
    add("--head-degree", type=int, metavar="RANKS", help="with --method hybrid: ranks that divide the heads")
    add("--load-balancer", choices=("auto", *LOAD_BALANCERS), default="auto", help="who owns which tokens (auto)")
    add = described.add_argument_group("attention, by default that of Llama 3 8B in bfloat16").add_argument
    add("--heads", type=int, default=32, metavar="N", help="query heads (32)")
    add("--kv-heads", type=int, default=8, metavar="N", help="key/value heads (8)")
    add("--head-dim", type=int, default=128, metavar="N", help="size of a head (128)")
    add("--bytes", type=int, default=2, metavar="N", help="bytes of an element of q, k, v (2)")
    add = described.add_argument_group("what is shown, beside a summary").add_argument
    add("--tables", choices=TABLES, nargs="+", default=[], help="tables; of many ranks or stages they list some")
    add("--rank", type=int, help="all stages and tiles of this rank; in a picture, the others are pale")
    add("--direction", choices=DIRECTIONS, help="only this one (default: the summary has both, the rest is forward)")
    add("--output", type=Path, metavar="FILE", help="picture to write, .svg or .png")
    return described


def main(argv: list[str] | None = None) -> int:
    """Print what the arguments ask for, write the picture, and return the exit code."""
    args = parser().parse_args(argv)
    try:
        case = build(args)
        draw = None if args.output is None else painter()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(summary(case, [args.direction] if args.direction else DIRECTIONS))
    if wanted := args.tables or (TABLES if args.rank is not None else ()):
        print(f"\n{tables(case, wanted, args.rank)}")
    if draw is not None:
        draw(case, args.output, args.rank)
        print(f"\n{args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
