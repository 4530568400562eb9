"""Run rows of the table in this process, and print what was found as JSON.

    LD_PRELOAD=libhooks.so python -m tests.fake_cuda.rows [--only TEXT] [--shard 0/2]

Needs the library of `shim.py`. A row that fails has its error instead of counts.
"""

import argparse
import gc
import json
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import init_device_mesh

from lct_planner.device import FakeDevice, Gpu, entered, machine
from lct_planner.stand_ins import stand_ins
from lct_planner.traced_trainer import kernels_of, patches
from lct_planner.tracing import trace
from longshard.context import attention
from longshard.context.attention_inputs import AttentionSettings
from longshard.context.hooks import AttentionHooks
from longshard.context.live import LivePlan, flat_mesh, opened
from longshard.context.planning.mask import documents_of
from longshard.context.planning.options import ContextParallelOptions
from tests.fake_cuda import table
from tests.fake_cuda.counts import CheckedRecorder, counted
from tests.fake_cuda.faults import OF, Fault, faults
from tests.fake_cuda.operators import CHECKS, flash_bodies, flash_package

_BATCH, _HEADS, _KV_HEADS, _HEAD_DIM, _WINDOW = 1, 32, 8, 128, 4096
_OPERATORS = "context_parallel_attention", "context_parallel_attention_backward"


def count_call(row: table.Call) -> dict[str, Any]:
    """Run attention forward and backward, and return the counts of each."""
    recorder, gpu = CheckedRecorder(), Gpu()
    mode = FakeDevice("cuda", recorder.observe, recorder.around)
    mode.checks, mode.stand_ins = CHECKS, stand_ins() | flash_bodies(row.flash)
    with entered(machine(row.rank, row.ranks, gpu), *patches(gpu), *flash_package(row.flash), *recorder.patches()):
        degrees = {4: (2, 2), 8: (4, 2), 64: (8, 8)}[row.ranks] if row.method == "hybrid" else None
        options = ContextParallelOptions(
            row.method, row.balancer, row.kernel, hybrid_degrees=degrees, keep_exchanged=row.keep
        )
        shape, names = (degrees[::-1], ("ring", "heads")) if degrees else ((row.ranks,), ("cp",))
        mesh, groups = flat_mesh(init_device_mesh("cuda", shape, mesh_dim_names=names), options)
        length = max(16384, 1024 * row.ranks)
        mask = _documents(length) if row.mask == "documents" else None
        layout = options.layout(length, row.ranks, mask)
        rows, window = layout.local_length(row.rank), _WINDOW if row.mask == "window" else 0
        live = LivePlan(mesh, layout, mask, options, groups=groups, hooks=AttentionHooks(gpu=kernels_of(gpu)))
        with opened(live, _BATCH) as handle, mode:
            q, k, v = (_rows(rows, heads, row.dtype) for heads in (_HEADS, _KV_HEADS, _KV_HEADS))
            sinks = torch.empty(_HEADS, device="cuda", requires_grad=True) if row.mask == "sinks" else None
            settings = AttentionSettings(0.1, window=window, keep_exchanged=row.keep)
            out, *_ = attention.context_parallel_attention(q, k, v, handle, settings, sinks=sinks)
            out.backward(torch.empty_like(out))
            for x in (q, k, v):
                assert x.grad.stride() == x.stride()
    return {
        direction: counted(recorder.inside(name))
        for direction, name in zip(("forward", "backward"), _OPERATORS, strict=True)
    }


def _rows(rows: int, heads: int, dtype: str) -> torch.Tensor:
    x = torch.empty(_BATCH, rows, heads, _HEAD_DIM, dtype=getattr(torch, dtype), device="cuda")
    return x.transpose(1, 2).requires_grad_()


def _documents(length: int) -> Any:
    return documents_of(np.sort(np.random.default_rng(0).integers(0, 100, (_BATCH, length)), axis=1))


def count_job(row: table.Job) -> dict[str, Any]:
    """Return the counts of a layer and of the last step, and the peak of its live bytes."""
    last = row.steps
    events = trace(row.resolved(), row.rank, row.gpu, last, CheckedRecorder())
    step = [e for e in events.all if e.step == last]
    result: dict[str, Any] = {"step": counted(step)}
    for direction, name in zip(("forward", "backward"), _OPERATORS, strict=True):
        if layer := events.layer(last, name):
            result[direction] = counted(layer)
    result["waits"] = sorted({f"{e.name} ({e.where})" for e in events.all if e.step and e.where})
    if row.memory:
        result["peak"], result["peak_at"] = events.peak(last)
    return result


def count_fault(row: Fault) -> dict[str, Any]:
    """Run the call in which it is planted."""
    with entered(*row.planted()):
        return count_call(OF)


_FOUND = {table.Call: count_call, table.Job: count_job}


def results(rows: Iterable[table.Call | table.Job | Fault]) -> dict[str, Any]:
    """Return the results of each row, by its name."""
    counts: dict[str, Any] = {}
    for row in rows:
        started = time.perf_counter()
        try:
            counts[row.name] = _FOUND.get(type(row), count_fault)(row)
        except BaseException as error:  # DataDependentOutputException, AssertionError, whatever a GPU path does wrong
            if isinstance(error, KeyboardInterrupt):
                raise
            counts[row.name] = {"error": f"{type(error).__name__}: {error}"[:600]}
            traceback.print_exc()
        seconds = time.perf_counter() - started
        print(f"{seconds:5.1f} s  {row.name}", file=sys.stderr, flush=True)
    return counts


def main(argv: Sequence[str] | None = None) -> int:
    """Print the results of the rows whose names contain a text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a part of the names")
    parser.add_argument("--quick", action="store_true", help="without the rows of WHOLE_ONLY")
    parser.add_argument("--kind", choices=("jobs", "calls", "faults"), help="default: jobs and calls")
    parser.add_argument("--shard", default="0/1", help="I/N: every Nth row, from the Ith")
    args = parser.parse_args(argv)
    part, parts = map(int, args.shard.split("/"))
    kinds = {"jobs": table.jobs, "calls": table.calls, "faults": faults}
    chosen = [kinds[args.kind]] if args.kind else [table.jobs, table.calls]
    rows = [row for kind in chosen for row in kind() if args.only in row.name]
    if args.quick:
        rows = [row for row in rows if row.name not in table.WHOLE_ONLY]
    torch.set_num_threads(1)
    gc.freeze()  # so that no later collection visits imported objects
    print(json.dumps(results(rows[part::parts])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
