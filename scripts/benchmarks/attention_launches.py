"""CPU time of context-parallel attention on one rank of several: what the host takes to launch a layer.

    python scripts/benchmarks/attention_launches.py --degrees 8
    python scripts/benchmarks/attention_launches.py --degrees 2 4 8 --methods ring all_to_all --kernel cudnn

Kernels are stand-ins that return empty tensors. A merge of partial results is one operator, as on a GPU. PyTorch's fake
process group stands in for communication. Tensors are short, so that Python, the dispatcher and allocations dominate.
The time is the CPU time of the thread, the median of several rounds. A GPU adds the time of each launch itself. Prints
a line of JSON for each degree and method.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from a clone, installed or not

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from longshard.context import attention, live
from longshard.context.attention_inputs import AttentionSettings
from longshard.context.execution import build
from longshard.context.execution.kernels.choose import GpuKernels
from longshard.context.execution.kernels.cuda import CudaFlash, Cudnn
from longshard.context.hooks import AttentionHooks
from longshard.context.planning.options import ContextParallelOptions

_TOKENS, _HEADS, _HEAD_DIM = 64, 8, 16  # sizes on a rank


class _Ops:
    """Attention's operators, which compute nothing."""

    @staticmethod
    def _flash_attention_forward(q: torch.Tensor, *_: Any, **__: Any) -> tuple:
        return torch.empty_like(q), q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)

    @staticmethod
    def _flash_attention_backward(_dout: torch.Tensor, *qkv_and_more: Any, **_: Any) -> tuple:
        return tuple(map(torch.empty_like, qkv_and_more[:3]))

    @staticmethod
    def _scaled_dot_product_cudnn_attention(q: torch.Tensor, *_: Any, **__: Any) -> tuple:
        return torch.empty_like(q), q.new_empty(*q.shape[:3], 1, dtype=torch.float32)

    _scaled_dot_product_cudnn_attention_backward = _flash_attention_backward


KERNELS = {"cuda_flash": CudaFlash(_Ops()), "cudnn": Cudnn(_Ops())}


def measure(degree: int, method: str, kernel: str, rounds: int) -> dict[str, float | int | str]:
    """Return the milliseconds of one forward and one backward on rank 1.

    Args:
        degree: Context-parallel degree.
        method: Context-parallel method.
        kernel: A key of `KERNELS`.
        rounds: Measured rounds; three rounds before them are not counted.
    """
    hybrid = (degree // 2, 2) if method == "hybrid" else None
    options = ContextParallelOptions(method, hybrid_degrees=hybrid)
    shape, names = (hybrid[::-1], ("ring", "heads")) if hybrid else ((degree,), ("cp",))
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=degree)
    try:
        mesh, groups = live.flat_mesh(init_device_mesh("cpu", shape, mesh_dim_names=names), options)
        gpu = GpuKernels(merge=lambda total, *_: total.mul_(1))
        layout = options.layout(_TOKENS * degree, degree)
        plan = live.LivePlan(mesh, layout, options=options, groups=groups, hooks=AttentionHooks(gpu=gpu))
        shape = 1, _TOKENS, _HEADS, _HEAD_DIM
        q, k, v = (torch.zeros(shape, dtype=torch.bfloat16).transpose(1, 2).requires_grad_() for _ in range(3))
        times: list[tuple[float, float]] = []
        with (
            live.opened(plan, 1) as handle,
            mock.patch.object(build, "choose_kernel", return_value=KERNELS[kernel]),
        ):
            for _ in range(rounds + 3):
                start = time.thread_time()
                out, *_ = attention.context_parallel_attention(q, k, v, handle, AttentionSettings(0.1))
                middle = time.thread_time()
                with torch.autograd.set_multithreading_enabled(False):
                    torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
                times.append((middle - start, time.thread_time() - middle))
    finally:
        dist.destroy_process_group()
    forward, backward = (statistics.median(column) * 1e3 for column in zip(*times[3:], strict=True))
    row = {"degree": degree, "method": method, "kernel": kernel}
    return row | {"forward_ms": round(forward, 2), "backward_ms": round(backward, 2)}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure each degree and method.

    Args:
        argv: The command line. None: the process's own.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--degrees", type=int, nargs="+", default=[8], help="context-parallel degrees")
    add("--methods", nargs="+", default=["ring", "all_gather", "all_to_all", "hybrid"], help="hybrid: from degree 4")
    add("--kernel", choices=tuple(KERNELS), default="cudnn")
    add("--rounds", type=int, default=50)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    for degree in args.degrees:
        for method in args.methods:
            print(json.dumps(measure(degree, method, args.kernel, args.rounds)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
