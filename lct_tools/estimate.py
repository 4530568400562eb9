"""Predict memory, traffic and time of a step on GPUs, without a GPU. Torch runs in a process of its own.

    estimate [FILE] [--world-size N] [--ngpu N] [--gpu NAME] [--max-seq-len] [--suggest [OUT.toml]] [--picture FILE]
             [--json] [--calibrate OUT.toml] [--table.key value ...]

--gpu: h100 (default), h200, b200, a100, rtx4090, or a .toml file with a record; --ngpu: GPUs of a node (default: 8).
--max-seq-len: the longest training.seq_len that fits; --suggest: degrees, methods and recomputation, the fastest first,
and the best one written to OUT.toml; --picture: memory over the step, as .png or .svg; --calibrate: run the job on this
machine for a minute or two, and write the record of its CPU.
"""

import argparse
import json
import sys
import time
from collections import Counter
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path

from lct_planner import shim
from lct_planner.calibrate import calibrate
from lct_planner.estimate import Estimate, estimate, in_words, lines
from lct_planner.profile import Profile
from lct_planner.search import Estimator, longest_sequence
from lct_planner.suggest import suggestions
from lct_planner.timing import device
from lct_planner.worker import Worker
from trainer.commands.start import Start, parse
from trainer.config.errors import ConfigError
from trainer.config.loader import parse_command_line, to_toml
from trainer.job import resolve
from trainer.job.record import size_words
from trainer.runtime.console import line_width, paragraphs
from trainer.runtime.devices import this_machine
from trainer.runtime.nodes import whole_number
from trainer.runtime.time_limits import limits_raised

_AS_ON_GPUS = ("--training.mixed_precision_param=bfloat16", "--optimizer.implementation=fused")
_HOST_OF_A_GPU = 200e9
"""Bytes of host memory per GPU of a node. Offloaded inputs may fill all of it."""


def main(argv: list[str]) -> int:
    """Run `estimate`: estimate a step, or search settings, and print the result.

    Args:
        argv: The words of the command line, without the command.

    Returns:
        The exit code.
    """
    started = time.monotonic()
    options, start = _options(argv)
    arguments = start.arguments
    out = sys.stderr if options.json else sys.stdout
    ranks = whole_number("--world-size", options.world_size, such_as="--world-size 8")
    config = parse_command_line(arguments, reading=True).config
    if options.calibrate:
        print(_calibrated(arguments, options.calibrate, config.job.device))
        return 0
    record = device(options.gpu)
    note = ""
    record = replace(record, node=start.ranks or record.node)
    # Errors of the configuration are reported here, before a process imports torch.
    resolve(config, ranks, record.type, node=record.node, missing=[])
    if record.type == "cuda" and (why := shim.why_not()):
        note = f"{why}: traced with CPU kernels, which keep more of norms and attention than GPU kernels"
        record = replace(record, type="cpu")
        arguments = [*arguments, *_AS_ON_GPUS]
    job_name = config.job.description or config.job.config_file or "the default settings"
    print(f"{job_name} on {ranks} of {options.gpu}", file=sys.stderr)
    with Worker(has_shim=record.type == "cuda") as worker, redirect_stdout(out):
        estimator = partial(
            estimate, worker, ranks=ranks, device=record, whole=options.picture is not None
        )
        result = _searched(options, estimator, arguments, config.training.seq_len, ranks)
    if options.picture:
        draw(result.profile, options.picture)
        print(f"the picture is {options.picture}", file=out)
    if options.json:
        print(json.dumps(result.record()))
    else:
        print(paragraphs(lines(result), line_width()))
        seconds = time.monotonic() - started
        print(f"traced in {seconds:.0f} s: the step of one rank on tensors without memory")
    limits = limits_raised(result.job.config.comm, result.time.seconds) if ranks > 1 else ""
    for text in filter(None, (note, limits)):
        print(f"note: {text}", file=sys.stderr)
    return 0


def _calibrated(arguments: list[str], name: str, device: str) -> str:
    """Measure this machine's CPU, write its record to the file `name`, and return what to print.

    device: `job.device`. Raise a ConfigError if it is no CPU.
    """
    machine = this_machine()
    if (type_ := machine.device_type(device)) != "cpu":
        raise ConfigError(
            f"--calibrate measures a CPU, and this job runs on {type_}; give --job.device cpu, or take a "
            "record of lct_planner/gpus.toml"
        )
    return calibrate(arguments, name, memory=machine.memory(type_) or 1 << 36)


def _options(argv: list[str]) -> tuple[argparse.Namespace, Start]:
    """Return the options of this command, and the settings of the job.

    The option `world_size` is the number of ranks of the job. `Start.ranks` is the number of GPUs of a node.
    """
    parser = argparse.ArgumentParser(
        prog="lct estimate",
        usage=argparse.SUPPRESS,
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--world-size",
        default="8",
        metavar="N",
        help="ranks of the job, one per GPU (default: 8)",
    )
    add(
        "--gpu",
        default="h100",
        metavar="NAME",
        help="kind of GPU, or a .toml file (default: h100)",
    )
    add("--max-seq-len", action="store_true", help="search the longest sequence that fits")
    add(
        "--suggest",
        nargs="?",
        const="",
        metavar="OUT.toml",
        help="search the fastest settings, and write them to OUT.toml",
    )
    add(
        "--calibrate",
        type=Path,
        metavar="OUT.toml",
        help="measure this machine's CPU, and write its record",
    )
    add(
        "--picture",
        type=Path,
        metavar="FILE",
        help="draw memory over the step, as .png or .svg",
    )
    add("--json", action="store_true", help="print everything as JSON")
    file = [word for word in argv[:1] if not word.startswith("-")]
    options, settings = parser.parse_known_args(argv[len(file) :])
    return options, parse([*file, *settings])


def _searched(
    options: argparse.Namespace,
    estimator: Estimator,
    arguments: list[str],
    seq_len: int,
    ranks: int,
) -> Estimate:
    """Return the estimate of the job; with --suggest or --max-seq-len, print a search and return its best estimate.

    --suggest OUT.toml also writes the best settings, and raises a ConfigError if none fit. If no length fits,
    --max-seq-len returns the estimate of the shortest one.
    """
    if options.suggest is not None:
        return _suggest(estimator, arguments, ranks, options.suggest)
    if options.max_seq_len:
        return _longest(estimator, arguments, seq_len, ranks)
    return estimator(arguments)


def _longest(estimator: Estimator, arguments: list[str], begin: int, ranks: int) -> Estimate:
    """Print the longest sequence that fits; return its estimate. If none fits, return the estimate of the shortest.

    begin: the length that is tried first, in tokens; each length is a multiple of 128 * ranks.
    ranks: ranks of the job.
    """
    longest, beyond = longest_sequence(estimator, arguments, begin, unit=128 * ranks)
    wall = next(iter(beyond.by_purpose))
    if longest is not None:
        print(
            f"{'longest':13}{longest.job.positions:,} tokens: {size_words(longest.total)} of "
            f"{size_words(longest.device.memory)}"
        )
    print(
        f"{'beyond':13}{beyond.job.positions:,} tokens need {size_words(beyond.total)}; the most of it is {wall}"
    )
    return longest or beyond


def _suggest(estimator: Estimator, arguments: list[str], ranks: int, path: str) -> Estimate:
    """Print the estimates of the job and of the fastest choices. If `path` is not empty, write the best choice to it.

    Returns:
        The estimate of the best choice.

    Raises:
        ConfigError: No choice fits.
    """
    current = estimator(arguments)
    print(_row(current, "as given" if current.fits else "as given, which does not fit"))
    choices = suggestions(estimator, arguments, ranks, _HOST_OF_A_GPU, _show_progress)
    if not choices:
        raise ConfigError(
            f"nothing that was tried fits on {ranks} GPUs; use more of them, or a shorter training.seq_len"
        )
    for choice in choices[:8]:
        print(
            _row(choice.estimate, " ".join(choice.words(current.job.user_config)) or "as given")
        )
    best = choices[0].estimate
    if best.job.sequences_per_step != current.job.sequences_per_step:
        print(
            f"\nthe first has {best.job.sequences_per_step:,} sequences a step, and the given job "
            f"{current.job.sequences_per_step:,}: set the learning rate for it, or training.global_batch_size"
        )
    if path:
        Path(path).write_text(to_toml(best.job.user_config), "utf-8")
        print(f"\nthe first is written to {path}: lct train {path}")
    return best


def _row(estimated: Estimate, settings: str) -> str:
    speed = f"{estimated.tokens_per_second:9,.0f} tok/s"
    memory = f"{size_words(estimated.total):>9}"
    return f"{speed}  {memory}  {settings}\n{'':17}{estimated.time.bottleneck}"


def _show_progress(count: int, best: float) -> None:
    """Print on stderr how many settings were traced: after each one on a terminal, otherwise after every tenth.

    count: number of traced settings. best: speed of the fastest of them, in tokens a second and rank.
    """
    text = f"{count} settings traced; the best has {best:,.0f} tokens a second and rank"
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
    elif count % 10 == 0:
        print(text, file=sys.stderr, flush=True)


def draw(profile: Profile, path: Path) -> None:
    """Draw the allocated memory over the step, by purpose.

    Args:
        profile: The memory over the step.
        path: The file of the picture.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("--picture needs matplotlib: pip install matplotlib") from None
    totals: Counter[str] = Counter()
    curve = [Counter(in_words(amounts)) for _, amounts in profile.curve]
    for amounts in curve:
        totals |= amounts  # the larger of both
    names = [name for name, _ in totals.most_common()]
    rows = [[amounts[name] / 2**30 for amounts in curve] for name in names]
    figure = Figure((10, 5), layout="constrained")
    axes = figure.subplots()
    axes.stackplot(range(len(profile.curve)), rows, labels=names)
    phases = [place.split("/")[0] for place, _ in profile.curve]
    starts = [i for i, phase in enumerate(phases) if i == 0 or phase != phases[i - 1]]
    for start in (i for i in starts if phases[i] in ("forward", "backward", "optimizer")):
        axes.axvline(start, color="black", linewidth=0.5)
        axes.text(start, axes.get_ylim()[1], phases[start], va="bottom", fontsize=8)
    axes.set(
        ylabel="GiB alive",
        xlabel="the step, one event after another",
        xlim=(0, len(profile.curve) - 1),
    )
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="upper left", fontsize=7)
    figure.savefig(path)
