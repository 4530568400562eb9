"""The picture of `proof.py`: perplexity by position and needles before, with YaRN and after; losses of the steps."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

_SETTINGS = {"svg.hashsalt": "proof", "font.family": "DejaVu Sans", "font.size": 9, "axes.linewidth": 0.6}
MODELS = {
    "before": ("as published", "#999999"),
    "yarn": ("with YaRN", "#d55e00"),
    "after": ("with YaRN, trained", "#0072b2"),
}
"""The measured models, with label and colour."""


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
    perplexity, needles, losses = figure.subplots(1, 3, width_ratios=(1.4, 1, 0.8))
    _draw_perplexity(perplexity, result)
    _draw_needles(needles, result)
    _draw_losses(losses, result)
    return figure


def _draw_perplexity(axes: Any, result: Mapping[str, Any]) -> None:
    for name, (label, color) in MODELS.items():
        rows = result[name]["positions"]
        ends = [row["last"] / 1024 for row in rows]
        axes.plot(ends, [row["perplexity"] for row in rows], "o-", markersize=3, color=color, label=label)
    axes.axvline(result["size"]["positions"] / 1024, color="black", linewidth=0.6, linestyle=":")
    axes.set(yscale="log", xlabel="position, thousands of tokens", title="perplexity by position")
    axes.legend(frameon=False)


def _draw_needles(axes: Any, result: Mapping[str, Any]) -> None:
    lengths = result["size"]["needle_lengths"]
    width = 0.8 / len(MODELS)
    for i, (name, (_, color)) in enumerate(MODELS.items()):
        cells = result[name]["needle"]
        for place, length in enumerate(lengths):
            shares = [cell["accuracy"] for cell in cells if cell["length"] == length]
            share = sum(shares) / len(shares)
            axes.bar(place + (i - 1) * width, share, width, color=color)
    names = [f"{length // 1024}k" if length >= 1024 else str(length) for length in lengths]
    axes.set_xticks(range(len(lengths)), names)
    axes.set(ylim=(0, 1.05), xlabel="tokens of the prompt", title="needles found")


def _draw_losses(axes: Any, result: Mapping[str, Any]) -> None:
    for (ranks, losses), marker in zip(result["equal_losses"].items(), "sxo", strict=True):
        label = f"{ranks} ranks" if ranks != "1" else "one rank"
        axes.plot(range(1, len(losses) + 1), losses, marker, mfc="none", label=label)
    axes.set_xticks(range(1, len(losses) + 1))
    axes.set(xlabel="step", title="loss in float32")
    axes.legend(frameon=False)
