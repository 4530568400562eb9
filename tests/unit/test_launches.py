"""Law: with packed documents, the operators of a layer are as many for 128 documents as for 8; so are their values."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from longshard.context.execution.kernels.base import BackwardInputs, Terms, hidden_pairs
from longshard.context.execution.kernels.cuda import CudaFlash, Varlen
from longshard.context.execution.ring import StagedExecution
from longshard.context.execution.stages import Merged, add_parts, attend, lone_gradients
from longshard.context.planning.balance import build_layout
from longshard.context.planning.capabilities import CAPABILITIES
from longshard.context.planning.lowering import (
    Launch,
    LoweredPlan,
    adds_up,
    fresh_rows,
    is_large,
    lower,
    recurring_length,
    split,
)
from longshard.context.planning.mask import Mask, Relation, causal, documents
from longshard.context.planning.methods import make_plan
from longshard.context.planning.tiles import Tile
from longshard.sharding.layout import contiguous
from tests.masks import dense
from tests.unit.kernel_stand_ins import OPS
from tests.unit.plan_problems import Problem, problems
from tests.unit.test_kernels import BI_CAUSAL, CAUSAL, FULL, error

HEADS, KV_HEADS, SIZE, SCALE = 4, 2, 8, 0.3
LARGE = replace(CAPABILITIES["cudnn_varlen"], large=1024)


class Operators(TorchDispatchMode):
    """Counts operators that are no views: on a GPU each is a kernel at least."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **kwargs or {})


def packed(count: int, seq_len: int = 512) -> Mask:
    """Causal attention within `count` documents of random lengths, the first one of a single token."""
    cuts = np.random.default_rng(count).choice(np.arange(3, seq_len, 2), count - 2, replace=False)
    return causal(seq_len) & documents(np.diff([0, 1, *np.sort(cuts), seq_len]).tolist())


def inputs(length: int, batch: int = 1) -> list[torch.Tensor]:
    """q, k, v and the gradient of the output, in the memory order of a model's."""
    generator = torch.Generator().manual_seed(length)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    made = (torch.randn(batch, length, h, SIZE, dtype=torch.float64, generator=generator) for h in heads)
    return [x.transpose(1, 2) for x in made]


def lowered(
    mask: Mask, degree: int, rank: int, kernel: CudaFlash | Varlen, balancer: str = "head_tail", method: str = "ring"
) -> LoweredPlan:
    layout = build_layout(balancer, mask.q_len, degree, mask=mask)
    return lower(make_plan(layout, mask, method, rank), kernel.capabilities)


def definition(q, k, v, dout, mask: Mask) -> list[torch.Tensor]:
    """Output and gradients of attention written out."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    keys, values = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in leaves[1:])
    scores = (leaves[0] @ keys.transpose(-1, -2) * SCALE).masked_fill(~torch.from_numpy(dense(mask)), -torch.inf)
    out = scores.softmax(-1) @ values
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def layer(count: int, kernel: CudaFlash | Varlen) -> Counter[str]:
    """Operators of one attention, forward and backward, on a rank that has everything; its values are checked."""
    mask = packed(count)
    q, k, v, dout = inputs(mask.q_len)
    run = StagedExecution(lowered(mask, 1, 0, kernel), kernel, None, None)
    with Operators() as seen:
        out, lse = run.forward(q, k, v, terms=Terms(SCALE))
        grads = run.backward(BackwardInputs(dout, q, k, v, out, lse), Terms(SCALE))
    for got, wanted in zip((out, *grads), definition(q, k, v, dout, mask), strict=True):
        assert error(got, wanted) < 1e-12
    return seen.counts


def test_operators_do_not_grow_with_documents() -> None:
    layer(8, Varlen(OPS))  # makes the random state, which the backward operator does not read, once for all layers
    few, many = (layer(count, Varlen(OPS)) for count in (8, 128))
    assert many == few
    assert many["_flash_attention_forward"] == many["_flash_attention_backward"] == 1
    assert many.total() - many["empty_like"] == 2, f"something is filled, added or copied: {many}"


def test_one_call_for_each_document_is_seen() -> None:
    """The control: launched one by one, operators grow with documents."""
    few, many = (layer(count, CudaFlash(OPS)) for count in (8, 128))
    assert many.total() > few.total() + 5 * 100


@pytest.mark.parametrize("method", ["ring", "all_gather"])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("balancer", ["head_tail", "contiguous", "balanced"])
@pytest.mark.parametrize("count", [3, 40])
def test_launches_of_a_rank_are_its_attention(count: int, balancer: str, batch: int, method: str) -> None:
    """Every rank of three, all stages: outputs, and gradients summed over ranks, match attention written out.

    Documents are cut by the borders of ranks, so that launches have gaps and queries several results.
    """
    mask, kernel = packed(count, 96), Varlen(OPS)
    whole = inputs(mask.q_len, batch)
    wanted = definition(*whole, mask)
    # Statistics of the whole, for the backward
    leaves = [x.repeat_interleave(HEADS // x.shape[1], dim=1) for x in whole[:2]]
    scores = (leaves[0] @ leaves[1].transpose(-1, -2) * SCALE).masked_fill(~torch.from_numpy(dense(mask)), -torch.inf)
    lses = scores.logsumexp(-1)
    grads = [torch.zeros_like(x) for x in whole[:3]]
    for rank in range(3):
        plan = lowered(mask, 3, rank, kernel, balancer, method)
        own_rows = rows_of(plan.plan.q_layout.ranges[rank])
        q, dout, out, lse = (x[:, :, own_rows] for x in (whole[0], whole[3], wanted[0], lses))
        total, dq = Merged(q), torch.zeros_like(q)
        if fresh_rows(run for launches in plan.backward for launch in launches for run in launch.q_runs) == q.shape[2]:
            dq = torch.full_like(q, torch.nan)
        for stage, launches in zip(plan.plan.forward, plan.forward, strict=True):
            k, v = (x[:, :, rows_of(stage.held)] for x in whole[1:3])
            attend(total, (q, k, v), slice(0, HEADS), launches, kernel, SCALE)
        for got, wish in zip(total.result, (out, lse), strict=True):
            assert error(got, wish) < 1e-12
        for stage, launches in zip(plan.plan.backward, plan.backward, strict=True):
            held = rows_of(stage.held)
            k, v = (x[:, :, held] for x in whole[1:3])
            dk, dv = torch.zeros_like(k), torch.zeros_like(v)
            if fresh_rows(run for launch in launches for run in launch.kv_runs) == k.shape[2]:
                dk, dv = torch.full_like(k, torch.nan), torch.full_like(v, torch.nan)
            for launch in launches:
                parts = kernel.backward_many(BackwardInputs(dout, q, k, v, out, lse), launch, scale=SCALE)
                add_parts((dq, dk, dv), parts, launch)
            for whole_grad, part in zip(grads[1:], (dk, dv), strict=True):
                whole_grad[:, :, held] += part
        grads[0][:, :, own_rows] = dq
    for got, wish in zip(grads, wanted[1:], strict=True):
        assert error(got, wish) < 1e-12


def rows_of(ranges: tuple[tuple[int, int], ...]) -> torch.Tensor:
    return torch.cat([torch.arange(0), *(torch.arange(start, stop) for start, stop in ranges)])


def test_gradients_are_the_kernels_own_only_if_they_are_everything() -> None:
    mask, kernel = packed(5, 96), Varlen(OPS)
    q, k, v, dout = inputs(96)
    backward_inputs = BackwardInputs(dout, q, k, v, dout, q[..., 0])
    (launch,) = lowered(mask, 1, 0, kernel).backward[0]
    assert lone_gradients(backward_inputs, (launch,), kernel, SCALE) is not None
    assert lone_gradients(backward_inputs, (launch, launch), kernel, SCALE) is None
    for calls in (launch.calls[:-1], launch.calls[1:], (*launch.calls[:2], *launch.calls[3:]), launch.calls[::-1]):
        assert lone_gradients(backward_inputs, (Launch(calls),), kernel, SCALE) is None
    each = lowered(mask, 1, 0, CudaFlash(OPS)).backward[0]
    assert lone_gradients(backward_inputs, each, CudaFlash(OPS), SCALE) is None


@settings(deadline=None)
@drawn(
    problems(),
    st.sampled_from(["ring", "all_gather"]),
    st.sampled_from(["varlen", "cuda_flash", "cpu_flash"]),
)
def test_the_first_results_of_queries_are_fresh_and_no_others(problem: Problem, method: str, name: str) -> None:
    """In the order in which they are merged; and the runs of a launch are its rows, each once."""
    for plan in problem.plans(method):
        touched: set[int] = set()
        for launches in lower(plan, CAPABILITIES[name]).forward:
            touched_keys: set[int] = set()
            for launch in launches:
                for call in launch.calls:
                    queries = set(range(*call.q))
                    assert call.fresh == touched.isdisjoint(queries)
                    touched |= queries
                    keys = set(range(*call.kv))
                    assert call.fresh_keys == touched_keys.isdisjoint(keys)
                    touched_keys |= keys
                fresh = [run.fresh for run in launch.q_runs for _ in range(run.rows.start, run.rows.stop)]
                assert fresh == [call.fresh for call in launch.calls for _ in range(*call.q)]
                seen = [run.fresh for run in launch.kv_runs for _ in range(run.rows.start, run.rows.stop)]
                assert seen == [call.fresh_keys for call in launch.calls for _ in range(*call.kv)]
                for runs, spans in ((launch.q_runs, launch.q), (launch.kv_runs, launch.kv)):
                    rows = [row for run in runs for row in range(run.rows.start, run.rows.stop)]
                    assert rows == [row for span in spans for row in range(*span)]
                    places = [place for run in runs for place in range(run.places.start, run.places.stop)]
                    assert places == [*range(len(rows))]


@pytest.mark.parametrize(
    ("tile", "parts"),
    [
        # a square: a large part, and the rest of the queries with all keys
        (Tile((0, 1100), (0, 1100), CAUSAL), {((0, 1088), (0, 1088), CAUSAL), ((1088, 1100), (0, 1100), CAUSAL)}),
        (Tile((7, 1031), (7, 1031), CAUSAL), {((7, 1031), (7, 1031), CAUSAL)}),
        # keys before the square: enough for a large part, and fewer
        (
            Tile((0, 1024), (0, 2148), CAUSAL),
            {((0, 1024), (1124, 2148), CAUSAL), ((0, 1024), (0, 1088), FULL), ((0, 1024), (1088, 1124), FULL)},
        ),
        (
            Tile((0, 1024), (0, 1100), CAUSAL),
            {((0, 1024), (76, 1100), CAUSAL), ((0, 1024), (0, 76), FULL)},
        ),
        (
            Tile((0, 1100), (0, 1057), FULL),
            {((0, 1088), (0, 1024), FULL), ((0, 1088), (1024, 1057), FULL), ((1088, 1100), (0, 1057), FULL)},
        ),
        # not large: one call
        (Tile((0, 1023), (0, 5000), CAUSAL), {((0, 1023), (0, 5000), CAUSAL)}),
        (Tile((0, 5000), (0, 1023), FULL), {((0, 5000), (0, 1023), FULL)}),
        (Tile((0, 5000), (0, 5000), BI_CAUSAL), {((0, 5000), (0, 5000), BI_CAUSAL)}),
    ],
)
def test_large_tiles_are_cut_to_lengths_that_recur(tile: Tile, parts: set[tuple]) -> None:
    pieces = list(split(tile, LARGE))
    assert {(part.q, part.kv, part.relation) for part in pieces} == parts
    hidden = np.ones((5000, 5000), dtype=int)
    for part in pieces:
        rows, keys = slice(*part.q), slice(*part.kv)
        size = part.q[1] - part.q[0], part.kv[1] - part.kv[0]
        hidden[rows, keys] -= ~hidden_pairs(part.relation, *size, torch.device("cpu")).numpy()
    for_whole = ~hidden_pairs(
        tile.relation, tile.q[1] - tile.q[0], tile.kv[1] - tile.kv[0], torch.device("cpu")
    ).numpy()
    assert (hidden[slice(*tile.q), slice(*tile.kv)] == 1 - for_whole).all()
    assert hidden.min() >= 0


def test_lengths_recur() -> None:
    """Sixteen of each power of two, and at most a sixteenth of the queries is left over."""
    lengths = range(8192, 131_072)
    assert len({recurring_length(length) for length in lengths}) == 4 * 16
    assert all(0 <= length - recurring_length(length) <= length / 16 for length in lengths)


@pytest.mark.parametrize("relation", [CAUSAL, FULL])
@pytest.mark.parametrize("length", [262_143, 270_335, 409_599, 1_000_000])
def test_all_large_parts_of_a_long_tile_have_lengths_that_recur(length: int, relation: Relation) -> None:
    """A sixteenth of 262,144 tokens or more can be large itself; cuDNN would build a plan for each such length."""
    capabilities = CAPABILITIES["cudnn_varlen"]
    whole = Tile((0, length), (0, length), relation)
    parts = list(split(whole, capabilities))
    large = [part for part in parts if is_large(part, capabilities)]
    lengths = {stop - start for part in large for start, stop in (part.q, part.kv)}
    assert large
    assert {recurring_length(each) for each in lengths} == lengths
    assert sum(part.pairs for part in parts) == whole.pairs


def test_a_large_tile_is_a_launch_of_its_own() -> None:
    tiles = documents([1100, 40, 1024, 30, 5], is_causal=True)
    lowered = lower(make_plan(contiguous(2199, 1), tiles, "ring", 0), LARGE)
    (launches,) = lowered.forward
    sizes = sorted([call.q[1] - call.q[0] for call in launch.calls] for launch in launches)
    assert sizes == [[12, 40, 30, 5], [1024], [1088]]
    assert not adds_up([launches])
    assert [is_large(launch.calls[0], LARGE) for launch in launches] == [True, True, False]
