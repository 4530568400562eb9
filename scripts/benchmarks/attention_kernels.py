"""Speed and accuracy of each attention kernel on one tile, forward and backward, and of merging partial results.

python scripts/benchmarks/attention_kernels.py --lengths 1024 4096 --dtype bfloat16 --json
python scripts/benchmarks/attention_kernels.py --merging --lengths 16384 65536 --heads 32
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from a clone, installed or not

import torch

from longshard.context.execution.kernels.base import BackwardInputs, Kernel
from longshard.context.execution.kernels.choose import CUDA_KERNELS, choose_kernel
from longshard.context.execution.kernels.cpu import CpuFlash, Math
from longshard.context.execution.merging import Merge, fused_merge, merge_eagerly
from longshard.context.planning.mask import Relation
from longshard.sharding.errors import OptionError

RELATIONS = {"full": Relation.FULL, "causal": Relation.CAUSAL}
KERNELS = [kernel.name for kernel in (CpuFlash(), *CUDA_KERNELS, Math())]
MERGES: dict[str, Callable[[], Merge]] = {"eager": lambda: merge_eagerly, "fused": fused_merge}
_ROWS_COMPARED = 256  # rows of the output compared with float64
_COLUMNS = (
    *("kernel", "relation", "length", "forward_ms", "backward_ms", "forward_tflops", "backward_tflops", "gb_per_s"),
    "error",
)


def seconds(work: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Return the median time of a call, in seconds. Two calls before the first measured one are not counted.

    Args:
        work: The function to time.
        repeats: Number of measured calls.
        device: Device to synchronize before and after each call.
    """
    times = []
    for number in range(repeats + 2):
        _synchronize(device)
        start = time.perf_counter()
        work()
        _synchronize(device)
        if number >= 2:
            times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(kernel: Kernel, relation: Relation, length: int, args: argparse.Namespace) -> dict[str, object]:
    """Measure the forward and backward of one kernel on one tile.

    TFLOP/s count visible pairs of a query and a key; the backward counts 2.5 times the FLOPs of the forward. The error
    is the relative error of the output's last rows.

    Args:
        kernel: The kernel.
        relation: Which keys of the tile each query sees.
        length: Queries and keys of the tile.
        args: The command line.

    Returns:
        A row of the table. If the kernel fails, the row has a note in place of numbers.
    """
    device = torch.device(args.device)
    scale = args.head_dim**-0.5
    generator = torch.Generator(device).manual_seed(0)
    shapes = [(args.batch, heads, length, args.head_dim) for heads in (args.heads, args.kv_heads, args.kv_heads)]
    q, k, v, dout = (
        torch.randn(shape, device=device, generator=generator).to(getattr(torch, args.dtype))
        for shape in (*shapes, shapes[0])
    )
    row: dict[str, object] = {"kernel": kernel.name, "relation": relation.value, "length": length}
    try:
        out, lse = kernel.forward(q, k, v, relation=relation, scale=scale)
        forward = seconds(lambda: kernel.forward(q, k, v, relation=relation, scale=scale), args.repeats, device)
        backward = seconds(
            lambda: kernel.backward(BackwardInputs(dout, q, k, v, out, lse), relation=relation, scale=scale),
            args.repeats,
            device,
        )
    except Exception as error:  # no memory, a missing operator, or a compiler error: continue with the next row
        return {**row, "note": _said(error)}
    flops = 4 * args.batch * args.heads * args.head_dim * relation.pairs(length, length)
    return {
        **row,
        "forward_ms": round(forward * 1e3, 3),
        "backward_ms": round(backward * 1e3, 3),
        "forward_tflops": round(flops / forward / 1e12, 3),
        "backward_tflops": round(2.5 * flops / backward / 1e12, 3),
        "error": float(f"{_error(q, k, v, out, relation, scale):.2e}"),
    }


def _error(q, k, v, out, relation: Relation, scale: float) -> float:
    """Return the relative norm of the error of the last queries of the first sequence, against float64."""
    rows = min(_ROWS_COMPARED, q.shape[2])
    # `Math` aligns CAUSAL to the bottom right, so the relation of the last queries to all keys stays the same.
    wanted, _ = Math().forward(*(x.double() for x in (q[:1, :, -rows:], k[:1], v[:1])), relation=relation, scale=scale)
    return ((out[:1, :, -rows:] - wanted).norm() / wanted.norm()).item()


def measure_merging(name: str, length: int, args: argparse.Namespace) -> dict[str, object]:
    """Measure the merging of a partial result into a total.

    GB/s count the bytes that a single kernel must move.

    Args:
        name: A key of `MERGES`.
        length: Queries.
        args: The command line.

    Returns:
        A row of the table. If the merge fails, the row has a note in place of numbers.
    """
    device = torch.device(args.device)
    part_type = getattr(torch, args.dtype)
    generator = torch.Generator(device).manual_seed(0)
    wide = torch.promote_types(part_type, torch.float32)
    shape = args.batch, length, args.heads, args.head_dim
    total, out = (torch.randn(shape, device=device, generator=generator).transpose(1, 2) for _ in range(2))
    lses = [torch.randn(total.shape[:3], device=device, generator=generator, dtype=wide) for _ in range(2)]
    tensors = total.to(wide), lses[0], out.to(part_type), lses[1]
    wanted = [x.double() for x in tensors]
    row: dict[str, object] = {"kernel": f"merge_{name}", "relation": "-", "length": length}
    try:
        merge = MERGES[name]()
        merge(*tensors)
        merge_eagerly(*wanted)
        difference = ((tensors[0] - wanted[0]).norm() / wanted[0].norm()).item()
        duration = seconds(lambda: merge(*tensors), args.repeats, device)
    except Exception as error:  # Triton is missing, or there is no memory
        return {**row, "note": _said(error)}
    moved = total.numel() * (2 * wide.itemsize + part_type.itemsize)
    return {
        **row,
        "forward_ms": round(duration * 1e3, 3),
        "gb_per_s": round(moved / duration / 1e9, 1),
        "error": float(f"{difference:.2e}"),
    }


def _said(error: Exception) -> str:
    """Return the type and the first line of an error."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def rows(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Yield the rows of the table: every kernel, relation and length, or with `--merging` every merge and length.

    Args:
        args: The command line.
    """
    if args.merging:
        yield from (measure_merging(name, length, args) for name in MERGES for length in args.lengths)
        return
    for name in args.kernels:
        try:
            kernel = choose_kernel(args.device, getattr(torch, args.dtype), args.head_dim, name)
        except OptionError as error:
            yield {"kernel": name, "note": str(error)}
            continue
        for relation in args.relations:
            for length in args.lengths:
                scores = 4 * args.batch * args.heads * length**2
                if name == "math" and scores > args.math_gib * 2**30:
                    note = f"scores of {scores / 2**30:.0f} GiB; allow it with --math-gib"
                    yield {"kernel": name, "relation": relation, "length": length, "note": note}
                else:
                    yield measure(kernel, RELATIONS[relation], length, args)


def main() -> int:
    """Measure, and print the table or a JSON object.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32", "float64"), default="bfloat16")
    parser.add_argument(
        "--kernels", nargs="+", choices=KERNELS, default=None, help="default: all kernels of the device"
    )
    parser.add_argument("--merging", action="store_true", help="measure the merging of partial results, not kernels")
    parser.add_argument("--relations", nargs="+", choices=RELATIONS, default=list(RELATIONS))
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 1024, 2048])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--math-gib", type=float, default=1.0, help="largest matrix of scores for the math kernel")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    args = parser.parse_args()
    if args.kernels is None:
        known = (CpuFlash(), *CUDA_KERNELS, Math())
        args.kernels = [kernel.name for kernel in known if kernel.capabilities.device in (None, args.device)]
    if not args.json:
        print(" ".join(f"{column:>15}" for column in _COLUMNS))
    results = []
    for row in rows(args):
        results.append(row)
        if not args.json:
            cells = (f"{row.get(column, ''):>15}" for column in _COLUMNS)
            print(" ".join(cells) + (f"  {row['note']}" if "note" in row else ""), flush=True)
    if args.json:
        device_name = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
        settings = {**vars(args), "device_name": device_name, "threads": torch.get_num_threads()}
        print(json.dumps({"torch": torch.__version__, "settings": settings, "rows": results}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
