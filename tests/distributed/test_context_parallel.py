"""Context-parallel attention against attention of one process, with random cotangents; and the context's promises."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.distributed.harness import TINY
from tests.distributed.pool import WorkerPool
from tests.masks import dense
from trainer.config.loader import parse_command_line
from trainer.distributed.context_parallel.attention import ContextParallelAttention, context_parallel_attention
from trainer.distributed.context_parallel.context import context_parallel
from trainer.distributed.context_parallel.execution import build
from trainer.distributed.context_parallel.live import LivePlan, opened
from trainer.distributed.context_parallel.planning.cost import AttentionShape, attention_cost
from trainer.distributed.context_parallel.planning.mask import (
    Mask,
    by_sequence,
    causal,
    documents,
    documents_of,
    full,
    sliding_window,
)
from trainer.distributed.context_parallel.planning.options import ContextParallelOptions
from trainer.distributed.sharding import exchange
from trainer.distributed.sharding.layout import LOAD_BALANCERS, AxisLayout, head_tail
from trainer.models.common.attention import InnerAttention
from trainer.models.llama3.model import Transformer
from trainer.runtime.process_group import Process, process_group

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
BATCH = 2


def relative(a: torch.Tensor, b: torch.Tensor, whole: torch.Tensor | None = None) -> float:
    """Euclidean error of a against b, as a share of b, or of the `whole` of which both are a part."""
    return ((a.double() - b.double()).norm() / (b if whole is None else whole).double().norm()).item()


def mesh_of_all(process: Process) -> DeviceMesh:
    return init_device_mesh(process.device.type, (process.world_size,), mesh_dim_names=("cp",))


def hybrid_groups(process: Process, options: ContextParallelOptions) -> tuple[dist.ProcessGroup, ...] | None:
    if options.method != "hybrid":
        return None
    shape = options.hybrid_degrees[::-1]
    return tuple(init_device_mesh(process.device.type, shape, mesh_dim_names=("cp_ring", "cp_a2a")).get_all_groups())


@dataclass(frozen=True)
class Case:
    """One attention call. masks: what the batch hides, by the sequence; is_causal, window: what the call hides."""

    seq_len: int
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 8
    dtype: torch.dtype = torch.float64
    options: ContextParallelOptions = field(default_factory=ContextParallelOptions)
    is_causal: bool = True
    window: int = 0
    mask: str = "none"
    kv_len: int | None = None
    sinks: bool = False

    @property
    def batch_mask(self) -> Mask | None:
        """Documents of lengths that fit nothing, other ones in each sequence."""
        if self.mask == "none":
            return None
        lengths = [np.random.default_rng(row).multinomial(self.seq_len, [0.5, 0.2, 0.1, 0.2]) for row in range(BATCH)]
        if self.mask == "documents, alike":
            return documents(lengths[0].tolist())
        if self.mask == "a sequence that sees nothing":  # and one that sees its first half
            half = self.seq_len // 2
            seen = documents([half, self.seq_len - half], [half, 0])
            return by_sequence([Mask(self.seq_len, self.seq_len, ()), dataclasses.replace(seen, kv_len=self.seq_len)])
        return by_sequence([documents(row.tolist()) for row in lengths])

    @property
    def whole_mask(self) -> Mask:
        """Everything together, as the oracle sees it."""
        lengths = self.seq_len, self.kv_len
        mask = causal(*lengths) if self.is_causal else full(*lengths)
        if self.window:
            mask = mask & sliding_window(self.seq_len, self.window, self.kv_len, is_causal=self.is_causal)
        return mask if self.batch_mask is None else mask & self.batch_mask

    def inputs(self) -> list[torch.Tensor]:
        """q, k, v, a cotangent of the output, and sinks if there are any: the same on every rank."""
        generator = torch.Generator().manual_seed(self.seq_len + self.head_dim)
        kv_len = self.kv_len or self.seq_len
        sizes = [(self.heads[0], self.seq_len), *[(self.heads[1], kv_len)] * 2, (self.heads[0], self.seq_len)]
        shapes: list[tuple[int, ...]] = [(BATCH, h, s, self.head_dim) for h, s in sizes]
        shapes += [self.heads[:1]] * self.sinks
        return [torch.randn(shape, dtype=torch.float64, generator=generator).to(self.dtype) for shape in shapes]


def oracle(case: Case, scale: float) -> tuple[torch.Tensor, ...]:
    """Attention by its definition in float64, on one process: out, dq, dk, dv, dsinks; what sees nothing gives 0."""
    q, k, v, cotangent, *sinks = (x.to(torch.float64, copy=True) for x in case.inputs())
    leaves = [x.requires_grad_() for x in (q, k, v, *sinks)]
    group = q.shape[1] // k.shape[1]
    visible = torch.from_numpy(dense(case.whole_mask)).unsqueeze(1)
    scores = q @ k.repeat_interleave(group, 1).transpose(-1, -2) * scale
    scores = scores.masked_fill(~visible, -1e300)
    for sink in sinks:
        scores = torch.cat((scores, sink[:, None, None].expand(*scores.shape[:3], 1)), dim=3)
    weights = scores.softmax(-1)[..., : visible.shape[-1]] * visible
    out = weights @ v.repeat_interleave(group, 1)
    return out, *torch.autograd.grad(out, leaves, cotangent)


def shared_oracles(cases: list[Case], process: Process) -> list[tuple[torch.Tensor, ...]]:
    """`oracle` of each case, made by one rank each and told to the others; a collective."""
    mine = [oracle(case, 0.3) for case in cases[process.rank :: process.world_size]]
    shares: list[list] = [[] for _ in range(process.world_size)]
    dist.all_gather_object(shares, mine)
    return [shares[i % process.world_size][i // process.world_size] for i in range(len(cases))]


def attention_case(cases: list[Case]) -> list[dict]:
    """On each rank, for each case: relative errors of out, dq, dk, dv on its shard, and what was sent and planned."""
    process = Process.from_environment()
    results = []
    with process_group(process, parse_command_line([]).config.comm):
        mesh = mesh_of_all(process)
        for case, wanted in zip(cases, shared_oracles(cases, process), strict=True):
            layout = case.options.layout(case.seq_len, mesh.size(), case.batch_mask)
            kv_layout = case.options.layout(case.kv_len, mesh.size()) if case.kv_len else layout
            groups = hybrid_groups(process, case.options)
            live = LivePlan(mesh, layout, case.batch_mask, case.options, kv_layout, groups)
            mine = [torch.from_numpy(part.indices(process.rank)) for part in (layout, kv_layout, kv_layout, layout)]
            # In memory as a projection gives them: (B, S, H, D).
            shards = [
                x[:, :, part].transpose(1, 2).contiguous().transpose(1, 2)
                for x, part in zip(case.inputs(), mine, strict=False)
            ]
            cotangent = shards.pop()
            leaves = [x.requires_grad_() for x in (*shards, *case.inputs()[4:])]
            exchange.calls.clear()
            exchange.bytes_sent.clear()
            settings = 0.3, case.is_causal, case.window
            with opened(live, BATCH) as handle:
                out, lse = context_parallel_attention(*leaves[:3], handle, *settings, *leaves[3:])
                grads = torch.autograd.grad(out, leaves, cotangent)
            assert lse.shape == out.shape[:3]
            got = (out, *grads[:3])
            sent, calls = dict(exchange.bytes_sent), dict(exchange.calls)
            for dsinks, whole in zip(grads[3:], wanted[4:], strict=True):  # each rank has its queries' part
                assert relative(exchange.all_reduce(dsinks.clone(), mesh), whole) < TOLERANCE[case.dtype]
            errors = [
                relative(x, whole[:, :, part], whole) if whole.any() else x.norm().item()
                for x, whole, part in zip(got, wanted[:4], (mine[0], *mine[:3]), strict=True)
            ]
            (run,) = live._executions.values()
            shape = AttentionShape(BATCH, *case.heads, case.head_dim, case.dtype.itemsize)
            costs = [
                attention_cost(run.plan, shape, way, case.options.heads_per_pass) for way in ("forward", "backward")
            ]
            results.append(
                {
                    "errors": errors,
                    "calls": calls,
                    "sent": sent,
                    "planned calls": dict(costs[0].calls + costs[1].calls),
                    "planned": {k: v for c in [costs[0].bytes_sent + costs[1].bytes_sent] for k, v in c.items() if v},
                    "pairs": run.plan.pairs,
                }
            )
    return results


def assert_exact(pool: WorkerPool, degree: int, cases: list[Case], run: Callable = attention_case) -> None:
    """Outputs and gradients are those of one process, collectives and bytes are those of the plan."""
    problems = []
    for rank, results in enumerate(pool.run(degree, run, cases)):
        for case, result in zip(cases, results, strict=True):
            tolerance = TOLERANCE[case.dtype]
            sent = {kind: size for kind, size in result["sent"].items() if size}
            if not all(error <= tolerance for error in result["errors"]):
                problems.append(f"rank {rank} {case}: {result['errors']}")
            if result["calls"] != result["planned calls"] or sent != result["planned"]:
                problems.append(f"rank {rank} {case}: {result}")
    assert not problems, "\n".join(problems[:10])


METHODS = ("ring", "all_gather", "all_to_all")
MASKS = [
    {},
    {"is_causal": False},
    {"window": 7},
    {"is_causal": False, "window": 5},
    {"mask": "documents"},
    {"mask": "documents, alike", "window": 6},
    {"mask": "a sequence that sees nothing"},
]


def cases_of(method: str, lengths: tuple[int, ...] = (48, 37, 5, 2)) -> list[Case]:
    """Layouts x masks x lengths; a length meets another head ratio under each mask and each layout."""
    ratios = [(24, 8), (24, 2), (24, 1), (24, 24)] if method == "all_to_all" else [(8, 8), (8, 2), (8, 1), (24, 6)]
    cases = []
    for b, balancer in enumerate(LOAD_BALANCERS):
        for m, mask in enumerate(MASKS):
            for n, seq_len in enumerate(lengths):
                options = ContextParallelOptions(method, balancer)
                cases.append(Case(seq_len, ratios[(b + m + n) % len(ratios)], options=options, **mask))
    return cases


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("degree", [1, 2, 3, 4, *(pytest.param(d, marks=pytest.mark.slow) for d in (6, 8))])
def test_every_method_layout_and_mask_equals_one_process(pool: WorkerPool, degree: int, method: str) -> None:
    """Every length, also fewer tokens than ranks; grouped heads; rows that see nothing."""
    assert_exact(pool, degree, cases_of(method, (37, 5) if degree > 4 else (48, 37, 5, 2)))


@pytest.mark.parametrize(
    "degrees", [(2, 2), *(pytest.param(d, marks=pytest.mark.slow) for d in ((2, 4), (4, 2), (3, 2)))]
)
def test_a_ring_of_head_groups(pool: WorkerPool, degrees: tuple[int, int]) -> None:
    """hybrid: all-to-all inside, ring outside, with every layout, mask and length."""
    cases = cases_of("all_to_all", (37, 5))
    hybrids = [
        dataclasses.replace(
            case,
            options=ContextParallelOptions(
                "hybrid", case.options.load_balancer, hybrid_degrees=degrees, heads_per_pass=number % 3
            ),
        )
        for number, case in enumerate(cases)
    ]
    assert_exact(pool, degrees[0] * degrees[1], hybrids)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("degree", [1, 3])
def test_sinks_take_their_share_once(pool: WorkerPool, degree: int, method: str) -> None:
    """Applied after the merge, with their own gradient, also where a query sees nothing but its sink."""
    options = ContextParallelOptions(method)
    cases = [Case(26, (6, 2), options=options, sinks=True, **mask) for mask in MASKS]
    assert_exact(pool, degree, [*cases, Case(26, (6, 6), 16, torch.bfloat16, options, sinks=True)])


RATIOS = [(12, 12), (12, 6), (12, 4), (12, 3), (12, 2), (12, 1)]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("degree", [2, 4])
def test_every_head_ratio(pool: WorkerPool, degree: int, method: str) -> None:
    """Also key/value heads fewer than ranks, and numbers that have no common factor with the degree."""
    options = ContextParallelOptions(method)
    assert_exact(pool, degree, [Case(21, heads, options=options, mask="documents") for heads in RATIOS])


@pytest.mark.parametrize("method", METHODS)
def test_ranks_without_tokens(pool: WorkerPool, method: str) -> None:
    """Empty shards of one key/value head or several, with masks of each sequence: empty results share no memory."""
    options = ContextParallelOptions(method, "contiguous")
    cases = [
        Case(seq_len, (6, kv_heads), head_dim, options=options, mask=mask)
        for seq_len in (1, 2)
        for kv_heads in (1, 2, 6)
        for head_dim in (1, 8)
        for mask in ("documents", "none")
    ]
    assert_exact(pool, 3, cases)


@pytest.mark.parametrize("method", METHODS)
def test_keys_more_or_fewer_than_queries(pool: WorkerPool, method: str) -> None:
    """The last query stands at the last key; queries before the first key see nothing."""
    cases = [
        Case(seq_len, (6, 3), options=ContextParallelOptions(method, balancer), kv_len=kv_len, **mask)
        for balancer in LOAD_BALANCERS
        for seq_len, kv_len in ((20, 33), (33, 20), (7, 2), (2, 9))
        for mask in MASKS[:4]
    ]
    assert_exact(pool, 3, cases)


@pytest.mark.parametrize("method", ["all_gather", "all_to_all"])
def test_a_few_heads_at_a_time(pool: WorkerPool, method: str) -> None:
    """Results are the same, the same bytes travel in more exchanges; a last pass may be smaller."""
    numbers = (0, 1, 2, 3)
    cases = [
        Case(24, (16, 8), options=ContextParallelOptions(method, heads_per_pass=number), mask=mask)
        for number in numbers
        for mask in ("none", "documents")
    ]
    assert_exact(pool, 2, cases)
    (results, _) = pool.run(2, attention_case, cases[::2])
    by_number = [sum(result["calls"].values()) for result in results]
    assert by_number[1] > by_number[2] > by_number[0]
    assert len({sum(result["sent"].values()) for result in results}) == 1


def strides_case(method: str) -> list[float]:
    """Differences of results and gradients between inputs that lie in memory in an odd way and the same, contiguous."""
    process = Process.from_environment()
    case = Case(24, (4, 2), 8)
    with process_group(process, parse_command_line([]).config.comm):
        mesh = mesh_of_all(process)
        options = ContextParallelOptions(method)
        layout = options.layout(24, mesh.size())
        mine = torch.from_numpy(layout.indices(process.rank))
        *shards, cotangent = (x[:, :, mine] for x in case.inputs())
        results = []
        odd = [
            lambda x: x,
            lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
            lambda x: x.repeat_interleave(2, dim=3)[..., ::2],
            lambda x: x.permute(2, 0, 3, 1).contiguous().permute(1, 3, 0, 2),
        ]
        with opened(LivePlan(mesh, layout, options=options), BATCH) as handle:
            for change in odd:
                leaves = [change(x).requires_grad_() for x in shards]
                out, lse = context_parallel_attention(*leaves, handle, 0.3)
                assert not lse.requires_grad  # nobody would add its gradient
                results.append([out, *torch.autograd.grad(out, leaves, change(cotangent))])
    return [relative(a, b) for result in results[1:] for a, b in zip(result, results[0], strict=True)]


@pytest.mark.parametrize("method", METHODS)
def test_strides_do_not_matter(pool: WorkerPool, method: str) -> None:
    for errors in pool.run(2, strides_case, method):
        assert len(errors) == 12
        assert max(errors) < 1e-12


@pytest.mark.parametrize("method", METHODS)
def test_data_types_and_head_sizes(pool: WorkerPool, method: str) -> None:
    options = ContextParallelOptions(method)
    cases = [
        Case(40, (4, 2), head_dim, dtype, options, window=window)
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
        for head_dim in (4, 80, 256)
        for window in (0, 9)
    ]
    assert_exact(pool, 2, cases)


def test_a_kernel_that_is_asked_for_is_used(pool: WorkerPool) -> None:
    options = ContextParallelOptions(kernel="math")
    assert_exact(pool, 2, [Case(30, options=options, **mask) for mask in MASKS])


def own_communicators_case(cases: list[Case]) -> tuple[list[dict], int]:
    """As where one communicator is one queue: gradients of keys and values travel over another one."""
    made = mock.Mock(wraps=dist.new_group)
    with mock.patch.object(build, "_is_queue", return_value=True), mock.patch.object(dist, "new_group", made):
        results = attention_case(cases)
    return results, sum(call.kwargs.get("group_desc") == "cp_gradients" for call in made.call_args_list)


def test_gradients_have_a_communicator_of_their_own_where_one_is_a_queue(pool: WorkerPool) -> None:
    options = [ContextParallelOptions(method) for method in METHODS]
    options.append(ContextParallelOptions("hybrid", hybrid_degrees=(2, 2)))
    cases = [Case(37, (8, 4), options=each, mask="documents") for each in options for _ in range(2)]
    for results, groups in pool.run(4, own_communicators_case, cases):
        assert max(error for result in results for error in result["errors"]) < 1e-12
        assert groups == 3  # of all ranks, once for all cases, and for the ring of each hybrid mesh


def bfloat16_error_case(method: str, seq_len: int) -> tuple[list[float], list[float]]:
    """Errors against float64 of context parallel bfloat16, and of the plain bfloat16 kernel on one process."""
    process = Process.from_environment()
    case = Case(seq_len, (4, 2), 64, torch.bfloat16)
    scale = 64**-0.5
    with process_group(process, parse_command_line([]).config.comm):
        mesh = mesh_of_all(process)
        module = InnerAttention()
        *inputs, cotangent = case.inputs()
        wanted = oracle(case, scale)
        leaves = [x.clone().requires_grad_() for x in inputs]
        plain = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
        plain = (plain, *torch.autograd.grad(plain, leaves, cotangent))
        ContextParallelAttention()._apply(module, mesh)
        buffers = [*inputs, cotangent]
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4, method=method) as cp:
            leaves = [x.clone().requires_grad_() for x in inputs]
            out = module(*leaves, plan=cp.attention_plan)
            got = (out, *torch.autograd.grad(out, leaves, cotangent.clone()))
            mine = torch.from_numpy(cp.layout.indices(process.rank))
            assert cp.live.calls == 1
        ours = [relative(a, b[:, :, mine]) for a, b in zip(got, wanted, strict=True)]
        return ours, [relative(a[:, :, mine], b[:, :, mine]) for a, b in zip(plain, wanted, strict=True)]


@pytest.mark.parametrize("method", METHODS)
def test_bfloat16_is_as_exact_as_the_plain_kernel(pool: WorkerPool, method: str) -> None:
    for ours, plain in pool.run(4, bfloat16_error_case, method, 256):
        assert all(mine <= 2 * theirs for mine, theirs in zip(ours, plain, strict=True)), (ours, plain)


def exact_case(method: str, cases: list[tuple[str, Mask]], swap: bool) -> list[list[str]]:
    """What of a position-wise model comes out at the wrong place, for each (load balancer, mask)."""
    process = Process.from_environment()
    with process_group(process, parse_command_line([]).config.comm):
        mesh = mesh_of_all(process)
        module = InnerAttention()
        ContextParallelAttention()._apply(module, mesh)
        with mock.patch.object(AxisLayout, "indices", _swapped if swap else AxisLayout.indices):
            return [_misplaced(mesh, module, ContextParallelOptions(method, name), mask) for name, mask in cases]


_indices = AxisLayout.indices


def _swapped(layout: AxisLayout, rank: int) -> np.ndarray:
    indices = _indices(layout, rank).copy()
    if rank == 1:
        indices[[3, 4]] = indices[[4, 3]]
    return indices


def _misplaced(mesh: DeviceMesh, module: nn.Module, options: ContextParallelOptions, mask: Mask) -> list[str]:
    """Each token is its own unit vector, and queries are zero: a token's output is the mean over what it sees, so that
    its non-zero elements are exactly the visible tokens, and dV of a unit cotangent exactly those that see it."""
    seq_len, rows = mask.q_len, max(mask.sequences, 2)
    tokens = torch.arange(seq_len).repeat(rows, 1)
    labels, positions = tokens + 1000, tokens.clone()
    table = torch.arange(seq_len + 5, dtype=torch.float64).unsqueeze(1)
    buffers = [tokens, labels, positions, table]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1, 1, 1, 0], mask=mask, options=options) as cp:
        mine = torch.from_numpy(_indices(cp.layout, mesh.get_local_rank()))
        pairs = [("tokens", tokens[0], mine), ("labels", labels[1], mine + 1000), ("positions", positions[0], mine)]
        pairs.append(("table", table[:, 0], mine.double()))
        wrong = [name for name, x, expected in pairs if not torch.equal(x, expected)]
        v = F.one_hot(tokens, seq_len).double().unsqueeze(1).repeat(1, mesh.size(), 1, 1).requires_grad_()
        k = torch.randn_like(v).detach()
        out = module(torch.zeros_like(k), k, v, plan=cp.attention_plan)
        visible = torch.from_numpy(dense((causal(seq_len) & mask).repeated(rows)))
        counts = visible.sum(2, keepdim=True).double()
        if not torch.allclose(out[:, 0] * counts[:, mine], visible[:, mine].double(), rtol=0, atol=1e-9):
            wrong.append("output")
        cotangent = (F.one_hot(tokens, seq_len) * counts[:, mine].clamp(min=1)).unsqueeze(1).expand_as(out)
        (dv,) = torch.autograd.grad(out, v, cotangent)
        if not torch.allclose(dv[:, 0], visible.transpose(1, 2)[:, mine].double(), rtol=0, atol=1e-9):
            wrong.append("gradient")
    return wrong


@pytest.mark.parametrize("method", METHODS)
def test_a_position_wise_model_shows_any_permutation(pool: WorkerPool, method: str) -> None:
    masks = [full(29), documents([10, 3, 16]), documents_of(np.array([[0] * 5 + [1] * 24, [0] * 20 + [1] * 9]))]
    cases = [(balancer, mask) for balancer in LOAD_BALANCERS for mask in masks]
    assert pool.run(3, exact_case, method, cases, False) == [[[]] * len(cases)] * 3
    # Two tokens of one rank change places: whatever is cut by position shows it.
    broken = pool.run(3, exact_case, method, [("head_tail", masks[0])], True)
    assert set(broken[1][0]) == {"tokens", "labels", "positions", "table", "output", "gradient"}


class DenseAttention(InnerAttention):
    """Attention by a dense mask, (S, S): the oracle of windows and sinks, which the model has in its plan only."""

    def forward(self, q, k, v, *, scale=None, sinks=None, plan=None):
        visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        if self.sliding_window is not None:
            visible = visible.triu(1 - self.sliding_window)
        mask = torch.zeros_like(visible, dtype=q.dtype).masked_fill(~visible, -torch.inf)
        if sinks is not None:  # one more key and value, zeros, first in line
            k, v = (F.pad(x, (0, 0, 1, 0)) for x in (k, v))
            column = sinks.to(q.dtype)[:, None, None].expand(-1, q.shape[2], 1)
            mask = torch.cat((column, mask.expand(q.shape[1], -1, -1)), dim=2)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


def documents_apart_case(window: int | None, sinks: bool) -> list[float]:
    """Differences of hidden states and gradients: a packed row by plan, and its documents one by one, without any."""
    process = Process.from_environment()
    lengths = [7, 1, 12, 4]
    shape = dataclasses.replace(TINY, vocab_size=64, max_seq_len=24, sliding_window=window, attention_sinks=sinks)
    packed, alone = (Transformer(shape).double() for _ in range(2))
    for layer in packed.layers.values() if sinks else ():
        nn.init.normal_(layer.attention.sinks.weight)
    alone.load_state_dict(packed.state_dict())
    for layer in alone.layers.values():
        layer.attention.inner_attention = DenseAttention(window)
    for model in (packed, alone):
        model.init_buffers(torch.device("cpu"))
    tokens = torch.randint(64, (1, 24), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(n) for n in lengths]).unsqueeze(0)
    cotangent = torch.randn(1, 24, shape.dim, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    with process_group(process, parse_command_line([]).config.comm):
        mesh = mesh_of_all(process)
        for layer in packed.layers.values():
            ContextParallelAttention(sliding_window=window)._apply(layer.attention.inner_attention, mesh)
        mask = documents(lengths)
        with context_parallel(mesh, buffers=[tokens, positions], buffer_seq_dims=[1, 1], mask=mask) as cp:
            hidden = packed(tokens, positions, attention_plan=cp.attention_plan)
            hidden.backward(cotangent)
    parts = [alone(part) for part in tokens.split(lengths, dim=1)]  # each from position 0
    torch.cat(parts, dim=1).backward(cotangent)
    pairs = zip(packed.parameters(), alone.parameters(), strict=True)
    return [
        relative(hidden, torch.cat(parts, dim=1)),
        *(relative(a.grad, b.grad) for a, b in pairs if b.grad is not None),
    ]


@pytest.mark.parametrize(("window", "sinks"), [(None, False), (3, False), (None, True), (3, True)])
def test_packed_documents_are_as_if_each_were_alone(pool: WorkerPool, window: int | None, sinks: bool) -> None:
    """What the parity of whole models rests on, with PyTorch's own attention under a dense mask as the oracle."""
    (errors,) = pool.run(1, documents_apart_case, window, sinks)
    assert len(errors) > 10
    assert max(errors) < 1e-12


def operator_case() -> dict[str, str]:
    """PyTorch's own checks of the operator: schema, autograd registration, shapes and strides without data, tracing."""
    process = Process.from_environment()
    with process_group(process, parse_command_line([]).config.comm):
        q = torch.randn(2, 16, 4, 8).transpose(1, 2).requires_grad_()
        k = torch.randn(2, 16, 2, 8).transpose(1, 2).requires_grad_()
        v = torch.randn(2, 2, 16, 8, requires_grad=True)
        with opened(LivePlan(mesh_of_all(process), head_tail(16, 1)), 2) as handle:
            arguments = q, k, v, handle, 0.3
            result = torch.library.opcheck(context_parallel_attention, arguments)
            torch.library.opcheck(context_parallel_attention, (*arguments, False, 5))
    return result


def test_the_operator_keeps_the_rules_of_operators(pool: WorkerPool) -> None:
    (result,) = pool.run(1, operator_case)
    assert result
    assert set(result.values()) == {"SUCCESS"}
