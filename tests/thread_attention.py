"""Attention over ranks that are threads: its cases, and their errors against attention written out.

A row of settings names method, degree, mask, kernel and load balancer. On a GPU, nothing here needs pytest.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from unittest import mock

import torch

from longshard.context.attention import context_parallel_attention
from longshard.context.attention_inputs import AttentionSettings
from longshard.context.execution import build
from longshard.context.execution.kernels.cuda import CudnnVarlen
from longshard.context.execution.kernels.head_groups import HeadGroups
from longshard.context.live import LivePlan, flat_mesh, opened
from longshard.context.planning.balance import LOAD_BALANCERS
from longshard.context.planning.capabilities import CAPABILITIES
from longshard.context.planning.options import ContextParallelOptions
from longshard.sharding.layout import AxisLayout
from tests.covering import Row
from tests.distributed.attention_cases import BATCH, Case, oracle, relative
from tests.thread_ranks import ThreadMesh, run_ranks

SCALE = 0.3
LIMIT = 500.0  # seconds for a case
EXACT = 1e-10
_LARGE = 32  # queries and keys of a tile that `cudnn_varlen` gives to cuDNN on a GPU here
FLOOR = 1e-6  # what merging in float32 may add to the error of a kernel

_HYBRID = {"2": (2, 1), "4": (2, 2), "8": (2, 4)}  # degree -> size of a head group, groups
# with "1": one key/value head at a time; with "q": one query head
_METHODS = ("ring", "all_gather", "all_gather 1", "all_to_all", "all_to_all 1", "all_to_all q", "hybrid", "hybrid 1")
_MASKS = ("causal", "window", "documents", "window in documents")
_KERNELS = {
    "cpu": [
        *("cpu_flash float64", "cpu_flash bfloat16", "math float64"),
        *(f"{name} float64" for name in ("cuda_flash", "efficient", "cudnn", "varlen", "cudnn_varlen")),
    ],
    "cuda": [
        *("math float64", "cuda_flash bfloat16", "varlen bfloat16", "efficient bfloat16", "efficient float32"),
        *("cudnn bfloat16", "cudnn_varlen bfloat16"),
    ],
}


def axes(device: str) -> dict[str, tuple[str, ...]]:
    return {
        "method": _METHODS,
        "degree": tuple(_HYBRID),
        "mask": _MASKS,
        "kernel": tuple(_KERNELS[device]),
        "balancer": tuple(LOAD_BALANCERS),
    }


def allowed(row: Row) -> bool:
    """A kernel without windows has none."""
    can = CAPABILITIES[row.get("kernel", "math").split()[0]]
    return can.bands or can.masks or "window" not in row.get("mask", "")


def case_of(row: Row, device: str) -> Case:
    method, *passes = row["method"].split()
    kernel, dtype = row["kernel"].split()
    is_stand_in = device == "cpu" and CAPABILITIES[kernel].device == "cuda"
    options = ContextParallelOptions(
        method,
        row["balancer"],
        "auto" if is_stand_in else kernel,
        heads_per_pass=int("1" in passes),
        query_heads_per_pass=int("q" in passes),
        hybrid_degrees=_HYBRID[row["degree"]] if method == "hybrid" else None,
    )
    seq_len, head_dim, window = (53, 8, 7) if device == "cpu" else (509, 64, 70)
    return Case(
        seq_len,
        (8, 2),
        head_dim,
        getattr(torch, dtype),
        options,
        window=window if "window" in row["mask"] else 0,
        mask="documents" if "documents" in row["mask"] else "none",
    )


def attended(rank: int, mesh: ThreadMesh, case: Case, layout: AxisLayout) -> list[torch.Tensor]:
    """Output and gradients of q, k, v, of this rank's rows."""
    degrees = case.options.hybrid_degrees
    flat, groups = flat_mesh(mesh.reshaped(*degrees[::-1]) if degrees else mesh, case.options)
    own = torch.from_numpy(layout.indices(rank))
    # in memory as a projection gives them: (B, S, H, D)
    shards = (x[:, :, own].transpose(1, 2).contiguous().transpose(1, 2) for x in case.inputs())
    *leaves, cotangent = (x.to(mesh.device_type) for x in shards)
    leaves = [x.requires_grad_() for x in leaves]
    with opened(LivePlan(flat, layout, case.batch_mask, case.options, groups=groups), BATCH) as handle:
        out, *_ = context_parallel_attention(*leaves, handle, AttentionSettings(SCALE, case.is_causal, case.window))
        return [x.detach().cpu() for x in (out, *torch.autograd.grad(out, leaves, cotangent))]


def errors(case: Case, parts: list[list[torch.Tensor]], layout: AxisLayout) -> list[float]:
    """Relative errors of output, dq, dk, dv on the whole sequence."""
    results = []
    for number, whole in enumerate(wanted(dataclasses.replace(case, options=ContextParallelOptions()))):
        got = torch.empty_like(whole)
        for rank, part in enumerate(parts):
            got[:, :, torch.from_numpy(layout.indices(rank))] = part[number].double()
        results.append(relative(got, whole))
    return results


@cache
def wanted(case: Case) -> list[torch.Tensor]:
    return [x.detach() for x in oracle(case, SCALE)]


def errors_on(degree: int, case: Case, device: str) -> list[float]:
    layout = case.options.layout(case.seq_len, degree, case.batch_mask)
    return errors(case, run_ranks(degree, attended, case, layout, device=device, limit=LIMIT), layout)


@cache
def own_errors(case: Case, device: str) -> list[float]:
    """Errors of the kernel itself: one rank, one tile for each document."""
    return errors_on(1, case, device)


@contextmanager
def kernel_of(row: Row, device: str) -> Iterator[None]:
    """Use stand-ins for kernels of GPUs on a CPU; on a GPU, let `cudnn_varlen` take small tiles for large."""
    name = row["kernel"].split()[0]
    with ExitStack() as stack:
        if device == "cpu" and CAPABILITIES[name].device == "cuda":
            from tests.unit.kernel_stand_ins import KERNELS  # needs pytest

            stand_in = next(kernel for kernel in KERNELS if kernel.name == name)
            stack.enter_context(mock.patch.object(build, "choose_kernel", return_value=stand_in))
        elif name == "cudnn_varlen":
            kernel = CudnnVarlen()
            kernel.capabilities = dataclasses.replace(kernel.capabilities, large=_LARGE)
            stack.enter_context(mock.patch.object(build, "choose_kernel", return_value=HeadGroups(kernel)))
        yield


def found_and_bounds(row: Row, device: str) -> tuple[list[float], list[float]]:
    """Errors of output, dq, dk, dv on the ranks, and their bounds: exact, or twice the kernel's error on one rank."""
    case = case_of(row, device)
    with kernel_of(row, device):
        row_errors = errors_on(int(row["degree"]), case, device)
        if case.dtype is torch.float64:
            return row_errors, [EXACT] * 4
        alone = dataclasses.replace(case, options=ContextParallelOptions(kernel=case.options.kernel))
        bounds = [2 * error + FLOOR for error in own_errors(alone, device)]
        assert max(bounds) < 0.05
        return row_errors, bounds
