"""Write one page of HTML about one or several runs: curves, time of a step, layout, and differences of settings.

    lct report outputs/a outputs/b --output report.html

The page needs no network. The layout of a run is the picture of `lct plan`; plotly draws the curves.
"""

import json
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from lct_tools import plan
from longshard.context.planning.methods import METHODS
from trainer.commands.options import Parser
from trainer.config.errors import ConfigError
from trainer.config.schema import Model
from trainer.config.toml import load_toml
from trainer.families.registry import flavor_args
from trainer.runtime.dump_folder import ESTIMATE

_CURVES = {
    "loss": "Loss",
    "validation_loss": "Validation loss",
    "grad_norm": "Gradient norm",
    "lr": "Learning rate",
    "tokens_per_second": "Tokens a second",
    "memory_gib": "Peak memory of a rank, GiB",
    "mfu": "Model FLOPs utilization",
}
_LONGEST_PICTURE = 65_536
_HEAD = """<meta charset=utf-8><meta name=viewport content='width=device-width'>
<title>Report</title><style>
body { font: 16px/1.5 system-ui, sans-serif; margin: auto; max-width: 1240px; padding: 0 16px }
.grid { display: grid; gap: 12px }
.grid { grid-template-columns: repeat(auto-fill, minmax(min(100%, 480px), 1fr)) }
.grid > *, .wide { min-width: 0; overflow-x: auto } svg { max-width: 100%; height: auto }
table { border-collapse: collapse } td, th { padding: 2px 12px 2px 0; text-align: left }
td { border-top: 1px solid #ddd }
</style><script>
addEventListener("load", () => document.querySelectorAll(".js-plotly-plot").forEach(
  plot => Plotly.Plots.resize(plot)))
</script>"""


@dataclass(frozen=True)
class Run:
    """A run that has logged a step.

    Attributes:
        name: Its folder.
        steps: The objects of metrics.jsonl.
        validation: The objects of validation.jsonl.
        settings: `table.key` -> value of config.toml.
        predicted: The planner's seconds of each part of a step; empty without an estimate.
    """

    name: str
    steps: list[dict[str, Any]]
    validation: list[dict[str, Any]]
    settings: dict[str, Any]
    predicted: dict[str, float]


def read(folder: Path) -> Run:
    """Read the files of a run.

    Args:
        folder: Its `job.dump_folder`.

    Returns:
        The run.

    Raises:
        ConfigError: The folder has no metrics, or no config.toml.
    """
    steps = _objects(folder / "metrics.jsonl")
    if not steps:
        raise ConfigError(f"{folder} has no step in metrics.jsonl; name a job.dump_folder")
    tables = load_toml(folder / "config.toml").items()
    settings = {f"{table}.{key}": x for table, keys in tables for key, x in keys.items()}
    predicted: dict[str, float] = {}
    with suppress(OSError, ValueError):  # a run on a CPU has none
        parts = json.loads((folder / ESTIMATE).read_text())["time"]
        predicted = {part: sum(causes.values()) for part, causes in parts.items()}
    validation = _objects(folder / "validation.jsonl")
    return Run(str(folder), steps, validation, settings, predicted)


def _objects(file: Path) -> list[dict[str, Any]]:
    """Return the JSON objects of a file's whole lines; empty without the file."""
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def page(runs: Sequence[Run]) -> str:
    """Return the page as HTML.

    Args:
        runs: The runs, at least one.

    Raises:
        ModuleNotFoundError: plotly is not installed.
    """
    sections = {
        "Runs": _summary(runs),
        "Curves": f"<div class=grid>{''.join(_curves(runs))}</div>",
        "Time of a step": _times(runs),
        "Layout": "".join(map(_layout, runs)),
    }
    if len(runs) > 1:
        sections["Settings that differ"] = _differences(runs)
    body = "\n".join(f"<h2>{title}</h2>{text}" for title, text in sections.items())
    return f"<!doctype html><html lang=en><head>{_HEAD}</head><body>{body}</body></html>"


def _table(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = ["".join(f"<th>{escape(name)}" for name in names)]
    lines += ["".join(f"<td>{escape(str(cell))}" for cell in row) for row in rows]
    return f"<div class=wide><table><tr>{'<tr>'.join(lines)}</table></div>"


def _summary(runs: Sequence[Run]) -> str:
    rows = []
    for run in runs:
        last = run.steps[-1]
        speed = median(step["tokens_per_second"] for step in run.steps)
        memory = max(step["memory_gib"] for step in run.steps)
        rows.append(
            [
                run.name,
                last["step"],
                f"{last['loss']:.4g}",
                f"{last['tokens_seen']:,}",
                f"{speed:,.0f}",
                f"{memory:.2f}",
            ]
        )
    return _table(["run", "step", "loss", "tokens", "tokens a second", "peak GiB"], rows)


def _curves(runs: Sequence[Run]) -> list[str]:
    import plotly.graph_objects as go

    pictures: list[str] = []
    for key, title in _CURVES.items():
        figure = go.Figure()
        for run in runs:
            steps = [
                step for step in [*run.steps, *run.validation] if step.get(key) is not None
            ]
            x, y = ([step[name] for step in steps] for name in ("step", key))
            if steps:
                figure.add_scatter(x=x, y=y, name=run.name, mode="lines+markers")
        if figure.data:
            pictures.append(_html(figure, title, with_script=not pictures))
    return pictures


def _html(figure: Any, title: str, *, with_script: bool = False) -> str:
    figure.update_layout(
        title=title, showlegend=True, height=360, legend_orientation="h", legend_y=-0.2
    )
    settings = {"responsive": True, "displayModeBar": False}
    return figure.to_html(full_html=False, include_plotlyjs=with_script, config=settings)


def _times(runs: Sequence[Run]) -> str:
    """Return HTML with bars: the median time of a step without the first one, and the predicted times of its parts.

    The median is divided into waiting for data and computing.
    """
    import plotly.graph_objects as go

    bars: dict[str, dict[str, float]] = defaultdict(dict)
    for run in runs:
        steps = run.steps[1:] or run.steps
        seconds = median(step["seconds_per_step"] for step in steps)
        waiting = seconds * median(step["data_loading_fraction"] for step in steps)
        bars["waiting for data"][run.name] = waiting
        bars["computing"][run.name] = seconds - waiting
        for part, predicted in run.predicted.items():
            bars[f"predicted {part}"][f"{run.name}, predicted"] = predicted
    figure = go.Figure(layout={"barmode": "stack", "yaxis_title": "seconds"})
    for name, parts in bars.items():
        figure.add_bar(x=[*parts], y=[*parts.values()], name=name)
    return _html(figure, "Median step")


def _layout(run: Run) -> str:
    """Return HTML with a picture of the tokens and pairs of each rank, or with the reason why none can be drawn.

    The picture shows at most 65,536 tokens.
    """
    length = min(run.settings["training.seq_len"], _LONGEST_PICTURE)
    cp = {
        key.removeprefix("parallelism.context_parallel_"): value
        for key, value in run.settings.items()
    }
    if cp["degree"] == 1:
        return f"<p>{escape(run.name)}: no context parallelism.</p>"
    heads = _heads(run)
    words = (
        f"--seq-len {length} --degree {cp['degree']} --method {cp['method']} "
        f"--load-balancer {cp['load_balancer']} {heads}"
    )
    spread = METHODS.get(cp["method"])
    degrees = cp.get("hybrid_degrees")
    if spread is not None and spread.two_level and degrees:  # other methods ignore them
        words += f" --head-degree {degrees[0]}"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "plan.svg")
        try:
            options = plan.parser().parse_args([*words.split(), "--output", str(file)])
            plan.painter(options)(plan.build(options), file)
        except ConfigError as error:
            return f"<p>{escape(run.name)}: {escape(str(error))}.</p>"
        picture = file.read_text().partition("?>")[2]
    usual = "" if heads else ", drawn for the heads of Llama 3 8B"
    return (
        f"<p>{escape(run.name)}: {length:,} tokens{usual}.</p><div class=wide>{picture}</div>"
    )


def _heads(run: Run) -> str:
    """Return the options of `lct plan` for the heads of a rank. Empty if the sizes of the model are not known here."""
    settings = run.settings
    try:
        model = flavor_args(Model(name=settings["model.name"], flavor=settings["model.flavor"]))
    except (ConfigError, KeyError):  # of a package, or of a folder on another machine
        return ""
    if model.task != "tokens":
        return ""
    tp = settings["parallelism.tensor_parallel_degree"]
    kv_heads = max(model.n_kv_heads // tp, 1)
    return f"--heads {model.n_heads // tp} --kv-heads {kv_heads} --head-dim {model.head_dim}"


def _differences(runs: Sequence[Run]) -> str:
    keys = sorted({key for run in runs for key in run.settings} - {"job.dump_folder"})
    rows = [[key, *(run.settings.get(key, "") for run in runs)] for key in keys]
    differing = [row for row in rows if len({*map(str, row[1:])}) > 1]
    return _table(["key", *(run.name for run in runs)], differing)


def main(argv: list[str]) -> int:
    """Write the page.

    Args:
        argv: The words of the command line, without the command.

    Returns:
        The exit code.

    Raises:
        ConfigError: A run has no metrics, or plotly is missing.
    """
    parser = Parser("report", __doc__)
    parser.add_argument("runs", type=Path, nargs="+", help="job.dump_folder of each run")
    parser.add_argument("--output", type=Path, default=Path("report.html"), help="the page")
    args = parser.parse_args(argv)
    try:
        text = page([read(folder) for folder in args.runs])
    except ModuleNotFoundError as error:
        raise ConfigError(f"lct report needs {error.name}: pip install {error.name}") from None
    args.output.write_text(text, encoding="utf-8")
    print(f"{args.output} has the report")
    return 0
