"""Time and memory of the token losses from hidden states, forward and backward: with all logits at once, and in chunks.

python scripts/benchmarks/chunked_loss.py --tokens 8192 --dim 512 --vocab 32000
python scripts/benchmarks/chunked_loss.py --count --tokens 64 --chunks 0 64 --dtype bfloat16
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from a clone, installed or not

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.components.device_peaks import peak_memory_gib
from trainer.components.loss import token_losses
from trainer.models.chunked_loss import Chunks, chunked_token_losses


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--tokens", type=int, default=8192)
    p.add_argument("--dim", type=int, default=512)
    p.add_argument("--vocab", type=int, default=32000)
    p.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    p.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    p.add_argument(
        "--chunks",
        type=int,
        nargs="+",
        default=[0, 256, 512, 1024, 2048],
        help="tokens of a chunk; 0: all logits at once",
    )
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--count", action="store_true", help="count operators that read or write logits, instead of timing")
    p.add_argument("--peak", action="store_true", help=argparse.SUPPRESS)  # runs in a separate process
    return p


def problem(args: argparse.Namespace) -> Callable[[int], None]:
    """Return a function that runs the loss forward and backward.

    Args:
        args: The command line.

    Returns:
        A function of the tokens of a chunk; 0 computes all logits at once.
    """
    settings = {"dtype": getattr(torch, args.dtype), "device": args.device, "requires_grad": True}
    hidden = torch.randn(1, args.tokens, args.dim, **settings)
    weight = torch.randn(args.vocab, args.dim, **settings)
    labels = torch.randint(args.vocab, (1, args.tokens), device=args.device)

    def run(tokens: int) -> None:
        if tokens:
            losses = chunked_token_losses(hidden, weight, labels, Chunks(tokens))
        else:
            losses = token_losses(hidden @ weight.T, labels)
        torch.autograd.grad(losses.sum() / args.tokens, (hidden, weight))
        if args.device == "cuda":
            torch.cuda.synchronize()

    return run


def peak(args: argparse.Namespace) -> float:
    """Return the peak memory in MiB of one run, above its inputs and the loaded code.

    Args:
        args: The command line; the first entry of `--chunks` is the chunk size.
    """
    run = problem(args)
    before = peak_memory_gib(torch.device(args.device))
    run(args.chunks[0])
    return 1024 * (peak_memory_gib(torch.device(args.device)) - before)


class Passes(TorchDispatchMode):
    """Counts operators with an argument or a result that has as many elements as the logits of a chunk.

    Attribute `bytes`: the bytes of these tensors. The operators in `FEW` read or write one logit of each token and are
    not included.

    Args:
        logits: Number of logits of a chunk.
    """

    FEW = ("gather", "scatter_")

    def __init__(self, logits: int) -> None:
        super().__init__()
        self.logits = logits
        self.seen: Counter[str] = Counter()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        moved = [x for x in (*_tensors(args), *_tensors(result)) if x.numel() == self.logits]
        if moved and not func.is_view and name not in ("empty_like", "_unsafe_view"):
            self.seen[name] += 1
            self.bytes += 0 if name in self.FEW else sum(x.numel() * x.element_size() for x in moved)
        return result


def _tensors(x: Any) -> list[torch.Tensor]:
    if isinstance(x, torch.Tensor):
        return [x]
    return [y for each in x for y in _tensors(each)] if isinstance(x, tuple | list) else []


def count(args: argparse.Namespace) -> None:
    """Print, for each chunk size, the operators on logits in one forward and backward, and their bytes for a logit.

    Args:
        args: The command line.
    """
    run = problem(args)
    for tokens in args.chunks:
        size = min(tokens or args.tokens, args.tokens)
        with Passes(size * args.vocab) as passes:
            run(tokens)
        chunks = args.tokens // size
        few = sum(passes.seen[name] for name in Passes.FEW) / chunks
        whole = passes.seen.total() / chunks - few
        row = {"chunk_tokens": tokens, "whole": whole, "few": few}
        row["bytes_of_a_logit"] = passes.bytes / args.tokens / args.vocab
        print(json.dumps(row | {"operators": dict(passes.seen)}), flush=True)


def main() -> None:
    """Measure, or count with `--count`, and print a line of JSON for each chunk size."""
    args = parser().parse_args()
    if args.count:
        count(args)
        return
    if args.peak:
        print(peak(args))
        return
    peaks = {}
    for tokens in args.chunks:  # before other runs: a new process starts with the peak of its parent
        command = [sys.executable, __file__, *sys.argv[1:], "--chunks", str(tokens), "--peak"]
        peaks[tokens] = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    run = problem(args)
    times = {tokens: [] for tokens in args.chunks}
    for tokens in args.chunks:
        run(tokens)
    for _ in range(args.rounds):
        for tokens in args.chunks:
            start = time.perf_counter()
            run(tokens)
            times[tokens].append(time.perf_counter() - start)
    for tokens in args.chunks:
        milliseconds = round(1e3 * statistics.median(times[tokens]))
        row = {"chunk_tokens": tokens, "ms": milliseconds, "peak_mib": round(peaks[tokens])}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
