"""Show a plan of context parallelism: which rank owns which tokens, computes how much, and sends how much.

It reads the same plans that training runs. It computes no attention, and needs neither torch nor a GPU.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean

import numpy as np

from longshard.context.planning.auto import choose
from longshard.context.planning.balance import LOAD_BALANCERS
from longshard.context.planning.cost import AttentionShape, Cost
from longshard.context.planning.heads import check_heads
from longshard.context.planning.mask import Mask, causal, documents, full, sliding_window
from longshard.context.planning.methods import METHODS
from longshard.context.planning.options import ContextParallelOptions
from trainer.commands.options import Parser, number
from trainer.commands.plan_case import DIRECTIONS, MOST_RANKS, Case
from trainer.config.errors import ConfigError, did_you_mean
from trainer.runtime.console import paragraphs

MASKS = ("causal", "full", "window:4096", "document")
OUTPUTS = (".svg", ".png")
WIDTH = 100

_BYTES = {
    "B": 1,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
    "PiB": 1 << 50,
}
_FLOPS = {
    "FLOP": 1,
    "kFLOP": 1e3,
    "MFLOP": 1e6,
    "GFLOP": 1e9,
    "TFLOP": 1e12,
    "PFLOP": 1e15,
    "EFLOP": 1e18,
}
_EXAMPLES = """examples:
  lct plan --seq-len 1048576 --degree 64 --method auto
      a summary, with the method that training would choose
  lct plan --seq-len 65536 --degree 4 --mask document --load-balancer balanced --output plan.svg
      packed documents, as a picture
"""


def parse_documents(text: str, seq_len: int) -> list[int]:
    """Return the lengths of documents from `5000,3000,...`, or `random:SEED`.

    Random lengths are log-normal with a median of a sixteenth of the sequence; the last document is cut.
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
    """Return the mask, the mask of the batch's documents (by which `balanced` assigns) or None, and the mask's name."""
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
    """Return the case that the arguments describe."""
    if args.seq_len < args.degree:
        raise ConfigError(
            f"--seq-len {args.seq_len} gives some of --degree {args.degree} ranks no token; use a length of at least "
            f"{args.degree}, or fewer ranks"
        )
    if args.heads % args.kv_heads:
        raise ConfigError(
            f"--kv-heads {args.kv_heads} must divide --heads {args.heads}; use one of {divisors(args.heads)}"
        )
    mask, packed, mask_name = parse_mask(args.mask, args.seq_len, args.documents)
    shape = AttentionShape(1, args.heads, args.kv_heads, args.head_dim, args.bytes)
    options, reason = method_of(args, shape, mask, packed)
    layout = options.layout(args.seq_len, args.degree, packed)
    return Case(
        layout, mask, mask_name, options, args.direction or DIRECTIONS[0], shape, reason
    )


def divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


def method_of(
    args: argparse.Namespace, shape: AttentionShape, mask: Mask, packed: Mask | None
) -> tuple[ContextParallelOptions, str]:
    """Return the options of the method, and why `auto` chose it (empty if it is named)."""
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
        # As training does: with packed documents, for the batch, and on the mesh that stands before the first batch.
        masks = (causal(args.seq_len) if packed else mask,)
        return choose(
            options,
            masks,
            args.degree,
            shape,
            batch=packed,
            hybrids=packed is None,
            node=args.node,
        )
    if head_degree is not None and args.degree % head_degree:
        raise ConfigError(
            f"--head-degree {head_degree} must divide --degree {args.degree}; use one of {divisors(args.degree)}"
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


def summary(case: Case, directions: Sequence[str] = DIRECTIONS) -> str:
    """Return the summary of a case in these directions, at most 100 columns wide."""
    shape = case.shape
    layout = case.layout
    pairs = [float(x) for x in case.pairs]
    facts = {
        "method": method_in_words(case),
        "auto chose": case.reason,
        "layout": layout_in_words(case),
        "mask": f"{case.mask_name}; {100 * case.mask.area() / layout.length**2:.3g} % of the square of queries and "
        "keys is computed",
        "balance": f"compute of the busiest rank over the mean: {max(pairs) * len(pairs) / (sum(pairs) or 1):.3f}",
        "heads": f"{shape.heads:,} query and {shape.kv_heads:,} key/value heads of size {shape.head_dim:,}, "
        f"{shape.itemsize} bytes an element",
    }
    lines = [
        f"{case.options.method} on {case.ranks_named}: {layout.length:,} tokens, one layer's attention, one sequence"
    ]
    lines += [
        paragraphs(((f"  {name}", text) for name, text in facts.items()), WIDTH),
        "",
        *_table(case, directions),
    ]
    if len(case.planned) < case.degree:
        lines.append(
            f"  These numbers are of {len(case.planned)} of the ranks: the outermost and some between."
        )
    return "\n".join(lines)


def method_in_words(case: Case) -> str:
    """Return how the plan spreads attention, by what it does and not by its name."""
    group = case.head_degree
    rings = case.degree // case.head_degree
    if case.degree == 1:
        return "one rank has all heads and all tokens"
    if rings == 1:
        each = case.shape.heads // group
        return (
            f"the {group} ranks divide the heads, and each has {each:,} query head{'s' * (each > 1)} for the whole "
            "sequence"
        )
    heads = (
        f"groups of {group} ranks divide the heads" if group > 1 else "every rank has all heads"
    )
    others = "groups" if group > 1 else "ranks"
    steps = (
        max(
            len(case.stages(rank, direction))
            for rank in case.planned
            for direction in DIRECTIONS
        )
        - 1
    )
    if not steps:
        return f"{heads}; no K/V are sent, because no query sees keys of other {others}"
    way = (
        "while it computes"
        if case.options.spread.overlaps or group > 1
        else "of all others at once"
    )
    return f"{heads}; K/V of other {others} arrive in {steps:,} step{'s' * (steps > 1)}, {way}"


def layout_in_words(case: Case) -> str:
    """Return the name of the layout, and how many tokens, bytes of K/V and pieces a rank has."""
    layout = case.layout
    shape = case.shape
    lengths = [layout.local_length(rank) for rank in range(case.degree)]
    pieces = [len(ranges) for ranges in layout.ranges]
    keys = in_unit(max(lengths) * 2 * shape.kv_heads * shape.head_dim * shape.itemsize, _BYTES)
    return (
        f"{layout.name}; a rank owns {_span(lengths)} tokens ({keys} of K/V) in "
        f"{_span(pieces)} piece{'s' * (max(pieces) > 1)}"
    )


def in_unit(value: float, units: dict[str, float]) -> str:
    """Return a number in the largest unit that is not larger than it."""
    unit = [name for name, scale in units.items() if scale <= max(value, 1)][-1]
    return f"{value:,.0f} {unit}" if units[unit] == 1 else f"{value / units[unit]:,.2f} {unit}"


def _span(numbers: Sequence[int]) -> str:
    low = min(numbers)
    high = max(numbers)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _table(case: Case, directions: Sequence[str]) -> list[str]:
    in_bytes = partial(in_unit, units=_BYTES)
    rows: dict[str, tuple[Callable[[Cost], float], Callable[[float], str]]] = {
        "computes": (lambda cost: cost.flops, partial(in_unit, units=_FLOPS)),
        "sends": (lambda cost: cost.bytes_sent.total(), in_bytes),
        "receives": (lambda cost: cost.bytes_received.total(), in_bytes),
        "exchanges": (lambda cost: cost.calls.total(), "{:,.4g}".format),
        "buffers": (lambda cost: cost.workspace, in_bytes),
    }
    lines = [
        f"  {'':<11}" + "".join(f"{direction:>28}" for direction in directions),
        f"  {'a rank':<11}" + f"{'busiest':>15}{'mean':>13}" * len(directions),
    ]
    for name, (of, form) in rows.items():
        cells = [
            f"{form(most):>15}{form(mean):>13}"
            for most, mean in (busiest_and_mean(case, d, of) for d in directions)
        ]
        lines.append(f"  {name:<11}" + "".join(cells))
    stages = [max(len(case.stages(rank, d)) for rank in case.planned) for d in directions]
    return [
        *lines,
        (f"  {'stages':<11}" + "".join(f"{most:>15,}{'':>13}" for most in stages)).rstrip(),
    ]


def busiest_and_mean(
    case: Case, direction: str, of: Callable[[Cost], float]
) -> tuple[float, float]:
    """Return the most of the planned ranks, and the mean of those that stand for all."""
    most = max(of(case.costs[direction][rank]) for rank in case.planned)
    return most, fmean(of(case.costs[direction][rank]) for rank in case.middles)


def painter(args: argparse.Namespace) -> Callable[[Case, Path], None]:
    """Return the function that draws; it is imported at its use, because matplotlib is optional."""
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
        from trainer.commands.plan_picture import draw
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--output needs {error.name}: pip install {error.name}, or leave --output out"
        ) from None
    return draw


def parser() -> Parser:
    """Return the parser of the options."""
    described = Parser("plan", f"{__doc__.splitlines()[0]}\n{_EXAMPLES}")
    some = number(int, 1)
    add = described.add_argument_group("sequence and ranks").add_argument
    add("--seq-len", type=some, required=True, metavar="TOKENS", help="tokens of the sequence")
    add(
        "--degree",
        type=some,
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
        "attention, by default that of Llama 3 8B in bfloat16"
    ).add_argument
    add("--heads", type=some, default=32, metavar="N", help="query heads (32)")
    add("--kv-heads", type=some, default=8, metavar="N", help="key/value heads (8)")
    add("--head-dim", type=some, default=128, metavar="N", help="size of a head (128)")
    add("--bytes", type=some, default=2, metavar="N", help="bytes of an element of q, k, v (2)")
    add = described.add_argument_group("what is shown").add_argument
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
        type=number(int, 1),
        metavar="RANKS",
        help="with --method hybrid: ranks that divide the heads",
    )
    add(
        "--node",
        type=number(int, 1),
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
    """Print the summary, write the picture if it is asked for, and return the exit code."""
    args = parser().parse_args(argv)
    case = build(args)
    draw = None if args.output is None else painter(args)
    print(summary(case, [args.direction] if args.direction else DIRECTIONS))
    if draw is not None:
        draw(case, args.output)
        print(f"\n{args.output}")
    return 0
