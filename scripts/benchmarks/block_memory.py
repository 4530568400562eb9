"""Tensors alive while a checkpointed block of a million-token job is recomputed, traced on a simulated GPU.

    python scripts/benchmarks/block_memory.py --method all_to_all

Llama 3 8B, 1,048,576 tokens over 8 ranks, mode "full", inputs offloaded, the feed-forward network in parts of 8,192.
For each part of a block's backward, the report has the peak of the bytes allocated since the block began, in KiB for
each token of a rank. The block's input and the gradient of its output count. It also lists the tensors at that moment.
"""

import argparse
import subprocess
import sys
import tempfile
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from a clone, installed or not

import torch

from lct_planner import shim
from lct_planner.tracing import Recorder, trace
from tests.fake_cuda import table
from trainer.models.block import TransformerBlock

_RANKS = 8
_TOKENS = 131_072
_PARTS = {
    ("attention.py", "_differentiate"): "attention, backward",
    ("tiles.py", "backward"): "feed-forward, backward",
    ("attention.py", "_forward"): "attention, recomputed",
    ("tiles.py", "in_tiles"): "feed-forward, recomputed",
    ("decoder.py", "forward"): "the rest, recomputed",
}
"""Function on the stack -> the part of a block's backward that runs; the innermost one counts."""
_REST = "the rest, backward"
Made = tuple[int, str]


class Alive(Recorder):
    """A recorder that describes each allocation, and keeps the peak of each part of one block's backward."""

    def __init__(self) -> None:
        super().__init__("cuda")
        self.made: dict[int, Made] = {}
        """Number of a tensor's memory -> its bytes, and the tensor's shape, data type, operator, and line."""
        self.before = self.number = self.blocks = 0
        self.most: dict[str, int] = defaultdict(int)
        self.at: dict[str, list[Made]] = {}

    def start_block(self) -> None:
        """Begin the next block; allocations that are alive now are not counted for it."""
        self.blocks += 1
        self.before = self.number

    def _alive(self, tensors: Iterable[Any], name: str) -> None:
        tensors = [x for x in tensors if isinstance(x, torch.Tensor) and x.device.type == "cuda"]
        stack = _stack() if self.step else []
        for x in tensors:
            storage = x.untyped_storage()
            if storage not in self._blocks:
                description = f"{'x'.join(map(str, x.shape))} {str(x.dtype)[6:]} {name} {_line(stack)}"
                self.number += 1
                self.made[self.number] = storage.nbytes(), description
                weakref.finalize(storage, self.made.pop, self.number, None)
        super()._alive(tensors, name)
        if self.blocks == 2:
            self._count(next((_PARTS[at] for *at_, _ in stack if (at := tuple(at_)) in _PARTS), _REST))

    def _count(self, part: str) -> None:
        alive = [made for number, made in self.made.items() if number > self.before]
        size = sum(size for size, _ in alive)
        if size > self.most[part]:
            self.most[part], self.at[part] = size, alive


def _stack() -> list[tuple[str, str, int]]:
    """Return file, function and line of the running functions of `longshard` and `trainer`, innermost first."""
    frame = sys._getframe(1)
    functions = []
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if {"longshard", "trainer"} & {*path.parts[-5:]}:
            functions.append((path.name, frame.f_code.co_name, frame.f_lineno))
        frame = frame.f_back
    return functions


def _line(stack: list[tuple[str, str, int]]) -> str:
    return f"({stack[0][0]}:{stack[0][2]})" if stack else ""


def report(args: argparse.Namespace) -> None:
    """Trace a step and print the parts of a block's backward.

    Args:
        args: The command line.
    """
    parts = f"--activation_checkpoint.mlp_chunk_tokens={args.mlp_chunk_tokens}"
    queries = args.query_heads_per_pass
    passes = [f"--parallelism.context_parallel_query_heads_per_pass={queries}"] if queries else []
    settings = table._cp(_RANKS, args.method, table._MILLION, *table._OFFLOADED, parts, *passes, *args.arguments)
    alive = Alive()
    forward = TransformerBlock.forward

    def block(self: TransformerBlock, *inputs: Any, **options: Any) -> torch.Tensor:
        if torch._C._current_graph_task_id() != -1:
            alive.start_block()
        return forward(self, *inputs, **options)

    job = table.Job("", _RANKS, 2, settings, layers=args.layers).resolved()
    with mock.patch.object(TransformerBlock, "forward", block):
        peak, _ = trace(job, 2, recorder=alive).peak(1)
    print(f"{args.method}: {peak / 2**30:.1f} GiB at the peak of the step, {args.layers} layers")
    for part, most in alive.most.items():
        print(f"\n{most / 1024 / _TOKENS:6.1f} KiB  {part}")
        sizes: Counter[str] = Counter()
        for size, description in alive.at[part]:
            sizes[description] += size
        for description, size in sizes.most_common():
            if size >= args.least * 1024 * _TOKENS:
                print(f"{size / 1024 / _TOKENS:10.2f}  {description}")


def main(argv: Sequence[str] | None = None) -> int:
    """Start the process that reports, with the library that it needs.

    Args:
        argv: The command line. None: the process's own.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="all_to_all")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--mlp-chunk-tokens", type=int, default=8192)
    parser.add_argument("--query-heads-per-pass", type=int, default=0, help="query heads a pass of all_to_all; 0: all")
    parser.add_argument("--least", type=float, default=0.25, help="KiB a token of the tensors that are listed")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs="*", help="further arguments of the job")
    args = parser.parse_args(argv)
    if args.inside:
        report(args)
        return 0
    with tempfile.TemporaryDirectory() as folder, suppress(KeyboardInterrupt):
        command = [sys.executable, __file__, "--inside", *(sys.argv[1:] if argv is None else argv)]
        return subprocess.run(command, env=shim.environment(shim.build(Path(folder)))).returncode


if __name__ == "__main__":
    sys.exit(main())
