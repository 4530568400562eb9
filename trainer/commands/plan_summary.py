"""A plan in a few lines, for any number of ranks: method, layout, mask, and what the busiest and the mean rank do."""

import textwrap
from collections.abc import Callable, Sequence
from statistics import fmean

from trainer.commands.plan_case import DIRECTIONS, Case
from trainer.distributed.context_parallel.planning.cost import Cost

WIDTH = 100
_BYTES = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40, "PiB": 1 << 50}
_FLOPS = {"FLOP": 1, "kFLOP": 1e3, "MFLOP": 1e6, "GFLOP": 1e9, "TFLOP": 1e12, "PFLOP": 1e15, "EFLOP": 1e18}


def summary(case: Case, directions: Sequence[str] = DIRECTIONS) -> str:
    """Return the summary of a case in these directions, at most 100 columns wide."""
    shape, layout = case.shape, case.layout
    shared = 100 * case.mask.area() / layout.length**2
    lines = [
        f"{case.options.method} on {case.ranks_named}: {layout.length:,} tokens, one layer's attention, one sequence"
    ]
    pairs = [float(x) for x in case.pairs]
    facts = [
        ("method", method_in_words(case)),
        *([("auto chose", case.reason)] if case.reason else []),
        ("layout", layout_in_words(case)),
        ("mask", f"{case.mask_name}; {shared:.3g} % of the square of queries and keys is computed"),
        ("balance", f"compute of the busiest rank over the mean: {max(pairs) * len(pairs) / (sum(pairs) or 1):.3f}"),
        (
            "heads",
            f"{shape.heads:,} query and {shape.kv_heads:,} key/value heads of size {shape.head_dim:,}, "
            f"{shape.itemsize} bytes an element",
        ),
    ]
    for name, text in facts:
        lines += _wrapped(name, text)
    lines += ["", *_table(case, directions)]
    if len(case.planned) < case.degree:
        lines.append(
            f"  Compute is of all ranks, the rest of {len(case.planned)} of them: the outermost and some between."
        )
    return "\n".join(lines)


def method_in_words(case: Case) -> str:
    """Return how the plan spreads attention, by what it does and not by its name."""
    group, rings = case.head_degree, case.degree // case.head_degree
    if case.degree == 1:
        return "one rank has all heads and all tokens"
    heads = f"groups of {group} ranks divide the heads" if group > 1 else "every rank has all heads"
    if rings == 1:
        return f"the {group} ranks divide the heads, and each has {_heads_each(case)} for the whole sequence"
    steps = max(len(case.stages(rank, direction)) for rank in case.planned for direction in DIRECTIONS) - 1
    if not steps:
        return f"{heads}; no K/V travel, because no query sees keys of other {'groups' if group > 1 else 'ranks'}"
    way = "while it computes" if case.options.spread.overlaps or group > 1 else "of all others at once"
    return (
        f"{heads}; K/V of other {'groups' if group > 1 else 'ranks'} arrive in {steps:,} step{'s' * (steps > 1)}, {way}"
    )


def layout_in_words(case: Case) -> str:
    """Return the name of the layout, and how many tokens, bytes of K/V and pieces a rank has."""
    layout, shape = case.layout, case.shape
    lengths = [layout.local_length(rank) for rank in range(case.degree)]
    row = 2 * shape.kv_heads * shape.head_dim * shape.itemsize
    tokens = _span(lengths)
    return (
        f"{layout.name}; a rank owns {tokens} tokens ({in_unit(max(lengths) * row, _BYTES)} of K/V) in "
        f"{_span([len(ranges) for ranges in layout.ranges])} piece{'s' * (max(map(len, layout.ranges)) > 1)}"
    )


def in_unit(value: float, units: dict[str, float]) -> str:
    """Return a number in the largest unit that is not larger than it."""
    unit, scale = max(
        (x for x in units.items() if x[1] <= value), key=lambda x: x[1], default=next(iter(units.items()))
    )
    return f"{value / scale:,.0f} {unit}" if scale == 1 else f"{value / scale:,.2f} {unit}"


def _heads_each(case: Case) -> str:
    heads = case.shape.heads // case.head_degree
    return f"{heads:,} query head{'s' * (heads > 1)}"


def _span(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _wrapped(name: str, text: str) -> list[str]:
    """Return `name  text` in lines; no word is cut."""
    return textwrap.wrap(
        text, WIDTH, initial_indent=f"  {name:<11}", subsequent_indent=" " * 13, break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip


def _table(case: Case, directions: Sequence[str]) -> list[str]:
    """Return rows of the busiest and of the mean rank, in each direction."""
    lines = [
        f"  {'':<11}" + "".join(f"{direction:>28}" for direction in directions),
        f"  {'a rank':<11}" + f"{'busiest':>15}{'mean':>13}" * len(directions),
    ]
    rows: list[tuple[str, Callable[[Cost], float], Callable[[float], str]]] = [
        ("sends", lambda cost: cost.bytes_sent.total(), lambda value: in_unit(value, _BYTES)),
        ("receives", lambda cost: cost.bytes_received.total(), lambda value: in_unit(value, _BYTES)),
        ("exchanges", lambda cost: cost.calls.total(), lambda value: f"{value:,.4g}"),
        ("buffers", lambda cost: cost.workspace, lambda value: in_unit(value, _BYTES)),
    ]

    def line(name: str, values: list[tuple[float, float]], form: Callable[[float], str]) -> None:
        lines.append(f"  {name:<11}" + "".join(f"{form(most):>15}{form(mean):>13}" for most, mean in values))

    line("computes", [busiest_and_mean_flops(case, d) for d in directions], lambda value: in_unit(value, _FLOPS))
    for name, of, form in rows:
        line(name, [busiest_and_mean(case, d, of) for d in directions], form)
    stages = [[float(len(case.stages(rank, d))) for rank in case.planned] for d in directions]
    lines.append(f"  {'stages':<11}" + "".join(f"{max(each):>15,.0f}{'':>13}" for each in stages).rstrip())
    return lines


def busiest_and_mean(case: Case, direction: str, of: Callable[[Cost], float]) -> tuple[float, float]:
    """Return the most of the planned ranks, and the mean of those that stand for all."""
    most = max(of(case.cost(rank, direction)) for rank in case.planned)
    return most, fmean(of(case.cost(rank, direction)) for rank in case.middles)


def busiest_and_mean_flops(case: Case, direction: str) -> tuple[float, float]:
    """Return FLOPs of the busiest and of the mean of all ranks."""
    costs = [case.cost(rank, direction).flops for rank in case.planned]
    each = sum(costs) / (sum(int(case.pairs[rank]) for rank in case.planned) or 1)  # of a pair
    return each * float(case.pairs.max()), each * float(case.pairs.mean())
