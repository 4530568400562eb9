"""Law: attention over ranks that are threads is attention written out on the whole sequence, on a CPU and on a GPU.

On a GPU each rank has a stream of its own, and data arrive late. `--device cuda` tests the kernels of GPUs. On a CPU
their operators have stand-ins, in float64.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import wraps
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from longshard.context.attention import (
    context_parallel_attention,
)
from longshard.context.attention_inputs import AttentionSettings
from longshard.context.execution import ring, ulysses
from longshard.context.live import LivePlan, flat_mesh, opened
from longshard.context.planning.mask import full
from longshard.context.planning.options import ContextParallelError, ContextParallelOptions
from longshard.context.regions import context_parallel
from longshard.sharding import exchange as door
from longshard.sharding import rows as sharded_rows
from longshard.sharding.exchange import Pending
from longshard.sharding.layout import AxisLayout, sized
from longshard.sharding.placement import replicate
from longshard.sharding.rows import Axis, exchange
from scripts.gpu_blocks.block import largest
from tests.covering import Row, covering_array
from tests.distributed.attention_cases import BATCH, Case, random, relative
from tests.distributed.test_exchange import LAYOUTS, expected, wishes
from tests.distributed.test_region import decoder_region
from tests.masks import dense
from tests.thread_attention import EXACT, SCALE, allowed, attended, axes, case_of, errors, found_and_bounds, wanted
from tests.thread_ranks import ThreadMesh, run_ranks
from tests.unit.plan_problems import Problem, problems

BALANCER = {"balancer": "head_tail"}


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


def test_attention_of_whole_sequences(row: Row, device: str) -> None:
    """Exact in float64; else at most twice the error of the kernel on one rank."""
    results, bounds = found_and_bounds(row, device)
    assert all(error <= bound for error, bound in zip(results, bounds, strict=True)), (results, bounds)


# ---- random layouts: ranks, and whole head groups, without queries or keys


def attended_of(
    rank: int, mesh: ThreadMesh, problem: Problem, options: ContextParallelOptions, inputs: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Output and gradients of q, k, v, of this rank's rows."""
    degrees = options.hybrid_degrees
    flat, groups = flat_mesh(mesh.reshaped(*degrees[::-1]) if degrees else mesh, options)
    rows, keys = (torch.from_numpy(layout.indices(rank)) for layout in (problem.layout, problem.kv_layout))
    places = (rows, keys, keys, rows)
    *leaves, cotangent = (x[:, :, places[i]] for i, x in enumerate(inputs))
    leaves = [x.requires_grad_() for x in leaves]
    live = LivePlan(flat, problem.layout, problem.mask, options, problem.kv_layout, groups)
    with opened(live, len(cotangent)) as handle:
        out, *_ = context_parallel_attention(
            *leaves, handle, AttentionSettings(SCALE, False, keep_exchanged=options.keep_exchanged)
        )
        return [x.detach() for x in (out, *torch.autograd.grad(out, leaves, cotangent))]


@st.composite
def spreads(draw: st.DrawFn) -> tuple[Problem, ContextParallelOptions]:
    problem = draw(problems())
    method = draw(st.sampled_from(["ring", "all_gather", "all_to_all", "hybrid"]))
    group = draw(st.sampled_from([n for n in range(1, problem.degree + 1) if problem.degree % n == 0]))
    degrees = (group, problem.degree // group) if method == "hybrid" else None
    passes = draw(st.sampled_from([0, 0, 1])) if method != "ring" else 0
    is_self_attention = problem.layout == problem.kv_layout
    keeps = degrees is not None and group > 1 and not passes and is_self_attention and draw(st.booleans())
    settings_of_method = {
        "kernel": "math",
        "heads_per_pass": passes,
        "hybrid_degrees": degrees,
        "keep_exchanged": keeps,
    }
    return problem, ContextParallelOptions(method, **settings_of_method)


_HALVES = [sized(lengths) for lengths in ((3, 2, 0, 0), (0, 0, 4, 3))]


@settings(derandomize=True)
@given(spreads())
@example((Problem(*_HALVES, full(5, 7)), ContextParallelOptions("hybrid", hybrid_degrees=(2, 2))))
@example((Problem(*_HALVES[::-1], full(7, 5)), ContextParallelOptions("hybrid", hybrid_degrees=(2, 2))))
def test_ranks_without_queries_or_keys(spread: tuple[Problem, ContextParallelOptions]) -> None:
    problem, options = spread
    batch, (n, m) = problem.mask.sequences, (problem.layout.length, problem.kv_layout.length)
    inputs = [random(batch, *shape, 4, seed=i) for i, shape in enumerate([(60, n), (2, m), (2, m), (60, n)])]
    results = run_ranks(problem.degree, attended_of, problem, options, inputs)
    q, k, v = (x.clone().requires_grad_() for x in inputs[:3])
    visible = torch.from_numpy(dense(problem.mask)).unsqueeze(1)
    scores = (q @ k.repeat_interleave(30, 1).mT * SCALE).masked_fill(~visible, -1e300)
    out = (scores.softmax(-1) * visible) @ v.repeat_interleave(30, 1)
    expected = out, *torch.autograd.grad(out, (q, k, v), inputs[3])
    for rank, parts in enumerate(results):
        rows, keys = (torch.from_numpy(layout.indices(rank)) for layout in (problem.layout, problem.kv_layout))
        for part, whole, places in zip(parts, expected, (rows, rows, keys, keys), strict=True):
            torch.testing.assert_close(part, whole[:, :, places], rtol=0, atol=EXACT)


def kept_of_cross_attention(rank: int, mesh: ThreadMesh) -> str:
    """The refusal; the second head group alone has as many queries as keys."""
    whole = ((4, 6),), ((6, 8),)
    layouts = [AxisLayout("uneven", 8, (((0, cut),), ((cut, 4),), *whole)) for cut in (1, 2)]
    options = ContextParallelOptions("hybrid", kernel="math", hybrid_degrees=(2, 2), keep_exchanged=True)
    inputs = [random(1, heads, 8, 4) for heads in (4, 2, 2, 4)]
    with pytest.raises(ContextParallelError) as error:
        attended_of(rank, mesh, Problem(*layouts, full(8, 8)), options, inputs)
    return str(error.value)


def test_no_head_group_raises_alone() -> None:
    for message in run_ranks(4, kept_of_cross_attention, limit=20):
        assert "as in self-attention; use keep_exchanged = False" in message


# ---- the exchange, regions, the context


def exchanged(rank: int, mesh: ThreadMesh, length: int) -> list[tuple[bool, bool]]:
    """Return whether results and gradients equal the whole tensor's, for each layout and wish."""
    results = []
    for build, kind in product(LAYOUTS.values(), ("everything", "halo", "other layout", "from one", "overlapping")):
        layout = build(length, mesh.size())
        wish, own = wishes(kind, layout), torch.from_numpy(layout.indices(rank))
        whole = random(3, length, 2).requires_grad_()
        x = whole.detach()[:, own].to(mesh.device_type).requires_grad_()
        got = exchange(x, Axis(layout, mesh.get_group()), tuple(map(tuple, wish)), 1)
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
    for results in run_ranks(4, region_of_decoder, grad, method, False, device=device):
        assert largest(*results) < EXACT
    for results in run_ranks(4, region_of_decoder, grad, method, True, device=device):
        assert max(results) > 0.1


def in_a_context(rank: int, mesh: ThreadMesh, case: Case, different: bool) -> float:
    q, k, v, _ = (x.to(mesh.device_type) for x in case.inputs())
    q += different * rank
    settings = {"buffers": [q, k, v], "buffer_seq_dims": [2] * 3, "check_consistency": True, "options": case.options}
    with context_parallel(mesh, sequences=BATCH, **settings) as context:
        out, *_ = context_parallel_attention(q, k, v, context.attention_plan, AttentionSettings(SCALE))
    return relative(out.cpu(), wanted(case)[0][:, :, torch.from_numpy(context.layout.indices(rank))])


def test_a_context_that_cuts_buffers_and_compares_ranks(device: str) -> None:
    case = Case(53, options=ContextParallelOptions(kernel="math"))
    assert max(run_ranks(4, in_a_context, case, False, device=device)) < EXACT
    with pytest.raises(ContextParallelError, match=r"same batch .* rank\(s\) \[1, 2, 3\]"):
        run_ranks(4, in_a_context, case, True, device=device)


# ---- planted mistakes


def unwaited(pending: Pending) -> Pending:
    """As if the caller went on without waiting for the transfers."""
    return Pending(arrived=pending.arrived)


def without_wait(function: Callable) -> Callable:
    """The function, with a handle that waits for nothing."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        match function(*args, **kwargs):
            case Pending() as pending:
                return unwaited(pending)
            case ring.Returning() as returning:
                return dataclasses.replace(returning, pending=unwaited(returning.pending))
            case result, pending:
                return result, unwaited(pending)

    return call


def kept(rank: int, mesh: ThreadMesh, results: dict[int, Any], function: Callable, *args: Any) -> None:
    """Store the function's result by rank: a missing wait ends `run_ranks` with an error."""
    results[rank] = function(rank, mesh, *args)


@pytest.mark.parametrize(
    ("method", "module", "name", "wrong"),
    [
        ("ring", ring.StagedExecution, "_fetch", "everything"),
        ("all_gather", ring.StagedExecution, "_gather_rows", "everything"),
        ("ring", ring.StagedExecution, "_return_gradients", "dkv"),
        ("all_gather", ring.StagedExecution, "_reduce_rows", "dkv"),
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
    is_nan = [math.isnan(error) for error in errors(case, [results[rank] for rank in range(4)], layout)]
    assert is_nan == ([True] * 4 if wrong == "everything" else [False, False, True, True])


def test_an_exchange_without_a_wait_is_nan(device: str) -> None:
    results: dict[int, list] = {}
    with (
        mock.patch.object(sharded_rows, "all_to_all", without_wait(sharded_rows.all_to_all)),
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


# ---- gradients of what every rank has


def replicated_beside(rank: int, mesh: ThreadMesh) -> list[list[float]]:
    """Gradients of a replicated tensor, of a neighbour that shares its cotangent, and that cotangent."""
    device = mesh.device_type
    whole, own = (torch.ones(3, device=device, requires_grad=True) for _ in range(2))
    cotangent = torch.full((3,), rank + 1.0, device=device)
    (replicate(whole, mesh.get_group()) + own).backward(cotangent)
    return [x.tolist() for x in (whole.grad, own.grad, cotangent)]


def test_a_replicated_tensor_sums_its_own_gradient_alone(device: str) -> None:
    """Autograd gives both terms of a sum one cotangent: adding the ranks' up in place would change the other's."""
    for rank, gradients in enumerate(run_ranks(2, replicated_beside, device=device)):
        assert gradients == [[3.0] * 3, [rank + 1.0] * 3, [rank + 1.0] * 3]


@pytest.mark.parametrize("method", ["all_to_all", "hybrid"])
def test_gradients_of_a_heads_copies_are_added_up_in_float32(method: str) -> None:
    """Rounding each of them to bfloat16 first costs the result half of its precision, on every layout alike."""
    case = case_of({"method": method, "degree": "4", "mask": "causal", "kernel": "math bfloat16"} | BALANCER, "cpu")
    case = dataclasses.replace(case, heads=(8, 1))
    added: list[tuple[torch.dtype, int]] = []
    real = ulysses.summed

    def seen(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
        added.append((x.dtype, x.shape[1] // kv_heads))
        return real(x, kv_heads)

    with mock.patch.object(ulysses, "summed", seen):
        run_ranks(4, attended, case, case.options.layout(case.seq_len, 4, case.batch_mask))
    assert set(added) == {(torch.float32, 4 if method == "all_to_all" else 2)}
