r"""The trainer against a bare PyTorch loop of the same model: time, tokens per second, MFU, memory; feature by feature.

    python scripts/benchmarks/train.py --json result.json
    python scripts/benchmarks/train.py --device cuda --flavor 8B --layers 4 --seq-len 8192 --features compile,float8 \
        --optimizer.implementation fused

One process, one device, no launcher. Settings of the trainer may follow; they hold for both loops.

The bare loop has the same weights, forward, `F.cross_entropy`, backward, `clip_grad_norm_` and optimizer. Its batches
are on the device beforehand; it never waits for the device and reports nothing. If the trainer stores weights in
float32 and computes in bfloat16, the bare loop does so too: each step copies the weights to a model in bfloat16, and
its gradients back.

The trainer runs `Trainer.train()`, as `train.py` at the root does, with the defaults of data, metrics, log lines and
garbage collection. Every `--steps` steps, the bare loop takes a turn. The ratio of a row is the median over the rounds
of (time of the trainer's steps) / (mean time of the bare steps before and after them).

Memory is measured separately, each loop in a process of its own. It is the peak of two steps after the warm-up, minus
the process's memory before the loop is built. On a GPU it counts PyTorch's allocations, on a CPU resident memory.
"""

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from a clone, installed or not

import torch

from longshard.context.execution.kernels.choose import KernelNeeds, choose_kernel
from longshard.context.planning.capabilities import CAPABILITIES
from scripts.benchmarks.train_loops import WARMUP, Bare, Block, Rounds, Row, Work, free, memory_of, train, with_layers
from scripts.provenance import made_with
from trainer.components.device_peaks import peak_flops
from trainer.components.out_of_memory import is_out_of_memory
from trainer.config.errors import ConfigError, did_you_mean
from trainer.config.loader import parse_command_line
from trainer.config.schema import JobConfig
from trainer.job import resolve
from trainer.job.attention import options_as_keys
from trainer.transforms.compile import check_compiler
from trainer.transforms.float8 import check_float8_machine

_OPTIONS = {
    "compile": ["--compile.enable"],
    "selective": ["--activation_checkpoint.mode=selective"],
    "full": ["--activation_checkpoint.mode=full"],
    "memory_budget": ["--activation_checkpoint.mode=memory_budget", "--compile.enable"],
    "float8": ["--float8.enable", "--compile.enable"],
}
FEATURES = [*_OPTIONS, *(f"kernel={name}" for name in CAPABILITIES)]
_COLUMNS = ("ratio", "cpu_ratio", "ms_per_step", "tokens_per_second", "tflops", "mfu", "memory_gib")


# ---- rows


def rows(work: Work, variants: Mapping[str, JobConfig], *, memory: bool) -> Iterator[Row]:
    """Yield the row of the bare loop, then the row of every variant of the trainer against it.

    Args:
        work: The configuration, the device and the rounds to measure.
        variants: Configurations of the trainer by name.
        memory: Whether to measure memory.
    """
    contenders: dict[str, JobConfig | None] = {"bare": None, **variants}
    # Before anything is built in this process.
    memories = {name: memory_of(work, config) if memory else {} for name, config in contenders.items()}
    bare = Bare(work)
    first_loss = bare.step().item()
    for _ in range(WARMUP - 1):
        bare.step()
    alone = Rounds(work, bare)
    for _ in range(work.rounds):
        alone.run_bare()
    yield {"variant": "bare", "first_loss": first_loss, **speed(work, alone.bare_blocks), **memories["bare"]}
    for name, config in variants.items():
        yield {"variant": name, **against(work, bare, config), **memories[name]}
        free(work.device)


def against(work: Work, bare: Bare, config: JobConfig) -> Row:
    """Run the trainer with this configuration and the bare loop in turn.

    Args:
        work: The configuration, the device and the rounds to measure.
        bare: The bare loop.
        config: Configuration of the trainer.

    Returns:
        The row of the variant. `first_loss` is the same for all variants, to rounding: all do the same work.

    Raises:
        KeyboardInterrupt: The trainer stopped early, because the user interrupted it.
    """
    rounds = Rounds(work, bare)
    try:
        steps = train(config, work.device, rounds.total, rounds.pace)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return {"error": "out of memory together with the bare loop"}
    if len(rounds.blocks) < work.rounds:
        raise KeyboardInterrupt  # the trainer returns early if a signal asks it to stop
    return {
        "first_loss": steps[0]["loss"],
        **compared(rounds.bare_blocks, rounds.blocks),
        **speed(work, rounds.blocks),
        "bare_ms_per_step": speed(work, rounds.bare_blocks)["ms_per_step"],
    }


def compared(bare: Sequence[Block], blocks: Sequence[Block]) -> Row:
    """Compare each block with the mean of the bare blocks before and after it; a steady drift cancels.

    Args:
        bare: Blocks of the bare loop, one more than `blocks`.
        blocks: Blocks of the trainer.

    Returns:
        Medians of the ratios. `cpu_ratio` compares the CPU time of all threads, which other work on the machine
            disturbs
        least.
    """

    def ratios(amount_of: Callable[[Block], float]) -> list[float]:
        around = [(amount_of(before) + amount_of(after)) / 2 for before, after in itertools.pairwise(bare)]
        return [amount_of(block) / mean for block, mean in zip(blocks, around, strict=True)]

    time_ratios = ratios(lambda block: block.seconds)
    return {
        "ratio": round(statistics.median(time_ratios), 4),
        "ratio_range": [round(min(time_ratios), 4), round(max(time_ratios), 4)],
        "ratio_of_fastest": round(min(b.seconds for b in blocks) / min(b.seconds for b in bare), 4),
        "cpu_ratio": round(statistics.median(ratios(lambda block: block.cpu)), 4),
    }


def speed(work: Work, blocks: Sequence[Block]) -> Row:
    """Return time and speed of the median block.

    TFLOP/s and MFU count full attention; `mfu_causal` counts only the pairs that a causal mask allows.

    Args:
        work: The configuration, the device and the rounds to measure.
        blocks: Blocks of steps.
    """
    seconds = statistics.median(block.seconds for block in blocks) / work.steps
    per_token = work.shape().flops_per_token(work.config.training.seq_len)
    full, causal = (flops * work.tokens / seconds for flops in per_token)
    peak = peak_flops(work.device, work.compute_dtype)
    return {
        "ms_per_step": round(1e3 * seconds, 2),
        "tokens_per_second": round(work.tokens / seconds, 1),
        "tflops": round(full / 1e12, 4),
        "mfu": None if peak is None else round(full / peak, 4),
        "mfu_causal": None if peak is None else round(causal / peak, 4),
    }


# ---- command line


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{message}; see --help\n")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    about = common_parser(__doc__)
    add = about.add_argument
    add("--features", metavar="A,B+C", help=f"default: all that the device can do, one by one: {', '.join(FEATURES)}")
    add("--no-memory", action="store_true", help="time only")
    return about


def common_parser(description: str) -> argparse.ArgumentParser:
    """Return a parser of the options that `settled_work` reads.

    Args:
        description: Text of the help.
    """
    about = _Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = about.add_argument
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--flavor", default="debugmodel", help="flavor of llama3 (default: debugmodel)")
    add("--layers", type=int, help="number of layers (default: the flavor's)")
    add("--seq-len", type=int, default=2048, help="tokens of a row (default: 2048)")
    add("--rows", type=int, default=1, help="rows of a step (default: 1)")
    add("--steps", type=int, default=5, help="measured together, as one block (default: 5)")
    add("--rounds", type=int, default=10, help="blocks of each contender (default: 10)")
    add("--json", type=Path, metavar="FILE", help="write the result there, as an object")
    return about


def settled_work(args: argparse.Namespace, overrides: Sequence[str]) -> tuple[Work, list[str]]:
    """Return the work to measure, and the trainer's options for it.

    Args:
        args: The command line.
        overrides: Settings of the trainer.

    Raises:
        ConfigError: These values cannot be measured.
    """
    for name in ("layers", "seq_len", "rows", "steps", "rounds"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value} must be at least 1")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: PyTorch finds no GPU here; use --device cpu")
    if args.json is not None and not args.json.absolute().parent.is_dir():
        raise ConfigError(f"--json {args.json}: its folder does not exist")
    base = [
        f"--model.flavor={args.flavor if args.layers is None else with_layers(args.flavor, args.layers)}",
        f"--training.seq_len={args.seq_len}",
        f"--training.local_batch_size={args.rows}",
        "--lr_scheduler.warmup_steps=0",  # one learning rate, as in the bare loop
        "--lr_scheduler.decay_ratio=0.0",
        *overrides,
    ]
    device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
    work = Work(parse_command_line(base).config, device, args.steps, args.rounds)
    check_common(work.config)
    return work, base


def settled(args: argparse.Namespace, overrides: Sequence[str]) -> tuple[Work, dict[str, JobConfig]]:
    """Return the work to measure, and the variants: the trainer as it is, then with each feature.

    Args:
        args: The command line.
        overrides: Settings of the trainer.

    Raises:
        ConfigError: These values cannot be measured, or a feature is unknown or cannot run here.
    """
    work, base = settled_work(args, overrides)
    variants = {"trainer": work.config}
    # The reference kernel is slow, so it is not in the default.
    wanted = FEATURES[:-1] if args.features is None else [name for name in args.features.split(",") if name]
    for name in wanted:
        try:
            config = parse_command_line([*base, *_options(name, work.config)]).config
            check(config, work)
        except ConfigError as error:
            if args.features is not None:
                raise ConfigError(f"--features {name}: {error}") from None
        else:
            variants[name] = config
    return work, variants


def _options(feature: str, config: JobConfig) -> list[str]:
    """Return the trainer's options for a feature, or for several features joined by +."""
    options = []
    for part in feature.split("+"):
        if part not in FEATURES:
            raise ConfigError(f"{part!r} is none{did_you_mean(part, FEATURES)}")
        if part in _OPTIONS:
            options += _OPTIONS[part]
        else:  # only windowed attention takes a chosen kernel; a window as long as the row hides nothing
            options += [f"--parallelism.context_parallel_kernel={part.partition('=')[2]}"]
            options += [f"--model.sliding_window={config.training.seq_len}"]
    return options


def check_common(config: JobConfig) -> None:
    """Check that the bare loop supports the settings of both loops.

    Args:
        config: Configuration of both loops.

    Raises:
        ConfigError: The bare loop does not support a setting.
    """
    job = resolve(config, 1)
    training = config.training
    features = "it is the trainer's alone; name it in --features, or leave it out"
    lacks = "the bare loop has none; leave it out"
    for key, differs, reason in (
        ("training.global_batch_size", training.global_batch_size not in (-1, training.local_batch_size), lacks),
        ("a mask, a sliding window or sinks", job.attention is not None, lacks),
        ("training.enable_cpu_offload", training.enable_cpu_offload, lacks),
        ("checkpoint.enable", config.checkpoint.enable, lacks),
        ("compile.enable", config.compile.enable, features),
        ("float8.enable", config.float8.enable, features),
        ("activation_checkpoint.mode", config.activation_checkpoint.mode != "none", features),
    ):
        if differs:
            raise ConfigError(f"{key}: {reason}")


def check(config: JobConfig, work: Work) -> None:
    """Check that this machine can run a configuration.

    Args:
        config: Configuration of the trainer.
        work: The configuration, the device and the rounds to measure.

    Raises:
        ConfigError: This machine cannot run it.
    """
    job = resolve(config, 1, work.device.type)
    check_compiler(job.compilation, work.device)
    check_float8_machine(config.float8, work.device, norms_have_parameters=job.model.norms_have_parameters)
    if job.attention is not None:
        with options_as_keys():
            kind = work.device.type, work.compute_dtype, job.model.head_dim
            choose_kernel(*kind, job.attention.kernel, KernelNeeds(bands=True))


def described(work: Work, argv: Sequence[str], script: str = "scripts/benchmarks/train.py") -> Row:
    """Return the head of the result: machine, versions, model and batch.

    Args:
        work: The configuration, the device and the rounds to measure.
        argv: The command line.
        script: Path of the benchmark in the repository.
    """
    shape = work.shape()
    training = work.config.training
    device = torch.cuda.get_device_name(work.device) if work.device.type == "cuda" else "cpu"
    return made_with(script, argv, device=device) | {
        "threads": torch.get_num_threads(),
        "flavor": work.config.model.flavor,
        "layers": shape.n_layers,
        "vocab_size": shape.vocab_size,
        "parameters": shape.n_params(),
        "seq_len": training.seq_len,
        "rows": training.local_batch_size,
        "dtype": training.dtype,
        "compute_dtype": str(work.compute_dtype).removeprefix("torch."),
        "steps": work.steps,
        "rounds": work.rounds,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, and write the rows to `--json`.

    Args:
        argv: The command line. None: the process's own.

    Returns:
        The exit code.
    """
    argv = sys.argv[1:] if argv is None else argv
    args, overrides = parser().parse_known_args(argv)
    try:
        work, variants = settled(args, overrides)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    widths = {column: max(len(column), 9) for column in _COLUMNS}
    print(" " * 18, *(f"{column:>{width}}" for column, width in widths.items()), " ratio from .. to", flush=True)
    results: list[Row] = []
    result = described(work, argv) | {"results": results}
    try:
        for row in rows(work, variants, memory=not args.no_memory):
            results.append(row)
            cells = {column: "-" if row.get(column) is None else row[column] for column in _COLUMNS}
            end = row.get("error", " .. ".join(map(str, row.get("ratio_range", []))))
            print(f"{row['variant']:>18}", *(f"{cells[column]:>{widths[column]}}" for column in _COLUMNS), f" {end}")
            sys.stdout.flush()
            if args.json is not None:  # after every row, so that an interrupted run keeps its rows
                args.json.write_text(json.dumps(result, indent=2) + "\n")
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
