"""Law: attention over ranks that are threads is attention written out on the whole sequence, on a CPU and on a GPU.

On a GPU each rank has a stream of its own, and data arrive late. `--device cuda` tests the kernels of GPUs. On a CPU
their operators have stand-ins, in float64.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache, wraps
from itertools import product
from threading import RLock
from typing import Any
from unittest import mock

import pytest
import torch

from tests.covering import Row, covering_array
from tests.distributed.attention_cases import BATCH, Case, oracle, random, relative
from tests.distributed.test_exchange import LAYOUTS, expected, wishes
from tests.distributed.test_region import decoder_region
from tests.thread_ranks import ThreadMesh, run_ranks
from tests.unit.kernel_stand_ins import KERNELS as STAND_INS
from trainer.distributed.context_parallel import live
from trainer.distributed.context_parallel.attention import context_parallel_attention
from trainer.distributed.context_parallel.context import context_parallel
from trainer.distributed.context_parallel.execution import ring, ulysses
from trainer.distributed.context_parallel.execution.kernels.flex import Flex
from trainer.distributed.context_parallel.live import LivePlan, flat_mesh, opened
from trainer.distributed.context_parallel.planning.capabilities import CAPABILITIES
from trainer.distributed.context_parallel.planning.options import ContextParallelError, ContextParallelOptions
from trainer.distributed.sharding import exchange as door
from trainer.distributed.sharding.exchange import Pending, exchange
from trainer.distributed.sharding.layout import LOAD_BALANCERS, AxisLayout

SCALE = 0.3
LIMIT = 500.0  # seconds for a case: flex compiles
EXACT = 1e-10
FLOOR = 1e-6  # what merging in float32 may add to the error of a kernel

_HYBRID = {"2": (2, 1), "4": (2, 2), "8": (2, 4)}  # degree -> size of a head group, groups
# with "1": one key/value head at a time
_METHODS = ("ring", "all_gather", "all_gather 1", "all_to_all", "all_to_all 1", "hybrid", "hybrid 1")
_MASKS = ("causal", "window", "documents", "window in documents")
_KERNELS = {
    "cpu": [
        *("cpu_flash float64", "cpu_flash bfloat16", "math float64"),
        *(f"{kernel.name} float64" for kernel in STAND_INS),
    ],
    "cuda": [
        *("math float64", "cuda_flash bfloat16", "varlen bfloat16", "efficient bfloat16", "efficient float32"),
        *("cudnn bfloat16", "flex bfloat16"),
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


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every two settings together in a quick test; the product of all but the balancers in slow ones."""
    if "row" not in metafunc.fixturenames:
        return
    settings = axes(metafunc.config.getoption("--device"))
    quick = covering_array(settings, allowed)
    settings["balancer"] = ("head_tail",)
    rows = [dict(zip(settings, values, strict=True)) for values in product(*settings.values())]
    slow = [pytest.param(row, marks=pytest.mark.slow) for row in rows if allowed(row) and row not in quick]
    metafunc.parametrize("row", [*quick, *slow], ids=lambda row: "-".join(row[name] for name in settings))


def case_of(row: Row, device: str) -> Case:
    method, *passes = row["method"].split()
    kernel, dtype = row["kernel"].split()
    is_stand_in = device == "cpu" and CAPABILITIES[kernel].device == "cuda"
    options = ContextParallelOptions(
        method,
        row["balancer"],
        "auto" if is_stand_in else kernel,
        heads_per_pass=int(*passes),
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
        out, _ = context_parallel_attention(*leaves, handle, SCALE, case.is_causal, case.window)
        return [x.detach().cpu() for x in (out, *torch.autograd.grad(out, leaves, cotangent))]


def errors(case: Case, parts: list[list[torch.Tensor]], layout: AxisLayout) -> list[float]:
    """Relative errors of output, dq, dk, dv on the whole sequence."""
    found = []
    for number, whole in enumerate(wanted(dataclasses.replace(case, options=ContextParallelOptions()))):
        got = torch.empty_like(whole)
        for rank, part in enumerate(parts):
            got[:, :, torch.from_numpy(layout.indices(rank))] = part[number].double()
        found.append(relative(got, whole))
    return found


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
    """Use stand-ins for kernels of GPUs on a CPU. On a GPU, let one rank at a time compile flex, for any shapes."""
    name, lock = row["kernel"].split()[0], RLock()
    stand_in = next((kernel for kernel in STAND_INS if kernel.name == name), None)
    with ExitStack() as stack:
        if device == "cpu" and stand_in is not None:
            stack.enter_context(mock.patch.object(live, "choose_kernel", return_value=stand_in))
        elif name == "flex":
            limits = {"recompile_limit": 1024, "accumulated_recompile_limit": 1024}
            stack.enter_context(torch._dynamo.config.patch(limits))
            for method in ("forward", "backward"):
                stack.enter_context(mock.patch.object(Flex, method, locked(getattr(Flex, method), lock)))
        yield


def locked(method: Callable, lock: AbstractContextManager) -> Callable:
    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with lock:
            return method(*args, **kwargs)

    return call


def test_attention_of_whole_sequences(row: Row, device: str) -> None:
    """Exact in float64; else at most twice the error of the kernel on one rank."""
    case = case_of(row, device)
    with kernel_of(row, device):
        found = errors_on(int(row["degree"]), case, device)
        if case.dtype is torch.float64:
            bounds = [EXACT] * 4
        else:
            alone = dataclasses.replace(case, options=ContextParallelOptions(kernel=case.options.kernel))
            bounds = [2 * error + FLOOR for error in own_errors(alone, device)]
            assert max(bounds) < 0.05
    assert all(error <= bound for error, bound in zip(found, bounds, strict=True)), (found, bounds)


# ---- the exchange, regions, the context


def exchanged(rank: int, mesh: ThreadMesh, length: int) -> list[tuple[bool, bool]]:
    """Whether results and gradients are those of the whole tensor."""
    results = []
    for build, kind in product(LAYOUTS.values(), ("everything", "halo", "other layout", "from one", "overlapping")):
        layout = build(length, mesh.size())
        wish, own = wishes(kind, layout), torch.from_numpy(layout.indices(rank))
        whole = random(3, length, 2).requires_grad_()
        x = whole.detach()[:, own].to(mesh.device_type).requires_grad_()
        got = exchange(x, layout, wish, dim=1, group=mesh.get_group())
        all_rows = [expected(whole, ranges, 1) for ranges in wish]
        cotangents = [random(*rows.shape, seed=r) for r, rows in enumerate(all_rows)]
        (gradient,) = torch.autograd.grad(got, x, cotangents[rank].to(got.device))
        (all_gradients,) = torch.autograd.grad(all_rows, whole, cotangents)
        is_same = torch.equal(got.cpu(), all_rows[rank])
        results.append((is_same, torch.allclose(gradient.cpu(), all_gradients[:, own], rtol=0, atol=EXACT)))
    return results


@pytest.mark.parametrize(("degree", "length"), [(2, 9), (4, 3), (8, 33)])
def test_rows_come_from_their_owners_and_gradients_add_up_there(degree: int, length: int, device: str) -> None:
    for results in run_ranks(degree, exchanged, length, device=device):
        assert results == [(True, True)] * 15


def region_of_decoder(rank: int, mesh: ThreadMesh, grad: str, method: str, faulty: bool) -> list[float]:
    return decoder_region(mesh, grad, method, faulty)


@pytest.mark.parametrize("grad", ["partial", "replicated"])
@pytest.mark.parametrize("method", ["ring", "all_gather", "all_to_all"])
def test_a_region_with_local_cross_attention(method: str, grad: str, device: str) -> None:
    for found in run_ranks(4, region_of_decoder, grad, method, False, device=device):
        assert max(found) < EXACT
    for found in run_ranks(4, region_of_decoder, grad, method, True, device=device):
        assert max(found) > 0.1


def in_a_context(rank: int, mesh: ThreadMesh, case: Case, different: bool) -> float:
    q, k, v, _ = (x.to(mesh.device_type) for x in case.inputs())
    q += different * rank
    settings = {"buffers": [q, k, v], "buffer_seq_dims": [2] * 3, "check_consistency": True, "options": case.options}
    with context_parallel(mesh, sequences=BATCH, **settings) as context:
        out, _ = context_parallel_attention(q, k, v, context.attention_plan, SCALE)
    return relative(out.cpu(), wanted(case)[0][:, :, torch.from_numpy(context.layout.indices(rank))])


def test_a_context_that_cuts_buffers_and_compares_ranks(device: str) -> None:
    case = Case(53, options=ContextParallelOptions(kernel="math"))
    assert max(run_ranks(4, in_a_context, case, False, device=device)) < EXACT
    with pytest.raises(ContextParallelError, match=r"same batch .* rank\(s\) \[1, 2, 3\]"):
        run_ranks(4, in_a_context, case, True, device=device)


# ---- planted mistakes


def unwaited(pending: Pending) -> Pending:
    """As if the caller went on without waiting for the transfers."""
    return Pending(arrived=pending._arrived)


def without_wait(function: Callable) -> Callable:
    """The function, with a handle that waits for nothing."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        match function(*args, **kwargs):
            case Pending() as pending:
                return unwaited(pending)
            case ring._Returning() as returning:
                return dataclasses.replace(returning, pending=unwaited(returning.pending))
            case result, pending:
                return result, unwaited(pending)

    return call


def kept(rank: int, mesh: ThreadMesh, results: dict[int, Any], function: Callable, *args: Any) -> None:
    """Keep what the function returns: afterwards, the missing wait is an error."""
    results[rank] = function(rank, mesh, *args)


@pytest.mark.parametrize(
    ("method", "module", "name", "wrong"),
    [
        ("ring", ring, "_fetch", "everything"),
        ("all_gather", ring, "gather_rows", "everything"),
        ("ring", ring, "_return_gradients", "dkv"),
        ("all_gather", ring, "reduce_rows", "dkv"),
        ("all_to_all", ulysses, "all_to_all", "everything"),
    ],
)
def test_attention_without_a_wait_is_nan(method: str, module: Any, name: str, wrong: str, device: str) -> None:
    case, results = Case(53, (8, 2), options=ContextParallelOptions(method, kernel="math")), {}
    layout = case.options.layout(53, 4)
    with (
        mock.patch.object(module, name, without_wait(getattr(module, name))),
        pytest.raises(AssertionError, match="no wait for"),
    ):
        run_ranks(4, kept, results, attended, case, layout, device=device)
    found = [math.isnan(error) for error in errors(case, [results[rank] for rank in range(4)], layout)]
    assert found == ([True] * 4 if wrong == "everything" else [False, False, True, True])


def test_an_exchange_without_a_wait_is_nan(device: str) -> None:
    results: dict[int, list] = {}
    with (
        mock.patch.object(door, "all_to_all", without_wait(door.all_to_all)),
        pytest.raises(AssertionError, match="no wait for"),
    ):
        run_ranks(2, kept, results, exchanged, 9, device=device)
    assert all((False, False) in result for result in results.values())


def test_a_ring_that_reuses_what_it_sends_is_found(device: str) -> None:
    def reusing(transfers: list[door.Transfer], *args: Any, **kwargs: Any) -> Pending:
        pending = door.send_receive(transfers, *args, **kwargs)
        for transfer in transfers:
            if transfer.is_send:
                transfer.tensor.zero_()
        return pending

    case = Case(53, options=ContextParallelOptions(kernel="math"))
    with (
        mock.patch.object(ring, "send_receive", reusing),
        pytest.raises(AssertionError, match="what was sent was overwritten before the wait"),
    ):
        run_ranks(4, attended, case, case.options.layout(53, 4), device=device)
