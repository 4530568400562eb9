"""Linear attention over ranks against one process that computes all of it, and the bytes sent by it and by attention.

    python scripts/benchmarks/linear_attention.py --seq-len 16384 65536 --degrees 2 4 --json rows.json

N ranks with `--threads` threads each, and one process with N times `--threads` threads, run a layer's recurrence
forward and backward in turn. The ratio of a row is the median over the rounds of (time of the ranks) / (time of the one
process). `bytes_sent` counts the bytes that all ranks send, where the program calls collectives. `attention` is the
number of bytes that ring attention with the same heads sends.
"""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from a clone, installed or not

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from longshard import region
from longshard.context.execution.linear_chunks import Tokens
from longshard.context.linear_attention import linear_attention
from longshard.context.planning.cost import AttentionShape, attention_cost
from longshard.context.planning.mask import causal
from longshard.context.planning.methods import make_plan
from longshard.sharding import exchange
from longshard.sharding.layout import LAYOUTS, AxisLayout
from scripts.benchmarks.teams import Row, Team, Times, compared
from scripts.provenance import made_with

KINDS = ("gated_delta", "kimi_delta", "mamba2")


def layout_of(args: argparse.Namespace, seq_len: int, degree: int) -> AxisLayout:
    """Return the layout of a sequence.

    Args:
        args: The command line.
        seq_len: Tokens of the sequence.
        degree: Number of ranks.
    """
    return LAYOUTS[args.layout](seq_len, degree)


def inputs(args: argparse.Namespace, kind: str, seq_len: int) -> list[torch.Tensor | None]:
    """Return the inputs of the recurrence and the gradient of its output, the same in every process.

    Args:
        args: The command line.
        kind: One of `KINDS`.
        seq_len: Tokens of the sequence.

    Returns:
        The tensors q, k and v, (B, S, heads, D). Logarithms of decays, (B, S, heads) or (B, S, heads, D). Beta, (B, S,
            heads), or None for a kind without erasure. The gradient, (B, S, heads, D).
    """
    generator = torch.Generator().manual_seed(seq_len)
    q, k, v, cotangent = (torch.randn(1, seq_len, args.heads, args.head_dim, generator=generator) for _ in range(4))
    decay = torch.rand(*q.shape[: 4 if kind == "kimi_delta" else 3], generator=generator).log()
    beta = None if kind == "mamba2" else torch.rand(q.shape[:3], generator=generator)
    return [q, k / k.norm(dim=-1, keepdim=True), v, decay, beta, cotangent]


class Member:
    """The recurrence in one process: the whole sequence, or in a process group the rank's part.

    Args:
        args: The command line.
        kind: One of `KINDS`.
        seq_len: Tokens of the sequence.
        threads: Number of threads.
    """

    def __init__(self, args: argparse.Namespace, kind: str, seq_len: int, threads: int) -> None:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(args.deterministic)
        *leaves, self._cotangent = inputs(args, kind, seq_len)
        self._plan = None
        self._open = ExitStack()
        if dist.is_initialized():
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            layout = layout_of(args, seq_len, mesh.size())
            own = torch.from_numpy(layout.indices(dist.get_rank()))
            *leaves, self._cotangent = (None if x is None else x[:, own] for x in (*leaves, self._cotangent))
            self._plan = self._open.enter_context(region(mesh, layout, sequences=1)).attention_plan
        self._inputs = [None if x is None else x.requires_grad_() for x in leaves]

    def close(self) -> None:
        """Close the context of the plan."""
        self._open.close()

    def run(self) -> Times:
        """Return the times of one forward and backward."""
        if self._plan is not None:
            dist.barrier()
        cpu = time.process_time()
        start = time.monotonic()
        out = linear_attention(Tokens(*self._inputs, None, 1.0), self._plan)[0]
        middle = time.monotonic()
        torch.autograd.grad(out, [x for x in self._inputs if x is not None], self._cotangent)
        return Times(start, middle, time.monotonic(), time.process_time() - cpu)

    def sent(self) -> int:
        """Return the bytes that this rank sends in one forward and backward."""
        before = Counter(exchange.bytes_sent)
        self.run()
        return sum((Counter(exchange.bytes_sent) - before).values())


def rows(args: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for every degree, length and kind.

    Args:
        args: The command line.
    """
    for degree in args.degrees:
        with Team(degree, Member, Member) as team:
            for seq_len in args.seq_len:
                for kind in args.kinds:
                    team.whole("prepare", args, kind, seq_len, degree * args.threads)
                    team.ranks("prepare", args, kind, seq_len, args.threads)
                    team.whole("run")
                    bytes_sent = sum(team.ranks("sent"))
                    times = [(team.whole("run"), team.ranks("run")) for _ in range(args.repeats)]
                    whole, shares = zip(*times, strict=True)
                    yield {
                        "kind": kind,
                        "degree": degree,
                        "seq_len": seq_len,
                        **compared(whole, shares),
                        "bytes_sent": bytes_sent,
                        "attention": attention_bytes(args, seq_len, degree),
                    }


def attention_bytes(args: argparse.Namespace, seq_len: int, degree: int) -> int:
    """Return the bytes of keys and values that all ranks of a ring send with as many heads, forward and backward.

    Args:
        args: The command line.
        seq_len: Tokens of the sequence.
        degree: Number of ranks.
    """
    layout = layout_of(args, seq_len, degree)
    shape = AttentionShape(1, args.heads, args.heads, args.head_dim, 4)
    plans = [make_plan(layout, causal(seq_len), "ring", rank) for rank in range(degree)]
    costs = [attention_cost(plan, shape, way) for plan in plans for way in ("forward", "backward")]
    return sum(sum(cost.bytes_sent.values()) for cost in costs)


def main(argv: list[str]) -> None:
    """Measure, print a line for each row, and write the rows to `--json`.

    Args:
        argv: The command line.
    """
    described = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = described.add_argument
    add("--seq-len", nargs="+", type=int, default=[16384], help="tokens of the sequence")
    add("--degrees", nargs="+", type=int, default=[2], help="numbers of ranks that share it")
    add("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    add("--layout", choices=LAYOUTS, default="head_tail")
    add("--heads", type=int, default=4)
    add("--head-dim", type=int, default=64, help="K and V")
    add("--threads", type=int, default=1, help="threads of each rank")
    add("--deterministic", action="store_true", help="results equal one process bit for bit")
    add("--repeats", type=int, default=5, help="measured rounds, after a warm-up round")
    add("--json", type=Path, metavar="FILE", help="file for the rows and their origin")
    args = described.parse_args(argv)
    results = []
    for row in rows(args):
        results.append(row)
        sent, attention = (row[name] / 2**20 for name in ("bytes_sent", "attention"))
        where = f"{row['kind']:12} {row['degree']} ranks {row['seq_len']:7,} tokens"
        took = f"{row['ratio']:.2f} of one process's {row['whole_ms']:,.0f} ms"
        print(f"{where}  {took}  {sent:.2f} MiB sent, attention {attention:.2f} MiB", flush=True)
    if args.json is not None:
        head = made_with("scripts/benchmarks/linear_attention.py", argv, device="cpu")
        args.json.write_text(json.dumps(head | {"rows": results}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
