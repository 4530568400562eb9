"""The summary that `lct plan` prints: method, layout, balance, and the costs of a rank. Torch-free."""

from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean

from lct_tools.plan_case import DIRECTIONS, Case
from longshard.context.planning.cost import Cost
from trainer.runtime.console import paragraphs

WIDTH = 100

_BYTES = {f"{prefix}B": 1024**i for i, prefix in enumerate(("", "Ki", "Mi", "Gi", "Ti", "Pi"))}
_FLOPS = {f"{prefix}FLOP": 1000**i for i, prefix in enumerate(("", *"kMGTPE"))}


def summary(case: Case, directions: Sequence[str] = DIRECTIONS) -> str:
    """Return the summary of a case as text, at most 100 columns wide.

    Args:
        case: The case.
        directions: The directions to show, of "forward" and "backward".
    """
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
    """Return in words how the plan divides attention among the ranks, without the name of the method.

    Args:
        case: The case.
    """
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
    """Return in words the layout, and the numbers of tokens, bytes of K/V and pieces that a rank owns.

    Args:
        case: The case.
    """
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
    """Return a number as text, in the largest unit that is not larger than the number.

    Args:
        value: The number.
        units: Name of each unit -> its size, from the smallest, which is 1.
    """
    unit = [name for name, scale in units.items() if scale <= max(value, 1)][-1]
    return f"{value:,.0f} {unit}" if units[unit] == 1 else f"{value / units[unit]:,.2f} {unit}"


def _span(numbers: Sequence[int]) -> str:
    low = min(numbers)
    high = max(numbers)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _table(case: Case, directions: Sequence[str]) -> list[str]:
    in_bytes = partial(in_unit, units=_BYTES)
    rows = {
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
    for name, (quantity, form) in rows.items():
        cells = [
            f"{form(most):>15}{form(mean):>13}"
            for most, mean in (busiest_and_mean(case, d, quantity) for d in directions)
        ]
        lines.append(f"  {name:<11}" + "".join(cells))
    stages = [max(len(case.stages(rank, d)) for rank in case.planned) for d in directions]
    return [
        *lines,
        (f"  {'stages':<11}" + "".join(f"{most:>15,}{'':>13}" for most in stages)).rstrip(),
    ]


def busiest_and_mean(
    case: Case, direction: str, quantity: Callable[[Cost], float]
) -> tuple[float, float]:
    """Return the maximum of a cost over the planned ranks, and its mean over the ranks of the sample.

    Args:
        case: The case.
        direction: "forward" or "backward".
        quantity: Returns the number to compare, from the cost of a rank.
    """
    most = max(quantity(case.costs[direction][rank]) for rank in case.planned)
    return most, fmean(quantity(case.costs[direction][rank]) for rank in case.middles)
