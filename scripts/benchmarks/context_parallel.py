r"""Context-parallel attention against one process that computes all of it with as many threads.

    python scripts/benchmarks/context_parallel.py --seq-len 4096 16384 --degrees 2 --json rows.json
    python scripts/benchmarks/context_parallel.py --seq-len 32768 --degrees 2 4 8 --device cuda --dtype bfloat16
    python scripts/benchmarks/context_parallel.py --seq-len 65536 --degrees 2 4 --device cuda --dtype bfloat16 \
        --ranks --methods ring all_to_all pytorch

N ranks with `--threads` threads each, and one process with N times `--threads` threads, compute causal attention of one
sequence, forward and backward, in turn. Processes that do not measure sleep on a pipe. A round is one process, then
every method. The ratio of a row is the median over the rounds of (time of the ranks) / (time of the one process).

With --device cuda --ranks each rank has a GPU of its own, over NCCL. `--methods pytorch` is PyTorch's own ring
(`torch.distributed.tensor.experimental.context_parallel`), which does not run on CPUs.

With --device cuda alone, or with --tiles, one device computes the tiles of every rank's plan, one rank after another.
K and V are on the device, and there is no communication. The ratio then compares the slowest rank with a share of 1/N
of one call over the whole sequence.
"""

import argparse
import json
import statistics
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from a clone, installed or not

import torch

from longshard.context.execution.kernels.choose import CUDA_KERNELS, choose_kernel
from longshard.context.execution.kernels.cpu import CpuFlash
from longshard.context.planning.heads import check_heads
from longshard.sharding.errors import OptionError
from longshard.sharding.layout import LAYOUTS
from scripts.benchmarks.context_parallel_ranks import PEER, Share, Whole
from scripts.benchmarks.context_parallel_tiles import DIRECTIONS, Problem, Row, problems, tile_rows
from scripts.benchmarks.teams import Team, Times, compared, span
from scripts.provenance import made_with
from trainer.config.errors import ConfigError

METHODS = ("ring", "all_gather", "all_to_all")
KERNELS = [kernel.name for kernel in (CpuFlash(), *CUDA_KERNELS)]
_OTHER_DEGREES = (2, 4, 8, 16)
"""Degrees for which a row says how large the buffers of K and V would be."""


# ---- rows


def rank_rows(args: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for every degree, length and method.

    Args:
        args: The command line.
    """
    for degree in args.degrees:
        with Team(degree, Whole, Share, args.device) as team:
            for problem in problems(args, degree):
                team.whole("prepare", problem, degree * args.threads, args.device)
                team.ranks("prepare", problem, args.threads, args.methods, args.device)
                yield from measure(problem, args.methods, args.repeats, team)


def measure(problem: Problem, methods: Sequence[str], repeats: int, team: Team) -> Iterator[Row]:
    """Measure the one process and every method in turn, after one call of each that is not timed.

    Args:
        problem: The attention problem.
        methods: Context-parallel methods, or `PEER`.
        repeats: Number of rounds.
        team: The processes.

    Yields:
        A row for each method.

    Raises:
        RuntimeError: A rank sent other bytes than its plan says.
    """
    team.whole("run")
    accounts = {method: team.ranks("account", method) for method in methods}
    whole: list[Times] = []
    shares: dict[str, list[list[Times]]] = {method: [] for method in methods}
    for _ in range(repeats):
        whole.append(team.whole("run"))
        for method in methods:
            shares[method].append(team.ranks("run", method))
    for method in methods:
        row = {
            "method": method,
            "degree": problem.degree,
            "seq_len": problem.seq_len,
            **compared(whole, shares[method]),
        }
        if method == PEER:  # PyTorch's ring counts no bytes; it has the FLOPs of a ring
            speed = worth(problem, "ring", whole, shares[method])
            yield row | {name: speed[name] for name in ("tflops", "whole_tflops")}
            continue
        check_bytes(problem, method, [account["bytes_sent"] for account in accounts[method]])
        yield row | {
            **worth(problem, method, whole, shares[method]),
            "peak_bytes": {name: max(one["peak_bytes"][name] for one in accounts[method]) for name in DIRECTIONS},
            **buffers(problem, method),
        }


# ---- arithmetic


def worth(problem: Problem, method: str, whole: Sequence[Times], shares: Sequence[Sequence[Times]]) -> Row:
    """Return TFLOP/s of all ranks together and of the one process, and the bytes that all ranks send, by kind.

    The plans count FLOPs and bytes.

    Args:
        problem: The attention problem.
        method: Context-parallel method whose plans count FLOPs and bytes.
        whole: Times of the one process, one per round.
        shares: Times of every rank, one sequence per round.
    """
    costs = problem.costs(method)
    flops = sum(cost.flops for rank in costs for cost in rank.values())
    sent = sum((cost.bytes_sent for rank in costs for cost in rank.values()), Counter())
    return {
        "tflops": round(flops / statistics.median(map(span, shares)) / 1e12, 4),
        "whole_tflops": round(flops / statistics.median(span([one]) for one in whole) / 1e12, 4),
        "bytes_sent": sum(sent.values()),
        "bytes_sent_by_kind": dict(sent),
    }


def check_bytes(problem: Problem, method: str, counted: Sequence[dict[str, int]]) -> None:
    """Check that every rank sent the bytes that its plan says.

    Args:
        problem: The attention problem.
        method: Context-parallel method.
        counted: Bytes that each rank sent, by kind.

    Raises:
        RuntimeError: A rank sent other bytes.
    """
    for rank, (sent, costs) in enumerate(zip(counted, problem.costs(method), strict=True)):
        planned = sum((cost.bytes_sent for cost in costs.values()), Counter())
        if +planned != Counter(sent):
            raise RuntimeError(f"{method}: rank {rank} sent {sent} bytes, and its plan says {dict(planned)}")


def buffers(problem: Problem, method: str) -> Row:
    """Return the largest buffers of K and V and of their gradients on a rank.

    Args:
        problem: The attention problem.
        method: Context-parallel method.

    Returns:
        `workspace_bytes`, by direction, and `buffers`: the size in shards of K and V, by degree and direction. Other
        degrees have the same number of tokens on a rank, so that growth with the degree is visible.
    """
    local = problem.seq_len // problem.degree
    rows: Row = {"workspace_bytes": _workspace(problem, method)}
    for degree in sorted({*_OTHER_DEGREES, problem.degree}):
        if method == "all_to_all" and problem.heads % degree:
            continue
        other = Problem(**{**asdict(problem), "degree": degree, "seq_len": local * degree})
        shard = 2 * other.batch * other.kv_heads * other.head_dim * getattr(torch, other.dtype).itemsize * local
        sizes = {name: round(size / shard, 2) for name, size in _workspace(other, method).items()}
        rows.setdefault("buffers", {})[str(degree)] = sizes
    return rows


def _workspace(problem: Problem, method: str) -> dict[str, int]:
    """Return the largest workspace of a rank in bytes, by direction."""
    costs = problem.costs(method)
    return {name: max(rank[name].workspace for rank in costs) for name in DIRECTIONS}


# ---- command line


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{message}; see --help\n")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    described = _Parser(description=__doc__.splitlines()[0])
    add = described.add_argument
    add("--seq-len", nargs="+", type=int, default=[4096, 16384], help="tokens of the sequence")
    add("--degrees", nargs="+", type=int, default=[2], help="numbers of ranks that share it")
    add("--methods", nargs="+", choices=(*METHODS, PEER), default=list(METHODS))
    add("--load-balancer", choices=LAYOUTS, default="head_tail")
    add("--batch", type=int, default=1)
    add("--heads", type=int, default=8)
    add("--kv-heads", type=int, default=2)
    add("--head-dim", type=int, default=64)
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    add("--repeats", type=int, default=5, help="measured rounds, after a warm-up round")
    add("--threads", type=int, default=1, help="threads of each rank")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: as with --tiles, or --ranks")
    add("--ranks", action="store_true", help="with cuda: one GPU for each rank, over NCCL")
    add("--tiles", action="store_true", help="every rank's tiles on one device, one rank after another, nothing sent")
    add("--kernels", nargs="+", choices=KERNELS, help="with --tiles or cuda (default: all that support it)")
    add("--json", type=Path, metavar="FILE", help="file for the rows and their origin")
    return described


def check(args: argparse.Namespace) -> None:
    """Check the command line; set `tiles` and `kernels` if they are not given.

    Args:
        args: The command line.

    Raises:
        ConfigError: These values cannot be measured.
    """
    for name in ("seq_len", "degrees", "batch", "heads", "kv_heads", "head_dim", "repeats", "threads"):
        values = getattr(args, name)
        for value in values if isinstance(values, list) else [values]:
            if value < 1:
                raise ConfigError(f"--{name.replace('_', '-')} {value} must be at least 1")
    if args.heads % args.kv_heads:
        raise ConfigError(f"--kv-heads {args.kv_heads} must divide --heads {args.heads}")
    if min(args.seq_len) < 2 * max(args.degrees):
        raise ConfigError(f"--seq-len {min(args.seq_len)} is too short for {max(args.degrees)} ranks: two tokens each")
    if "all_to_all" in args.methods:
        for degree in args.degrees:
            try:
                check_heads(args.heads, degree)
            except ValueError as error:
                raise ConfigError(f"--heads {args.heads}: {error}") from None
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: PyTorch finds no GPU here; use --device cpu")
    if args.json is not None and not args.json.absolute().parent.is_dir():
        raise ConfigError(f"--json {args.json}: its folder does not exist")
    args.tiles = args.tiles or (args.device == "cuda" and not args.ranks)
    check_ranks(args)
    if args.kernels and not args.tiles:
        raise ConfigError("--kernels is for --tiles and --device cuda; ranks on a CPU use cpu_flash")
    dtype = getattr(torch, args.dtype)
    for name in args.kernels or ():
        if not _can(name, args.device, dtype, args.head_dim):
            raise ConfigError(f"--kernels {name} cannot do {args.dtype} heads of size {args.head_dim} on {args.device}")
    args.kernels = args.kernels or [name for name in KERNELS if _can(name, args.device, dtype, args.head_dim)]


def check_ranks(args: argparse.Namespace) -> None:
    """Check that the ranks have devices that can run the methods.

    Args:
        args: The command line.

    Raises:
        ConfigError: There are too few GPUs, or PyTorch's ring cannot run with these values.
    """
    if args.ranks and args.device == "cuda" and (gpus := torch.cuda.device_count()) < max(args.degrees):
        raise ConfigError(f"--ranks: --degrees {max(args.degrees)} needs as many GPUs, and there are {gpus}")
    if PEER not in args.methods:
        return
    if args.device == "cpu" or args.tiles:
        raise ConfigError(f"--methods {PEER}: PyTorch's ring runs on GPUs only; add --device cuda --ranks")
    shortest = 2 * max(args.degrees)
    if args.load_balancer != "head_tail" or any(length % (2 * n) for length in args.seq_len for n in args.degrees):
        raise ConfigError(
            f"--methods {PEER}: PyTorch's ring has the head_tail layout of equal parts only; use lengths that "
            f"{shortest} divides, and --load-balancer head_tail"
        )


def _can(name: str, device: str, dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether the kernel supports this device, data type and head size."""
    try:
        choose_kernel(device, dtype, head_dim, name)
    except OptionError:
        return False
    return True


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, and write the rows to `--json`.

    Args:
        argv: The command line. None: the process's own.

    Returns:
        The exit code.
    """
    arguments = sys.argv[1:] if argv is None else argv
    args = parser().parse_args(arguments)
    try:
        check(args)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    settings = {name: getattr(args, name) for name in ("batch", "heads", "kv_heads", "head_dim", "dtype", "threads")}
    settings |= {"load_balancer": args.load_balancer, "repeats": args.repeats}
    device = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    columns = [*(["kernel"] if args.tiles else []), "method", "degree", "seq_len", "ratio", "ms", "whole_ms", "tflops"]
    print(" ".join(f"{column:>11}" for column in columns), " ratio from .. to")
    results: list[Row] = []
    result = made_with("scripts/benchmarks/context_parallel.py", arguments, device=device) | {"results": results}
    for row in (tile_rows if args.tiles else rank_rows)(args):
        results.append(row | settings)
        low, high = row["ratio_range"]
        print(" ".join(f"{row[column]:>11}" for column in columns), f" {low} .. {high}", flush=True)
        if args.json is not None:  # after every row, so that an interrupted run keeps its rows
            args.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
