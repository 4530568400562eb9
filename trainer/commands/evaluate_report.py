"""What an evaluation found, as tables and JSON. Torch-free."""

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
    """Return the rows of each task's table."""
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
        lengths = sorted({cell.length for cell in findings.needle})
        depths = sorted({cell.depth for cell in findings.needle})
        lines += [""] * bool(lines) + ["needle: share of right answers, and log-probability of a token, by depth"]
        lines.append("length    " + "".join(f"{f'{depth:g} %':>16}" for depth in depths))
        cells = {(cell.length, cell.depth): cell for cell in findings.needle}
        for length in lengths:
            row = (cells[length, depth] for depth in depths)
            shown = "".join(f"{f'{cell.accuracy:.0%}  {cell.log_probability:7.2f}':>16}" for cell in row)
            lines.append(f"{length:<10,}{shown}")
    return "\n".join(lines)


def write(findings: Findings, folder: Path) -> str:
    """Write evaluation.json, and return its path.

    Raises:
        ConfigError: the folder cannot be written to.
    """
    file = folder / "evaluation.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"settings": findings.settings, **rows_of(findings)}, indent=2) + "\n", "utf-8")
    except OSError as error:
        reason = full_disk(error, nearest_existing(folder)) or error.strerror or str(error)
        raise ConfigError(f"--output {folder} cannot be written ({reason}); make room, or name another") from None
    return str(file)


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
