"""Context-parallel attention against one process that computes all of it with as many threads.

    python scripts/benchmarks/context_parallel.py --seq-len 4096 16384 --degrees 2 --json rows.json
    python scripts/benchmarks/context_parallel.py --seq-len 32768 --degrees 2 4 8 --device cuda --dtype bfloat16

N ranks of `--threads` threads each, and one process of N times as many, compute causal attention of one sequence,
forward and backward, in turn: whoever does not measure sleeps on a pipe. A round is one process, then every method; the
ratio of a row is the median over the rounds of (time of the ranks) / (time of the one process).

With --device cuda, or with --tiles, one device computes the tiles of every rank's plan one rank after another, K and V
at hand and nothing sent. The ratio is then that of the slowest rank to a share of 1/N of one call over everything.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from a clone, installed or not

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from scripts.benchmarks.context_parallel_tiles import DIRECTIONS, Problem, Row, problems, tile_rows
from scripts.provenance import made_with
from trainer.config.errors import ConfigError
from trainer.distributed.context_parallel.attention import context_parallel_attention
from trainer.distributed.context_parallel.execution.kernels.choose import CUDA_KERNELS, choose_kernel
from trainer.distributed.context_parallel.execution.kernels.cpu import CpuFlash
from trainer.distributed.context_parallel.live import LivePlan, opened
from trainer.distributed.context_parallel.planning.heads import check_heads
from trainer.distributed.context_parallel.planning.options import ContextParallelOptions
from trainer.distributed.sharding import exchange
from trainer.distributed.sharding.layout import LAYOUTS

METHODS = ("ring", "all_gather", "all_to_all")
KERNELS = [kernel.name for kernel in (CpuFlash(), *CUDA_KERNELS)]
_OTHER_DEGREES = (2, 4, 8, 16)
"""For which a row says how large the buffers of K and V would be."""


@dataclass(frozen=True)
class Times:
    """One forward and backward: seconds of a clock that all processes share, and CPU seconds of all threads."""

    start: float
    middle: float
    end: float
    cpu: float


# ---- the contenders


def timed(attention: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor]) -> Times:
    """One forward and backward by autograd."""
    *leaves, dout = inputs
    cpu, start = time.process_time(), time.monotonic()
    out = attention(*leaves)
    middle = time.monotonic()
    torch.autograd.grad(out, leaves, dout)
    return Times(start, middle, time.monotonic(), time.process_time() - cpu)


class Whole:
    """One process that computes everything by PyTorch's own attention."""

    def __init__(self, problem: Problem, threads: int) -> None:
        torch.set_num_threads(threads)
        *leaves, dout = problem.inputs()
        self._inputs = [*(x.requires_grad_() for x in leaves), dout]

    def close(self) -> None:
        pass

    def run(self) -> Times:
        return timed(lambda *qkv: scaled_dot_product_attention(*qkv, is_causal=True, enable_gqa=True), self._inputs)


class Share:
    """One rank of a group that computes it together."""

    def __init__(self, problem: Problem, threads: int, methods: Sequence[str]) -> None:
        torch.set_num_threads(threads)
        self._problem = problem
        mesh = init_device_mesh("cpu", (problem.degree,))
        indices = torch.from_numpy(problem.layout.indices(dist.get_rank()))
        *leaves, dout = (x.transpose(1, 2)[:, indices].transpose(1, 2) for x in problem.inputs())
        self._inputs = [*(x.requires_grad_() for x in leaves), dout]
        self._lives = {
            method: LivePlan(mesh, problem.layout, options=ContextParallelOptions(method, problem.load_balancer))
            for method in methods
        }
        self._open = ExitStack()
        batch = problem.batch
        self._handles = {m: self._open.enter_context(opened(live, batch)) for m, live in self._lives.items()}

    def close(self) -> None:
        self._open.close()

    def run(self, method: str) -> Times:
        plan, scale = self._handles[method], self._problem.scale
        dist.barrier()
        return timed(lambda q, k, v: context_parallel_attention(q, k, v, plan, scale)[0], self._inputs)

    def account(self, method: str) -> dict[str, dict[str, int]]:
        """Bytes sent by kind, and the peak of memory in each direction, of one call that is not timed."""
        q, k, v, dout = (x.detach() for x in self._inputs)
        run = self._lives[method].execution(q, k, v, range(self._problem.batch), is_causal=True, window=0)
        before = Counter(exchange.bytes_sent)
        peaks = {}
        with PeakBytes(q, k, v) as meter:
            out, lse = run.forward(q, k, v, self._problem.scale)
            peaks["forward"] = meter.peak
        with PeakBytes(q, k, v, dout, out, lse) as meter:
            gradients = run.backward(dout, q, k, v, out, lse, self._problem.scale)
            peaks["backward"] = meter.peak
        del gradients
        return {"bytes_sent": dict(Counter(exchange.bytes_sent) - before), "peak_bytes": peaks}


class PeakBytes(TorchDispatchMode):
    """The most bytes of tensors that were alive at once, of those made under it; the kernels' own scratch is not seen.

    existing: tensors whose memory does not count.
    """

    def __init__(self, *existing: torch.Tensor) -> None:
        super().__init__()
        self.peak = 0
        self._existing = {x.untyped_storage()._cdata for x in existing}
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in self._existing:
                storage = x.untyped_storage()
                self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._made = {key: made for key, made in self._made.items() if not made[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._made.values()))
        return out


# ---- processes


class Team:
    """One process for the whole and one for each rank; those that are not asked sleep on their pipes."""

    def __init__(self, degree: int) -> None:
        self.degree = degree

    def __enter__(self) -> "Team":
        self._folder = tempfile.TemporaryDirectory()
        context = torch.multiprocessing.get_context("spawn")
        self._members: list[tuple[Any, Connection]] = []
        for rank in (None, *range(self.degree)):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, self.degree, self._folder.name), daemon=True)
            process.start()
            theirs.close()
            self._members.append((process, ours))
        return self

    def __exit__(self, *_: object) -> None:
        for process, connection in self._members:
            connection.close()
            process.join(timeout=5)
            process.kill()
        self._folder.cleanup()

    def whole(self, name: str, *args: object) -> Any:
        return self._ask(self._members[:1], name, args)[0]

    def ranks(self, name: str, *args: object) -> list[Any]:
        return self._ask(self._members[1:], name, args)

    def _ask(self, members: list[tuple[Any, Connection]], name: str, args: tuple[object, ...]) -> list[Any]:
        answers: dict[Connection, Any] = {}
        connections = [connection for _, connection in members]
        for connection in connections:
            connection.send((name, args))
        while len(answers) < len(members):
            for ready in wait([c for c in connections if c not in answers]):
                try:
                    ok, answers[ready] = ready.recv()
                except EOFError:
                    raise RuntimeError("a process of the benchmark died") from None
                if not ok:
                    raise RuntimeError(answers[ready])
        return [answers[connection] for connection in connections]


def _serve(connection: Connection, rank: int | None, degree: int, folder: str) -> None:
    """Body of a process: prepares what it is told and then measures, until the other end hangs up."""
    if rank is not None:
        dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=degree)
    contender: Whole | Share | None = None
    while True:
        try:
            name, args = connection.recv()
        except EOFError:
            break
        try:
            if name == "prepare":
                if contender is not None:
                    contender.close()
                contender, answer = None, None  # the memory of the last one first
                contender = Whole(*args) if rank is None else Share(*args)
            else:
                answer = getattr(contender, name)(*args)
            connection.send((True, answer))
        except Exception:
            connection.send((False, traceback.format_exc()))
    if rank is not None:
        dist.destroy_process_group()


def rank_rows(args: argparse.Namespace) -> Iterator[Row]:
    """Every length and degree, method by method."""
    for degree in args.degrees:
        with Team(degree) as team:
            for problem in problems(args, degree):
                team.whole("prepare", problem, degree * args.threads)
                team.ranks("prepare", problem, args.threads, args.methods)
                yield from measure(problem, args.methods, args.repeats, team)


def measure(problem: Problem, methods: Sequence[str], repeats: int, team: Team) -> Iterator[Row]:
    """Rounds of one process and every method in turn, after one call of each that is not timed."""
    team.whole("run")
    accounts = {method: team.ranks("account", method) for method in methods}
    whole: list[Times] = []
    shares: dict[str, list[list[Times]]] = {method: [] for method in methods}
    for _ in range(repeats):
        whole.append(team.whole("run"))
        for method in methods:
            shares[method].append(team.ranks("run", method))
    for method in methods:
        check_bytes(problem, method, [account["bytes_sent"] for account in accounts[method]])
        yield {
            "method": method,
            "degree": problem.degree,
            "seq_len": problem.seq_len,
            **compared(whole, shares[method]),
            **worth(problem, method, whole, shares[method]),
            "peak_bytes": {name: max(one["peak_bytes"][name] for one in accounts[method]) for name in DIRECTIONS},
            **buffers(problem, method),
        }


# ---- arithmetic


def span(times: Sequence[Times]) -> float:
    """Seconds from the first start to the last end of several ranks."""
    return max(one.end for one in times) - min(one.start for one in times)


def compared(whole: Sequence[Times], shares: Sequence[Sequence[Times]]) -> Row:
    """Ratios of the ranks' times to those of the same round's one process; milliseconds, medians of each by itself.

    cpu_ratio: of the CPU time of all threads, which other work on the machine disturbs least.
    """
    ratios = [span(ranks) / span([one]) for one, ranks in zip(whole, shares, strict=True)]
    cpu = [sum(rank.cpu for rank in ranks) / one.cpu for one, ranks in zip(whole, shares, strict=True)]
    forward, backward = (
        statistics.median(max(length(rank) for rank in ranks) for ranks in shares)
        / statistics.median(length(one) for one in whole)
        for length in (lambda x: x.middle - x.start, lambda x: x.end - x.middle)
    )
    return {
        "ratio": round(statistics.median(ratios), 4),
        "ratio_range": [round(min(ratios), 4), round(max(ratios), 4)],
        "ratio_of_fastest": round(min(map(span, shares)) / min(span([one]) for one in whole), 4),
        "cpu_ratio": round(statistics.median(cpu), 4),
        "forward_ratio": round(forward, 4),
        "backward_ratio": round(backward, 4),
        "ms": round(1e3 * statistics.median(map(span, shares)), 2),
        "whole_ms": round(1e3 * statistics.median(span([one]) for one in whole), 2),
    }


def worth(problem: Problem, method: str, whole: Sequence[Times], shares: Sequence[Sequence[Times]]) -> Row:
    """TFLOP/s of all ranks together and of the one process, by the plan's FLOPs; bytes that all ranks send by kind."""
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
    """What every rank sent is what its plan said.

    Raises:
        RuntimeError: it is not.
    """
    for rank, (sent, costs) in enumerate(zip(counted, problem.costs(method), strict=True)):
        planned = sum((cost.bytes_sent for cost in costs.values()), Counter())
        if +planned != Counter(sent):
            raise RuntimeError(f"{method}: rank {rank} sent {sent} bytes, and its plan says {dict(planned)}")


def buffers(problem: Problem, method: str) -> Row:
    """The most that buffers of K and V (and of their gradients) take on a rank, in bytes and in shards of K and V.

    buffers: in shards, for other degrees too, with as many tokens on a rank: what grows with the degree is seen.
    """
    local = problem.seq_len // problem.degree
    rows: Row = {"workspace_bytes": _workspace(problem, method)}
    for degree in sorted({*_OTHER_DEGREES, problem.degree}):
        if method == "all_to_all" and problem.heads % degree:
            continue
        other = Problem(**{**asdict(problem), "degree": degree, "seq_len": local * degree})
        shard = 2 * other.batch * other.kv_heads * other.head_dim * getattr(torch, other.dtype).itemsize * local
        found = {name: round(size / shard, 2) for name, size in _workspace(other, method).items()}
        rows.setdefault("buffers", {})[str(degree)] = found
    return rows


def _workspace(problem: Problem, method: str) -> dict[str, int]:
    costs = problem.costs(method)
    return {name: max(rank[name].workspace for rank in costs) for name in DIRECTIONS}


# ---- command line


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{message}; see --help\n")


def parser() -> argparse.ArgumentParser:
    described = _Parser(description=__doc__.splitlines()[0])
    add = described.add_argument
    add("--seq-len", nargs="+", type=int, default=[4096, 16384], help="tokens of the sequence")
    add("--degrees", nargs="+", type=int, default=[2], help="how many ranks share it")
    add("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    add("--load-balancer", choices=LAYOUTS, default="head_tail")
    add("--batch", type=int, default=1)
    add("--heads", type=int, default=8)
    add("--kv-heads", type=int, default=2)
    add("--head-dim", type=int, default=64)
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    add("--repeats", type=int, default=5, help="rounds, after one that does not count")
    add("--threads", type=int, default=1, help="of each rank")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: as with --tiles")
    add("--tiles", action="store_true", help="every rank's tiles on one device, one rank after another, nothing sent")
    add("--kernels", nargs="+", choices=KERNELS, help="with --tiles or cuda; all that can do it")
    add("--json", type=Path, metavar="FILE", help="write the rows there, and where they come from")
    return described


def check(args: argparse.Namespace) -> None:
    """Settle what is left open.

    Raises:
        ConfigError: values that nothing can be measured with.
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
    args.tiles = args.tiles or args.device == "cuda"
    if args.kernels and not args.tiles:
        raise ConfigError("--kernels is for --tiles and --device cuda; ranks on a CPU use cpu_flash")
    dtype = getattr(torch, args.dtype)
    for name in args.kernels or ():
        if not _can(name, args.device, dtype, args.head_dim):
            raise ConfigError(f"--kernels {name} cannot do {args.dtype} heads of size {args.head_dim} on {args.device}")
    args.kernels = args.kernels or [name for name in KERNELS if _can(name, args.device, dtype, args.head_dim)]


def _can(name: str, device: str, dtype: torch.dtype, head_dim: int) -> bool:
    try:
        choose_kernel(device, dtype, head_dim, name)
    except ConfigError:
        return False
    return True


def main(argv: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if argv is None else argv
    args = parser().parse_args(given)
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
    found: list[Row] = []
    result = made_with("scripts/benchmarks/context_parallel.py", given, device=device) | {"results": found}
    for row in (tile_rows if args.tiles else rank_rows)(args):
        found.append(row | settings)
        low, high = row["ratio_range"]
        print(" ".join(f"{row[column]:>11}" for column in columns), f" {low} .. {high}", flush=True)
        if args.json is not None:  # after every row, so that an interrupted run leaves what it has
            args.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
