"""Draw a plan: the square of queries and keys by rank and stage, and who owns the sequence. See plan.py."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch, Rectangle
from matplotlib.path import Path as Outline

from trainer.commands.plan_case import Case
from trainer.distributed.context_parallel.planning.mask import ANY, Band
from trainer.distributed.context_parallel.planning.plan import Stage
from trainer.distributed.context_parallel.planning.tiles import Tile
from trainer.distributed.sharding.ranges import Range, Ranges

Color = tuple[float, ...]
Point = tuple[float, float]

_SETTINGS = {"svg.hashsalt": "plan", "font.family": "DejaVu Sans", "font.size": 9, "axes.linewidth": 0.6}
# Of Okabe and Ito: the colour-blind can distinguish them, too.
_RANKS = ("#e69f00", "#56b4e9", "#009e73", "#cc79a7", "#f0e442", "#0072b2", "#d55e00", "#999999")
_GREY = (0.8, 0.8, 0.8)
_FEW = 16
"""Up to so many ranks have a line of numbers each; more have a chart."""
_MOST_OUTLINES = 3000
"""More fields are drawn as an image inside the file, which would take megabytes otherwise."""
_SMALLEST_LABEL = 0.05
"""A piece whose width or height is less than this share of the sequence gets no number."""


def draw(case: Case, output: Path) -> None:
    """Write the picture, SVG or PNG by the file's ending; the same case gives the same file."""
    with matplotlib.rc_context(_SETTINGS):
        # No date, and no version of the program that drew it. White behind all, so that it can be read on any page.
        metadata = {"Date": None, "Creator": None} if output.suffix == ".svg" else {"Software": None}
        picture(case).savefig(output, dpi=160, metadata=metadata, facecolor="white")


def picture(case: Case) -> Figure:
    """Return the figure: the square with strips of owners on the left, the ranks' numbers on the right."""
    width, height, side = 9.7, 6.05, 4.7  # inches
    strip, gap, left, bottom = 0.15, 0.04, 0.75, 0.15
    with matplotlib.rc_context(_SETTINGS):
        figure = Figure(figsize=(width, height))

        def place(x: float, y: float, w: float, h: float) -> Axes:
            return figure.add_axes((x / width, y / height, w / width, h / height))

        inner = left + strip + gap
        _draw_square(place(inner, bottom, side, side), case)
        _draw_owners(place(left, bottom, strip, side), case, is_upright=True)
        _draw_owners(place(inner, bottom + side + gap, side, strip), case, is_upright=False)
        right = inner + side
        if case.degree <= _FEW:
            _draw_stages(place(right, bottom, width - right, side), case)
        else:
            chart = place(right + 0.85, bottom + 1.1, 1.5, side - 1.6)
            loads = [place(right + x, bottom + 1.1, 0.5, side - 1.6) for x in (2.45, 3.05)]
            _draw_chart(chart, loads, case)
        for text, y, size in ((_title(case), 0.985, 11), (f"{case.mask_name}, {case.layout.name} layout", 0.945, 9)):
            figure.text(left / width, y, text, ha="left", va="top", fontsize=size)
    return figure


def _title(case: Case) -> str:
    return f"{case.options.method}, {case.direction}: {case.layout.length:,} tokens on {case.ranks_named}"


def _draw_square(axes: Axes, case: Case) -> None:
    seq_len = case.layout.length
    fields: list[tuple[Color, int, list[list[Point]]]] = []
    for r in range(0, case.degree, case.head_degree):  # ranks of a head group compute the same pairs, for other heads
        for number, stage in enumerate(case.stages(r)):
            bands = [band for tile in stage.tiles for band in bands_of(case, r, stage, tile)]
            outlines = [outline for band in bands if len(outline := polygon(band)) > 2]
            if outlines:
                fields.append((_stage_color(case, r, number), number, outlines))
    is_image = sum(len(outlines) for *_, outlines in fields) > _MOST_OUTLINES
    for color, number, outlines in fields:
        _fill(axes, outlines, color, linewidth=0 if is_image else 0.12, is_image=is_image)
        for outline in outlines:
            x, y = zip(*outline, strict=True)
            is_large = min(max(x) - min(x), max(y) - min(y)) >= _SMALLEST_LABEL * seq_len
            if is_large and case.head_degree < case.degree and case.degree <= _FEW:
                middle = sum(x) / len(x), sum(y) / len(y)
                axes.text(*middle, str(number), ha="center", va="center", fontsize=8, color=_ink(color))
    axes.set(xlim=(0, seq_len), ylim=(seq_len, 0), xticks=[], yticks=[])


def _fill(
    axes: Axes, outlines: Sequence[Sequence[Point]], color: Color, *, linewidth: float, is_image: bool = False
) -> None:
    """Many polygons as one path, which keeps the file small."""
    whole = Outline.make_compound_path(*(Outline([*corners, corners[0]], closed=True) for corners in outlines))
    patch = PathPatch(whole, facecolor=color, edgecolor="white", linewidth=linewidth, rasterized=is_image)
    axes.add_artist(patch)  # add_patch would walk all corners to find the limits, which are set


def bands_of(case: Case, rank: int, stage: Stage, tile: Tile) -> Iterator[Band]:
    """Yield a tile in tokens of the sequence: one band for each piece of its queries and of its keys."""
    between = tile.kv[1] - tile.kv[0] - (tile.q[1] - tile.q[0])
    for q_place, q_start, q_stop in _pieces(tile.q, case.queries(rank)):
        for kv_place, kv_start, kv_stop in _pieces(tile.kv, stage.held):
            # Where place j - place i is 0, in tokens.
            diagonal = kv_start - q_start - (kv_place - tile.kv[0]) + (q_place - tile.q[0])
            lower = diagonal if tile.relation.lower else -ANY
            upper = diagonal + between if tile.relation.upper else ANY
            band = Band(q_start, q_stop, kv_start, kv_stop, lower, upper)
            if len(range(*band.hull(q_start, q_stop))):
                yield band


def _pieces(places: Range, ranges: Ranges) -> Iterator[tuple[int, int, int]]:
    """Yield (place, start, stop) of the numbers at `places`, if the ranges are laid one after another."""
    before = 0
    for start, stop in ranges:
        first, last = max(places[0], before), min(places[1], before + stop - start)
        if first < last:
            yield first, start + first - before, start + last - before
        before += stop - start
        if before >= places[1]:
            return


def polygon(band: Band) -> list[Point]:
    """Corners (key, query) of what a band shows, its stairs smoothed to lines; fewer than three if nothing."""
    q_start, q_stop, kv_start, kv_stop, lower, upper = map(float, band)
    corners = [(kv_start, q_start), (kv_stop, q_start), (kv_stop, q_stop), (kv_start, q_stop)]
    for sign, bound in ((1, upper), (-1, -lower)):
        if bound < ANY:
            corners = _clipped(corners, sign, bound + 0.5)
    return corners


def _clipped(corners: list[Point], sign: int, bound: float) -> list[Point]:
    """The part of a convex polygon with sign * (x - y) <= bound."""
    kept = []
    for a, b in zip(corners, [*corners[1:], *corners[:1]], strict=True):
        over_a, over_b = (sign * (x - y) - bound for x, y in (a, b))
        if over_a <= 0:
            kept.append(a)
        if over_a * over_b < 0:
            share = over_a / (over_a - over_b)
            kept.append((a[0] + share * (b[0] - a[0]), a[1] + share * (b[1] - a[1])))
    return kept


def _draw_owners(axes: Axes, case: Case, *, is_upright: bool) -> None:
    """Who owns which tokens; queries run down, keys to the right."""
    seq_len = case.layout.length
    for r in range(case.degree):
        outlines = []
        for start, stop in case.layout.ranges[r]:
            corners = [(0, start), (1, start), (1, stop), (0, stop)]
            outlines.append(corners if is_upright else [(y, x) for x, y in corners])
        if outlines:
            _fill(axes, outlines, rank_color(case, r), linewidth=0)
    ticks = [seq_len * i // 4 for i in range(5)]
    if is_upright:
        axes.set(xlim=(0, 1), ylim=(seq_len, 0), xticks=[], yticks=ticks, yticklabels=_tokens(ticks))
        axes.set_ylabel("query", labelpad=2)
    else:
        axes.set(xlim=(0, seq_len), ylim=(0, 1), yticks=[], xticks=ticks, xticklabels=_tokens(ticks))
        axes.tick_params(top=True, labeltop=True, bottom=False, labelbottom=False)
        axes.set_xlabel("key", labelpad=5)
        axes.xaxis.set_label_position("top")


def _tokens(numbers: Sequence[int]) -> list[str]:
    """Short names of positions: 48k is 48 * 1024."""
    return [f"{n >> 10}k" if n and not n % 1024 else f"{n:,}" for n in numbers]


def _draw_stages(axes: Axes, case: Case) -> None:
    """A legend with numbers: each rank's visible pairs at each stage, as a share of the mean rank's, and what it sends.

    One unit is the width of all stages together across, and one rank's row down.
    """
    stages = max(len(case.stages(r)) for r in range(case.degree))
    has_text = stages <= 8
    mean = float(case.pairs.mean()) or 1
    for r in range(case.degree):
        axes.text(-0.09, r + 0.5, f"rank {r}", ha="right", va="center", fontsize=8)
        axes.add_patch(Rectangle((-0.065, r + 0.25), 0.035, 0.5, facecolor=rank_color(case, r)))
        for number, stage in enumerate(case.stages(r)):
            color = _stage_color(case, r, number)
            corner = number / stages, r
            axes.add_patch(Rectangle(corner, 1 / stages, 1, facecolor=color, edgecolor="white", linewidth=0.8))
            if has_text:
                share, middle = f"{100 * stage.pairs / mean:.0f}", ((number + 0.5) / stages, r + 0.5)
                axes.text(*middle, share, ha="center", va="center", fontsize=7, color=_ink(color))
        for x, text in ((1.2, f"{100 * case.pairs[r] / mean:.1f}"), (1.55, f"{_sent(case, r):,.1f}")):
            axes.text(x, r + 0.5, text, ha="right", va="center", fontsize=8)
    for number in range(stages):
        if has_text or number in (0, stages - 1):
            axes.text((number + 0.5) / stages, -0.15, str(number), ha="center", fontsize=8)
    heads = [(0.5, "pairs at stage" + ", % of the mean" * has_text, "center", -0.75)]
    for x, text, align, y in (*heads, (1.2, "all, %", "right", -0.15), (1.55, "sends,\nMiB", "right", -0.15)):
        axes.text(x, y, text, ha=align, fontsize=8)
    axes.text(0, case.degree + 0.6, _caption(case), ha="left", va="top", fontsize=8)
    # Rows of one height, unless there are too many ranks.
    axes.set(xlim=(-0.38, 1.6), ylim=(max(case.degree + 4, 14), -1.2))
    axes.axis("off")


def _draw_chart(axes: Axes, loads: Sequence[Axes], case: Case) -> None:
    """Charts for many ranks, which run down: the pairs of each stage as darkness, and two profiles."""
    stages = max(len(case.stages(r)) for r in range(case.degree))
    share = np.zeros((case.degree, stages))
    for r in range(case.degree):
        share[r, : len(case.stages(r))] = [stage.pairs for stage in case.stages(r)]
    image = np.ones((case.degree, stages, 3))
    for r in range(case.degree):
        color = np.array(rank_color(case, r))
        image[r] -= (1 - color) * (share[r] / (share.max() or 1))[:, None]
    axes.imshow(image, aspect="auto", interpolation="nearest", extent=(0, stages, case.degree, 0))
    for r in range(case.degree):  # the legend of colours
        axes.add_patch(Rectangle((-0.09 * stages, r), 0.06 * stages, 1, facecolor=rank_color(case, r), clip_on=False))
    ranks = [*range(0, case.degree - case.degree // 16, max(case.degree // 8, 1)), case.degree - 1]
    ticks = sorted({0, stages - 1})
    axes.set(yticks=[r + 0.5 for r in ranks], yticklabels=[f"rank {r}" for r in ranks])
    axes.set(
        xticks=[stage + 0.5 for stage in ticks], xticklabels=[str(stage) for stage in ticks], title="pairs at stage"
    )
    axes.tick_params(length=0, labelsize=8, pad=4)
    axes.tick_params(axis="y", pad=14)
    axes.title.set_fontsize(8)
    mean = float(case.pairs.mean()) or 1
    columns = [100 * pairs / mean for pairs in case.pairs], [_sent(case, r) for r in range(case.degree)]
    for load, values, title in zip(loads, columns, ("pairs, % of\nthe mean", "sends,\nMiB"), strict=True):
        most = max(values) or 1
        load.barh([r + 0.5 for r in range(case.degree)], values, height=1, color="#888888")
        load.set(ylim=(case.degree, 0), xlim=(0, 1.05 * most), yticks=[], xticks=[most], xticklabels=[f"{most:,.0f}"])
        load.tick_params(length=2, labelsize=8)
        load.set_title(title, fontsize=8)
        load.spines[["top", "right"]].set_visible(False)
    axes.text(-0.09 * stages, 1.1 * case.degree, _caption(case), ha="left", va="top", fontsize=8)


def _sent(case: Case, rank: int) -> float:
    return case.cost(rank, case.direction).bytes_sent.total() / 2**20


def _caption(case: Case) -> str:
    caption = "Square: which rank computes what"
    if case.head_degree > 1:
        each = f"each with {case.shape.heads // case.head_degree} of {case.shape.heads} heads."
        caption = f"Square: {case.head_degree} ranks compute the same,\n{each}"
    elif case.degree <= _FEW:
        caption += ",\nnumber and shade: at which stage."
    else:
        caption += ".\nEvery second rank is lighter."
    return caption + "\nStrips: which rank owns the tokens."


def rank_color(case: Case, rank: int) -> Color:
    """Return a colour of its own for each of a few ranks; of many, neighbours differ in lightness."""
    if case.degree <= len(_RANKS):
        return to_rgb(_RANKS[rank])
    red, green, blue, _ = matplotlib.colormaps["turbo"](0.05 + 0.9 * rank / (case.degree - 1))
    white = 0.4 * (rank % 2)
    return tuple(float(part + white * (1 - part)) for part in (red, green, blue))


def _stage_color(case: Case, rank: int, stage: int) -> Color:
    """Return the colour of a rank, or of the first rank of its head group; of few ranks lighter with each stage."""
    if case.head_degree == case.degree > 1:
        return _GREY  # nobody's
    white = 0.75 * stage / max(len(case.stages(rank)) - 1, 1) * (case.degree <= _FEW)
    rgb = rank_color(case, rank - rank % case.head_degree)
    return tuple(float(part + white * (1 - part)) for part in rgb)


def _ink(color: Color) -> str:
    """Black, or white on what is dark."""
    red, green, blue = color
    return "black" if 0.3 * red + 0.59 * green + 0.11 * blue > 0.42 else "white"
