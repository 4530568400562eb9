"""What an evaluation found, as tables, JSON, CSV and pictures. Torch-free; pictures need matplotlib."""

import csv
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.config.errors import ConfigError
from trainer.config.writable import is_writable, nearest_existing, writable_folder
from trainer.runtime.full_disk import full_disk

if TYPE_CHECKING:
    from trainer.tasks.evaluation import Bucket


@dataclass(frozen=True)
class Cell:
    """The answers to the prompts of one length and depth; log_probability: mean of a token of the answers."""

    length: int
    depth: float
    prompts: int
    accuracy: float
    log_probability: float


@dataclass(frozen=True)
class Findings:
    """What was measured; a task that was not asked for has nothing."""

    settings: dict[str, Any]
    positions: "Sequence[Bucket]" = ()
    needle: Sequence[Cell] = ()


def rows_of(findings: Findings) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each task's table, by the name of its file."""
    finite = [bucket.perplexity if math.isfinite(bucket.perplexity) else None for bucket in findings.positions]
    positions = [asdict(bucket) | {"perplexity": p} for bucket, p in zip(findings.positions, finite, strict=True)]
    tables = {"positions": positions, "needle": [asdict(cell) for cell in findings.needle]}
    return {name: rows for name, rows in tables.items() if rows}


def tables(findings: Findings) -> str:
    """Return the tables that are printed."""
    lines = []
    if findings.positions:
        lines += ["positions                  tokens       loss  perplexity"]
        for bucket in findings.positions:
            place = f"{bucket.first:,} to {bucket.last - 1:,}"
            lines.append(f"{place:22}{bucket.tokens:11,}{bucket.loss:11.4f}{bucket.perplexity:12.2f}")
    if findings.needle:
        lengths, depths = _axes(findings.needle)
        lines += [""] * bool(lines) + ["needle: share of right answers, and log-probability of a token, by depth"]
        lines.append("length    " + "".join(f"{f'{depth:g} %':>16}" for depth in depths))
        cells = {(cell.length, cell.depth): cell for cell in findings.needle}
        for length in lengths:
            row = (cells[length, depth] for depth in depths)
            shown = "".join(f"{f'{cell.accuracy:.0%}  {cell.log_probability:7.2f}':>16}" for cell in row)
            lines.append(f"{length:<10,}{shown}")
    return "\n".join(lines)


def write(findings: Findings, folder: Path) -> list[str]:
    """Write evaluation.json, and a CSV file and a picture for each task; return lines that say what was written.

    Raises:
        ConfigError: the folder cannot be written to.
    """
    try:
        _write_files(findings, folder)
        _draw(findings, folder)
    except ModuleNotFoundError as error:
        package = (error.name or "matplotlib").partition(".")[0]
        return [str(folder), f"note: there is no picture: it needs {package} (pip install {package})"]
    except OSError as error:
        reason = full_disk(error, nearest_existing(folder)) or error.strerror or str(error)
        raise ConfigError(f"--output {folder} cannot be written ({reason}); make room, or name another") from None
    return [str(folder)]


def _write_files(findings: Findings, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    found = rows_of(findings)
    content = {"settings": findings.settings, **found}
    (folder / "evaluation.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    for name, rows in found.items():
        with (folder / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)


def check_output(folder: Path) -> None:
    """Check that the folder can be written to, before the work.

    Raises:
        ConfigError: a file is in its place, or this user may not write there.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--output {folder} is a file; name a folder")
    if not is_writable(folder):
        raise ConfigError(
            f"--output {folder} cannot be written by this user; name a folder that can{writable_folder(folder)}"
        )


def _axes(cells: Sequence[Cell]) -> tuple[list[int], list[float]]:
    return sorted({cell.length for cell in cells}), sorted({cell.depth for cell in cells})


def _draw(findings: Findings, folder: Path) -> None:
    """Draw positions.png, the loss over the position, and needle.png, accuracy over length and depth."""
    from matplotlib.figure import Figure

    if findings.positions:
        figure = Figure(figsize=(6, 4), layout="constrained")
        axes = figure.subplots()
        edges = [findings.positions[0].first, *(bucket.last for bucket in findings.positions)]
        axes.stairs([bucket.loss for bucket in findings.positions], edges, baseline=None, linewidth=2)
        first = findings.positions[0].last
        axes.set_xscale("symlog", base=2, linthresh=first)
        axes.set_xticks(edges, [f"{edge:,}" for edge in edges], rotation=45)
        axes.minorticks_off()
        axes.set(xlabel="position (tokens)", ylabel="mean loss of a token", xlim=(0, edges[-1]))
        axes.grid(alpha=0.3)
        figure.savefig(folder / "positions.png", dpi=110, facecolor="white")
    if findings.needle:
        lengths, depths = _axes(findings.needle)
        cells = {(cell.length, cell.depth): cell.accuracy for cell in findings.needle}
        grid = [[cells[length, depth] for length in lengths] for depth in depths]
        figure = Figure(figsize=(2.5 + 0.7 * len(lengths), 2 + 0.45 * len(depths)), layout="constrained")
        axes = figure.subplots()
        image = axes.imshow(grid, cmap="RdYlGn", vmin=0, vmax=1, aspect="auto")
        axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], rotation=45)
        axes.set_yticks(range(len(depths)), [f"{depth:g} %" for depth in depths])
        axes.set(xlabel="length (tokens)", ylabel="depth of the needle")
        figure.colorbar(image, label="share of right answers")
        figure.savefig(folder / "needle.png", dpi=110, facecolor="white")
