"""Show a plan of context parallelism: which rank owns which tokens, computes how much, and sends how much.

The command shows the plans that training executes. It computes no attention, and needs neither torch nor a GPU.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from lct_tools.plan_case import DIRECTIONS, MOST_RANKS, Case
from lct_tools.plan_summary import summary
from longshard.context.planning.auto import choose
from longshard.context.planning.balance import LOAD_BALANCERS
from longshard.context.planning.cost import AttentionShape
from longshard.context.planning.heads import check_heads
from longshard.context.planning.mask import Mask, causal, documents, full, sliding_window
from longshard.context.planning.methods import METHODS
from longshard.context.planning.options import ContextParallelOptions
from trainer.commands.options import COUNT, Parser
from trainer.config.errors import ConfigError, did_you_mean
from trainer.job.degrees import divisors

MASKS = ("causal", "full", "window:4096", "document")
OUTPUTS = (".svg", ".png")

_EXAMPLES = """examples:
  lct plan --seq-len 1048576 --degree 64 --method auto
      a summary, with the method that training would choose

  lct plan --seq-len 65536 --degree 4 --mask document --load-balancer balanced --output plan.svg
      packed documents, as a picture
"""


def parse_documents(text: str, seq_len: int) -> list[int]:
    """Return the lengths of packed documents, in tokens.

    Random lengths are log-normal with a median of a sixteenth of the sequence; the last document is cut.

    Args:
        text: Lengths, such as `5000,3000`, or `random:SEED`.
        seq_len: Tokens of the sequence, the sum of the lengths.

    Raises:
        ConfigError: The text has another form, or the lengths have another sum.
    """
    name, _, seed = text.partition(":")
    if name == "random" and seed.isdecimal():
        rng = np.random.default_rng(int(seed))
        lengths = []
        left = seq_len
        while left:
            lengths.append(min(int(rng.lognormal(0, 1) * seq_len / 16) + 1, left))
            left -= lengths[-1]
        return lengths
    words = text.split(",")
    if not all(word.strip().isdecimal() for word in words):
        raise ConfigError(
            f"--documents {text!r} must be lengths, such as 5000,3000, or random: and a seed, as random:0"
        )
    lengths = [int(word) for word in words]
    if sum(lengths) != seq_len:
        raise ConfigError(
            f"--documents {text} are {sum(lengths):,} tokens and must be --seq-len {seq_len}"
        )
    return lengths


def parse_mask(
    text: str, seq_len: int, document_text: str | None
) -> tuple[Mask, Mask | None, str]:
    """Return the mask of attention, the mask of the documents, and the name of the mask.

    Args:
        text: "causal", "full", "document" or "window:N".
        seq_len: Tokens of the sequence.
        document_text: The lengths of the documents, see `parse_documents`; None for random ones.

    Returns:
        The mask; the mask within documents, by which the load balancer `balanced` assigns tokens, None without
        documents; and the name.

    Raises:
        ConfigError: The text names no mask, or the documents are wrong or given with another mask than "document".
    """
    if document_text is not None and text != "document":
        raise ConfigError(
            f"--documents has no effect with --mask {text}; leave it out, or use --mask document"
        )
    if text == "document":
        lengths = parse_documents(document_text or "random:0", seq_len)
        packed = documents(lengths)
        name = f"causal mask within {len(lengths)} packed document{'s' * (len(lengths) > 1)}"
        return causal(seq_len) & packed, packed, name
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
    """Return the case that the options describe.

    Args:
        args: The options of the command line.

    Raises:
        ConfigError: An option is wrong, or two of them do not go together.
    """
    if args.seq_len < args.degree:
        raise ConfigError(
            f"--seq-len {args.seq_len} gives some of --degree {args.degree} ranks no token; use a length of at least "
            f"{args.degree}, or fewer ranks"
        )
    if args.heads % args.kv_heads:
        raise ConfigError(
            f"--kv-heads {args.kv_heads} must divide --heads {args.heads}; use one of "
            f"{', '.join(map(str, divisors(args.heads)))}"
        )
    mask, packed, mask_name = parse_mask(args.mask, args.seq_len, args.documents)
    shape = AttentionShape(1, args.heads, args.kv_heads, args.head_dim, args.bytes)
    options, reason = method_of(args, shape, mask, packed)
    layout = options.layout(args.seq_len, args.degree, packed)
    return Case(
        layout, mask, mask_name, options, args.direction or DIRECTIONS[0], shape, reason
    )


def method_of(
    args: argparse.Namespace, shape: AttentionShape, mask: Mask, packed: Mask | None
) -> tuple[ContextParallelOptions, str]:
    """Return the options of context parallelism for the method of the command line.

    Args:
        args: The options of the command line.
        shape: The shape of attention.
        mask: The mask of attention.
        packed: The mask within documents; None without documents.

    Returns:
        The options, and why `auto` chose the method; the reason is empty if the command line names a method.

    Raises:
        ConfigError: The method does not fit the degrees or the heads.
    """
    options = ContextParallelOptions(load_balancer=args.load_balancer)
    head_degree = args.head_degree
    spread = METHODS.get(args.method)
    two_level = spread is not None and spread.two_level
    if two_level and head_degree is None:
        raise ConfigError(
            f"--method {args.method} needs --head-degree, the number of ranks that divide the heads, such as 2"
        )
    if not two_level and head_degree is not None:
        others = " or ".join(each for each, record in METHODS.items() if record.two_level)
        raise ConfigError(
            f"--head-degree {head_degree} has no effect with --method {args.method}; leave it out, or use {others}"
        )
    if spread is None:
        # As in training: with packed documents, each batch has its method, on a 1-D mesh made before the batch.
        masks = (causal(args.seq_len) if packed else mask,)
        settings = {"batch": packed, "hybrids": packed is None, "node": args.node}
        return choose(options, masks, args.degree, shape, **settings)
    if head_degree is not None and args.degree % head_degree:
        raise ConfigError(
            f"--head-degree {head_degree} must divide --degree {args.degree}; use one of "
            f"{', '.join(map(str, divisors(args.degree)))}"
        )
    hybrid = (head_degree, args.degree // head_degree) if head_degree is not None else None
    try:
        check_heads(args.heads, spread.head_degree(args.degree, hybrid), args.method)
    except ValueError as error:
        option = (
            f"--degree {args.degree}" if head_degree is None else f"--head-degree {head_degree}"
        )
        raise ConfigError(f"{option} does not go with --heads {args.heads}: {error}") from None
    return replace(options, method=args.method, hybrid_degrees=hybrid), ""


def painter(args: argparse.Namespace) -> Callable[[Case, Path], None]:
    """Return the function that draws a case to a file. Import matplotlib, which is optional, only now.

    Args:
        args: The options of the command line, with `output`.

    Raises:
        ConfigError: The file cannot be written, there are too many ranks to draw, or matplotlib is missing.
    """
    if args.output.suffix not in OUTPUTS:
        raise ConfigError(
            f"--output {args.output} must end in {' or '.join(OUTPUTS)}, the two kinds of picture"
        )
    if not args.output.parent.is_dir():
        raise ConfigError(
            f"--output {args.output} lies in no folder: make {args.output.parent} first"
        )
    if args.degree > MOST_RANKS:
        raise ConfigError(
            f"--output draws at most {MOST_RANKS} ranks, and --degree is {args.degree}; draw fewer ranks"
        )
    try:
        from lct_tools.plan_picture import draw
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--output needs {error.name}: pip install {error.name}, or leave --output out"
        ) from None
    return draw


def parser() -> Parser:
    """Return the parser of the options."""
    described = Parser("plan", f"{__doc__.splitlines()[0]}\n{_EXAMPLES}")
    add = described.add_argument_group("sequence and ranks").add_argument
    add("--seq-len", type=COUNT, required=True, metavar="TOKENS", help="tokens of the sequence")
    add(
        "--degree",
        type=COUNT,
        required=True,
        metavar="RANKS",
        help="ranks that share the sequence",
    )
    add(
        "--mask",
        default="causal",
        help="causal (default), full, window:4096, or document (causal within documents)",
    )
    add(
        "--documents",
        metavar="LENGTHS",
        help="with --mask document: 5000,3000,... or random:SEED (default random:0)",
    )
    _method_options(described.add_argument_group("method and layout").add_argument)
    add = described.add_argument_group(
        "attention (default: Llama 3 8B in bfloat16)"
    ).add_argument
    add_count = partial(add, type=COUNT, metavar="N")
    add_count("--heads", default=32, help="query heads (32)")
    add_count("--kv-heads", default=8, help="key/value heads (8)")
    add_count("--head-dim", default=128, help="size of a head (128)")
    add_count("--bytes", default=2, help="bytes of an element of q, k, v (2)")
    add = described.add_argument_group("output").add_argument
    add(
        "--direction",
        choices=DIRECTIONS,
        help="only this one (default: both in the summary, forward in the picture)",
    )
    add("--output", type=Path, metavar="FILE", help="picture to write, .svg or .png")
    return described


def _method_options(add: Callable[..., object]) -> None:
    add(
        "--method",
        choices=(*METHODS, "auto"),
        default="ring",
        help="how attention reaches other ranks' keys (default: ring); auto: the choice of training, with its reason",
    )
    add(
        "--head-degree",
        type=COUNT,
        metavar="RANKS",
        help="with --method hybrid: ranks that divide the heads",
    )
    add(
        "--node",
        type=COUNT,
        default=8,
        metavar="RANKS",
        help="with --method auto: ranks of one node (8)",
    )
    add(
        "--load-balancer",
        choices=("auto", *LOAD_BALANCERS),
        default="auto",
        help="who owns which tokens (auto)",
    )


def main(argv: list[str] | None = None) -> int:
    """Print the summary. With --output, also write the picture.

    Args:
        argv: The words of the command line, without the command.

    Returns:
        The exit code.
    """
    args = parser().parse_args(argv)
    case = build(args)
    draw = None if args.output is None else painter(args)
    print(summary(case, [args.direction] if args.direction else DIRECTIONS))
    if draw is not None:
        draw(case, args.output)
        print(f"\n{args.output}")
    return 0
