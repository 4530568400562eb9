"""The picture of `proof.py`: losses on four ranks and on one, and needles by depth and length, before and after."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

_SETTINGS = {"svg.hashsalt": "proof", "font.family": "DejaVu Sans", "font.size": 9, "axes.linewidth": 0.6}


def draw(result: Mapping[str, Any], output: Path) -> None:
    """Write the picture. The same numbers give the same file.

    Args:
        result: The numbers of `proof.py`.
        output: The file; its ending chooses SVG or PNG.
    """
    metadata = {"Date": None, "Creator": None} if output.suffix == ".svg" else {"Software": None}
    with matplotlib.rc_context(_SETTINGS):
        picture(result).savefig(output, dpi=160, metadata=metadata, facecolor="white")


def picture(result: Mapping[str, Any]) -> Figure:
    """Return the figure.

    Args:
        result: The numbers of `proof.py`.
    """
    figure = Figure(figsize=(9.7, 3.2), layout="constrained")
    curve, *maps = figure.subplots(1, 3, width_ratios=(1.25, 1, 1))
    size = result["size"]
    long = result["long_losses"]
    one = result["one_rank_losses"]
    curve.plot(range(1, len(long) + 1), long, color="#0072b2", label=f"{size['context_parallel']} ranks a sequence")
    curve.plot(range(1, len(one) + 1), one, "o", mfc="none", color="#d55e00", label="one rank")
    curve.set(xlabel="step", ylabel="loss", title=f"{size['seq_len'] * size['factor']:,} tokens, with YaRN")
    curve.legend(frameon=False)
    names = (("before", "right answers before"), ("after", "right answers after"))
    for axes, (name, title) in zip(maps, names, strict=True):
        _heat_map(axes, result[name], title)
    maps[0].set_ylabel("depth of the needle")
    return figure


def _heat_map(axes: Any, cells: list[dict[str, float]], title: str) -> None:
    lengths = sorted({cell["length"] for cell in cells})
    depths = sorted({cell["depth"] for cell in cells})
    share = {(cell["depth"], cell["length"]): cell["accuracy"] for cell in cells}
    axes.imshow([[share[d, n] for n in lengths] for d in depths], vmin=0, vmax=1, cmap="Greens", aspect="auto")
    for row, depth in enumerate(depths):
        for column, length in enumerate(lengths):
            value = share[depth, length]
            color = "white" if value > 0.6 else "black"
            axes.text(column, row, f"{value:.0%}", ha="center", va="center", color=color, fontsize=8)
    names = [f"{length // 1024}k" if length >= 1024 else str(length) for length in lengths]
    axes.set_xticks(range(len(lengths)), names)
    axes.set_yticks(range(len(depths)), [f"{depth:g}%" for depth in depths])
    axes.set(xlabel="tokens of the prompt", title=title)
