"""Draw a plan: the square of queries and keys by rank and stage, and the owner of each token. See plan.py."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from lct_tools.plan_case import Case
from longshard.context.planning.plan import Stage
from longshard.sharding.ranges import Ranges

Color = tuple[float, ...]

_SETTINGS = {
    "svg.hashsalt": "plan",
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.linewidth": 0.6,
}
# The palette of Okabe and Ito, which colour-blind readers can distinguish too.
_RANKS = (
    "#e69f00",
    "#56b4e9",
    "#009e73",
    "#cc79a7",
    "#f0e442",
    "#0072b2",
    "#d55e00",
    "#999999",
)
_GREY = (0.8, 0.8, 0.8)
_FEW = 16
"""Largest number of ranks whose stages have numbers and shades. With more ranks, a darker field has more pairs."""
_SIDE = 720
"""Largest number of tokens that the square shows. They are evenly spaced over the sequence."""


def draw(case: Case, output: Path) -> None:
    """Write the picture. The same case gives the same file.

    Args:
        case: The case.
        output: The file; its ending chooses SVG or PNG.
    """
    with matplotlib.rc_context(_SETTINGS):
        # No date and no version of matplotlib. A white background can be read on any page.
        metadata = (
            {"Date": None, "Creator": None} if output.suffix == ".svg" else {"Software": None}
        )
        picture(case).savefig(output, dpi=160, metadata=metadata, facecolor="white")


def picture(case: Case) -> Figure:
    """Return the figure: on the left the square with strips of owners, on the right the load of each rank.

    Args:
        case: The case.
    """
    width, height, side = 9.7, 6.05, 4.7  # inches
    strip, gap, left, bottom = 0.15, 0.04, 0.75, 0.15
    with matplotlib.rc_context(_SETTINGS):
        figure = Figure(figsize=(width, height))

        def place(x: float, y: float, w: float, h: float) -> Axes:
            return figure.add_axes((x / width, y / height, w / width, h / height))

        inner = left + strip + gap
        right = left + strip + gap + side
        upright = place(left, bottom, strip, side)
        across = place(inner, bottom + side + gap, side, strip)
        _draw_square(place(inner, bottom, side, side), upright, across, case)
        chart = place(right + 0.85, bottom + 1.1, 1.5, side - 1.6)
        loads = [place(right + x, bottom + 1.1, 0.5, side - 1.6) for x in (2.45, 3.05)]
        _draw_chart(chart, loads, case)
        title = f"{case.options.method}, {case.direction}: {case.layout.length:,} tokens on {case.ranks_named}"
        for text, y, size in (
            (title, 0.985, 11),
            (f"{case.mask_name}, {case.layout.name} layout", 0.945, 9),
        ):
            figure.text(left / width, y, text, ha="left", va="top", fontsize=size)
    return figure


def places_of(tokens: np.ndarray, ranges: Ranges) -> np.ndarray:
    """Return the index of each token in the concatenation of the ranges; -1 outside of all ranges.

    Args:
        tokens: Tokens of the sequence, (N,).
        ranges: Ranges of tokens.
    """
    places = np.full(len(tokens), -1)
    before = 0
    for start, stop in ranges:
        inside = (start <= tokens) & (tokens < stop)
        places[inside] = tokens[inside] - start + before
        before += stop - start
    return places


def areas_of(
    case: Case, rank: int, stage: Stage, tokens: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the visible pairs of each tile of a stage: the queries and the keys of M pairs, two arrays, (M,).

    Both hold indices into `tokens`.

    Args:
        case: The case.
        rank: The rank.
        stage: The stage.
        tokens: Tokens of the sequence, (N,). Other queries and keys are left out.
    """
    queries = places_of(tokens, case.queries(rank))
    keys = places_of(tokens, stage.held)
    for tile in stage.tiles:
        rows, columns = (
            np.flatnonzero((start <= places) & (places < stop))
            for places, (start, stop) in ((queries, tile.q), (keys, tile.kv))
        )
        distance = (keys[columns] - tile.kv[0]) - (queries[rows] - tile.q[0])[:, None]
        most = tile.kv[1] - tile.kv[0] - (tile.q[1] - tile.q[0])
        seen = (distance >= 0) | (not tile.relation.lower)
        seen &= (distance <= most) | (not tile.relation.upper)
        row, column = np.nonzero(seen)
        yield rows[row], columns[column]


def _draw_square(axes: Axes, upright: Axes, across: Axes, case: Case) -> None:
    """Draw which rank computes which pairs, and strips of owners. Queries run down, keys to the right.

    axes: of the square. upright, across: of the strips with the owners of queries, and of keys.
    """
    seq_len = case.layout.length
    side = min(seq_len, _SIDE)
    tokens = (2 * np.arange(side) + 1) * seq_len // (2 * side)
    image = np.ones((side, side, 3))
    owners = np.ones((side, 3))
    # The ranks of a head group compute the same pairs for different heads.
    for r in range(0, case.degree, case.head_degree):
        for number, stage in enumerate(case.stages(r)):
            for area in areas_of(case, r, stage, tokens):
                image[area] = _stage_color(case, r, number)
    for r in range(case.degree):
        owners[places_of(tokens, case.layout.ranges[r]) >= 0] = rank_color(case, r)
    ticks = [seq_len * i // 4 for i in range(5)]
    # 48k is 48 * 1024
    names = [f"{n >> 10}k" if n and not n % 1024 else f"{n:,}" for n in ticks]
    for place, pixels in ((axes, image), (upright, owners[:, None]), (across, owners[None])):
        place.imshow(
            pixels, aspect="auto", interpolation="nearest", extent=(0, seq_len, seq_len, 0)
        )
        place.set(xticks=[], yticks=[])
    upright.set(yticks=ticks, yticklabels=names)
    upright.set_ylabel("query", labelpad=2)
    across.set(xticks=ticks, xticklabels=names)
    across.tick_params(top=True, labeltop=True, bottom=False, labelbottom=False)
    across.set_xlabel("key", labelpad=5)
    across.xaxis.set_label_position("top")


def _draw_chart(axes: Axes, loads: Sequence[Axes], case: Case) -> None:
    """Draw the pairs of each stage, relative to the mean rank's total, and the sent bytes. Ranks run down."""
    degree = case.degree
    few = degree <= _FEW
    pairs = [[stage.pairs for stage in case.stages(r)] for r in range(degree)]
    stages = max(map(len, pairs))
    mean = float(case.pairs.mean()) or 1
    share = np.zeros((degree, stages))
    for r, own in enumerate(pairs):
        share[r, : len(own)] = np.array(own) / mean
    image = np.ones((degree, stages, 3))
    for r, number in np.ndindex(degree, stages):
        color = np.array(rank_color(case, r))
        weight = share[r, number] / (share.max() or 1)
        image[r, number] = _stage_color(case, r, number) if few else 1 - (1 - color) * weight
        if few and stages <= 8 and number < len(pairs[r]):
            text = f"{100 * share[r, number]:.0f}"
            _number(axes, number + 0.5, r, text, _ink(image[r, number]))
    axes.imshow(image, aspect="auto", interpolation="nearest", extent=(0, stages, degree, 0))
    for r in range(degree):  # the legend of colours
        axes.add_patch(
            Rectangle(
                (-0.09 * stages, r),
                0.06 * stages,
                1,
                facecolor=rank_color(case, r),
                clip_on=False,
            )
        )
    ranks = (
        [*range(degree)] if few else [*range(0, degree - degree // 16, degree // 8), degree - 1]
    )
    ticks = [*range(stages)] if few and stages <= 8 else sorted({0, stages - 1})
    axes.set(
        yticks=[r + 0.5 for r in ranks],
        yticklabels=[f"rank {r}" for r in ranks],
        xticks=[stage + 0.5 for stage in ticks],
        xticklabels=map(str, ticks),
        title="pairs at stage",
    )
    axes.tick_params(length=0, labelsize=8, pad=4)
    axes.tick_params(axis="y", pad=14)
    _draw_loads(loads, case, few=few)
    axes.text(-0.09 * stages, 1.1 * degree, _caption(case), ha="left", va="top", fontsize=8)


def _draw_loads(loads: Sequence[Axes], case: Case, *, few: bool) -> None:
    """Draw a bar for each rank: all of its pairs, and the bytes that it sends.

    loads: axes of the pairs, and of the bytes. few: whether each bar has its value written on it.
    """
    degree = case.degree
    mean = float(case.pairs.mean()) or 1
    sent = [case.costs[case.direction][r].bytes_sent.total() / 2**20 for r in range(degree)]
    columns = (100 * case.pairs / mean, "pairs, % of\nthe mean"), (sent, "sends,\nMiB")
    for load, (values, title) in zip(loads, columns, strict=True):
        most = max(values) or 1
        load.barh([r + 0.5 for r in range(degree)], values, height=1, color="#cccccc")
        load.set(
            ylim=(degree, 0),
            xlim=(0, 1.05 * most),
            yticks=[],
            xticks=[most],
            xticklabels=[f"{most:,.0f}"],
        )
        load.tick_params(length=2, labelsize=8)
        load.set_title(title, fontsize=8)
        load.spines[["top", "right"]].set_visible(False)
        for r, value in enumerate(values) if few else ():
            _number(load, most / 2, r, f"{value:,.1f}", "black")


def _number(axes: Axes, x: float, row: int, text: str, color: str) -> None:
    axes.text(x, row + 0.5, text, ha="center", va="center", fontsize=7, color=color)


def _caption(case: Case) -> str:
    caption = "Square: which rank computes what"
    if case.head_degree > 1:
        each = f"each with {case.shape.heads // case.head_degree} of {case.shape.heads} heads."
        caption = f"Square: {case.head_degree} ranks compute the same,\n{each}"
    elif case.degree <= _FEW:
        caption += ",\nlater stages lighter."
    else:
        caption += ".\nEvery second rank is lighter."
    return caption + "\nStrips: which rank owns the tokens."


def rank_color(case: Case, rank: int) -> Color:
    """Return the colour of a rank: distinct for a few ranks; for many ranks neighbours differ in lightness.

    Args:
        case: The case.
        rank: The rank.
    """
    if case.degree <= len(_RANKS):
        return to_rgb(_RANKS[rank])
    red, green, blue, _ = matplotlib.colormaps["turbo"](0.05 + 0.9 * rank / (case.degree - 1))
    return _lighter((red, green, blue), 0.4 * (rank % 2))


def _stage_color(case: Case, rank: int, stage: int) -> Color:
    """Return the colour of the first rank of a rank's head group; for few ranks lighter with each stage.

    It is grey if one head group has all ranks.
    """
    if case.head_degree == case.degree > 1:
        return _GREY  # nobody's
    white = 0.75 * stage / max(len(case.stages(rank)) - 1, 1) * (case.degree <= _FEW)
    return _lighter(rank_color(case, rank - rank % case.head_degree), white)


def _lighter(color: Color, white: float) -> Color:
    return tuple(float(part + white * (1 - part)) for part in color)


def _ink(color: Color) -> str:
    """Return black, or white on a dark colour."""
    red, green, blue = color
    return "black" if 0.3 * red + 0.59 * green + 0.11 * blue > 0.42 else "white"
