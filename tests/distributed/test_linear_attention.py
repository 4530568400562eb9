"""Law: linear attention over many ranks is the recurrence of one token after another, on any layout, with documents."""

import importlib
import random
from itertools import pairwise
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from longshard import region
from longshard.context import linear_scan
from longshard.context.execution import linear_chunks
from longshard.context.execution.linear_chunks import Tokens
from longshard.context.linear_attention import linear_attention, operator
from longshard.context.linear_scan import fragments_of
from longshard.sharding import exchange
from longshard.sharding.layout import AxisLayout
from tests.distributed.pool import WorkerPool
from tests.distributed.test_short_convolution import any_layout, mesh_of_all
from tests.slow import slow

TOLERANCE = 1e-12
CASES = 12
KINDS = ("delta", "delta of channels", "decay", "decay of channels")


def token_by_token(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor | None,
    starts: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """The recurrence by its definition; starts: (B, S), 1 where a document begins."""
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    decay = log_decay.exp().view(*v.shape[:3], -1)
    state, outputs = v.new_zeros(v.shape[0], v.shape[2], q.shape[3], v.shape[3]), []
    for t in range(q.shape[1]):
        state = torch.where(starts[:, t, None, None, None] == 1, 0, state) * decay[:, t].unsqueeze(-1)
        added = v[:, t]
        if beta is not None:
            added = beta[:, t].unsqueeze(-1) * (added - torch.einsum("bhk,bhkv->bhv", k[:, t], state))
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], added)
        outputs.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(outputs, 1)


def drawn(
    kind: str, batch: int, length: int, *, seed: int, strength: float = 1.0, dtype: torch.dtype = torch.float64
) -> list[torch.Tensor | None]:
    """q, k, v, logarithms of decays down to `strength`, and beta; two heads of keys and four of values."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(batch, length, heads, width, dtype=dtype, generator=generator)
        for heads, width in ((2, 5), (2, 5), (4, 3))
    )
    shape = (batch, length, 4, 5) if "channels" in kind else (batch, length, 4)
    decay = -strength * torch.rand(shape, dtype=dtype, generator=generator)
    beta = torch.rand(batch, length, 4, dtype=dtype, generator=generator) if "delta" in kind else None
    inputs = [q, k / k.norm(dim=-1, keepdim=True), v, decay, beta]
    return [None if x is None else x.requires_grad_() for x in inputs]


def starts_of(batch: int, length: int, share: float, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    starts = (torch.rand(batch, length, generator=generator) < share).long()
    starts[:, :1] = 1
    return starts


def positions_of(starts: torch.Tensor) -> torch.Tensor:
    places = torch.arange(starts.shape[1])
    return places - (places * starts).cummax(1).values


def differences(tensors: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """The largest relative error; a tensor that should vanish counts as a hundredth of the largest one."""
    least = max(b.norm().item() for b in wanted) / 100
    return max(((a - b).norm() / max(b.norm().item(), least)).item() for a, b in zip(tensors, wanted, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("length", "packed"), [(1, False), (63, True), (64, False), (150, True), (200, False)])
@pytest.mark.parametrize("runs", [False, True], ids=["", "runs"])
def test_chunks_are_the_recurrence(
    kind: str, length: int, packed: bool, runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if runs:  # of two chunks or three
        monkeypatch.setattr("longshard.context.linear_pass.CHUNK", 16)
        monkeypatch.setitem(linear_chunks.LONGEST_RUN, "cpu", 1)
    inputs, starts = drawn(kind, 2, length, seed=length), starts_of(2, length, 0.1 * packed, length)
    positions = positions_of(starts) if packed else None
    got, _, last = linear_attention(Tokens(*inputs, positions, 0.7), None)
    wanted = token_by_token(*inputs, starts, 0.7)
    leaves = [x for x in inputs if x is not None]
    cotangent = torch.randn(wanted.shape, dtype=wanted.dtype, generator=torch.Generator().manual_seed(length))
    gradients = [torch.autograd.grad(x, leaves, cotangent) for x in (got, wanted)]
    assert differences([got, *gradients[0]], [wanted, *gradients[1]]) < TOLERANCE
    last_token = [None if x is None else x.detach()[:, -1:] for x in inputs]
    one = torch.einsum("bhk,bhkv->bhv", last_token[0][:, 0].repeat_interleave(2, 1), last)
    assert differences([0.7 * one], [wanted[:, -1].detach()]) < TOLERANCE, "the state behind the last token"


@pytest.mark.parametrize("kind", ["delta of channels", "decay of channels", "delta"])
def test_strong_decays_neither_overflow_nor_divide(kind: str) -> None:
    """A chunk forgets by e^-3000: quotients of running products would be 0 / 0."""
    inputs = drawn(kind, 1, 130, seed=1, strength=50.0, dtype=torch.float32)
    with torch.no_grad():
        inputs[3][:, ::7] = 0.0
    got = linear_attention(Tokens(*inputs, None, 1.0), None)[0]
    leaves = [x for x in inputs if x is not None]
    cotangent = torch.randn(got.shape, generator=torch.Generator().manual_seed(2))
    gradients = torch.autograd.grad(got, leaves, cotangent)
    exact = [None if x is None else x.detach().double().requires_grad_() for x in inputs]
    wanted = token_by_token(*exact, starts_of(1, 130, 0.0, 0), 1.0)
    exact_gradients = torch.autograd.grad(wanted, [x for x in exact if x is not None], cotangent.double())
    assert differences([got, *gradients], [wanted, *exact_gradients]) < 1e-5


def random_cases(seed: int, in_turn: bool) -> list[str]:
    """Compare outputs, gradients and bytes of CASES calls; return the differences on this rank."""
    problems: list[str] = []
    most = 0 if in_turn else linear_scan.GATHERED_BYTES
    with mesh_of_all() as mesh, mock.patch.object(linear_scan, "GATHERED_BYTES", most):
        for number in range(CASES):
            rng = random.Random(1000 * seed + number)
            length, batch = rng.choice((rng.randint(1, 24), rng.randint(100, 300))), rng.randint(1, 2)
            layout, kind = any_layout(rng, length, mesh.size()), rng.choice(KINDS)
            packed, run, chunk = rng.choice((0.0, 0.02, 0.3)), rng.choice((1, 10**9)), rng.choice((8, 64))
            chunks = mock.patch("longshard.context.linear_pass.CHUNK", chunk)
            with chunks, mock.patch.dict(linear_chunks.LONGEST_RUN, cpu=run):
                faults = one_case(mesh, layout, kind, batch, packed)
            problems += [f"case {number}, {kind}, {layout.ranges}, chunks {chunk}, {run}: {x}" for x in faults]
    return problems


def one_case(mesh: DeviceMesh, layout: AxisLayout, kind: str, batch: int, packed: float) -> list[str]:
    inputs, starts = drawn(kind, batch, layout.length, seed=layout.length), starts_of(batch, layout.length, packed, 3)
    wanted = token_by_token(*inputs, starts, 0.5)
    cotangent = torch.randn(wanted.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    rank = mesh.get_local_rank()
    own = torch.from_numpy(layout.indices(rank))
    shards = [None if x is None else x[:, own].detach().requires_grad_() for x in inputs]
    exchange.bytes_sent.clear()
    with region(mesh, layout, sequences=batch) as opened:
        positions = positions_of(starts)[:, own] if packed else None
        got = linear_attention(Tokens(*shards, positions, 0.5), opened.attention_plan)[0]
        before = exchange.bytes_sent.copy()
        gradients = torch.autograd.grad(got, [x for x in shards if x is not None], cotangent[:, own])
    whole_gradients = torch.autograd.grad(wanted, [x for x in inputs if x is not None], cotangent)
    names = ["output", "q", "k", "v", "decay", "beta"]
    pairs = zip(names, [got, *gradients], [wanted, *whole_gradients], strict=False)
    problems = [name for name, a, b in pairs if not (a - b[:, own]).norm() <= TOLERANCE * max(b.norm().item(), 1.0)]
    after = exchange.bytes_sent - before
    total = torch.tensor([[sent["exchange"], sent["states"]] for sent in (before, after)])
    dist.all_reduce(total)
    state = 8 * batch * 4 * 5
    if linear_scan.GATHERED_BYTES:
        slot = state * (3 + (5 if "delta" in kind else 1))
        planned = [[slot * maps_sent(layout, behind), 0] for behind in (False, True)]
    else:  # a state for each border of fragments between ranks, in either direction
        owners = linear_scan._owners(fragments_of(layout))
        planned = [[0, state * 3 * sum(a != b for a, b in pairwise(owners))]] * 2
    return problems if total.tolist() == planned else [*problems, f"bytes {total.tolist()}"]


def maps_sent(layout: AxisLayout, behind: bool) -> int:
    """Return the number of maps that ranks get: maps of others before their last fragment, or behind their first."""
    owner = {i: r for r, ranges in enumerate(fragments_of(layout).ranges) for a, b in ranges for i in range(a, b)}
    maps = 0
    for rank in range(layout.degree):
        own = [i for i, r in owner.items() if r == rank]
        if own:
            maps += sum(r != rank and (i > min(own) if behind else i < max(own)) for i, r in owner.items())
    return maps


@pytest.mark.parametrize("seed", [0, *slow(*range(1, 12))])
@pytest.mark.parametrize("world_size", [2, 4, *slow(1, 3, 8)])
@pytest.mark.parametrize("in_turn", [False, True], ids=["gathered", "in_turn"])
def test_random_layouts_and_documents(pool: WorkerPool, world_size: int, seed: int, in_turn: bool) -> None:
    """Shards of any size, down to none and to one row, also many a rank; and as many bytes as maps, or states, have."""
    assert not [problem for rank in pool.run(world_size, random_cases, seed, in_turn) for problem in rank]


def test_maps_are_gathered_while_they_are_small() -> None:
    """Maps of 32 heads with 128 x 256 numbers in float32 take 4 MiB a fragment: up to 16 fragments are gathered."""
    for fragments, gathered in ((2, True), (16, True), (17, False), (128, False)):
        layout = AxisLayout("fragments", fragments, (((0, fragments),),))
        assert linear_scan.is_gathered(layout, 4 * 32 * 128 * 256) == gathered


def wrong_case(fault: str) -> float:
    """The error of the same call with one of the parts left out."""
    with mesh_of_all() as mesh:
        layout = AxisLayout("pieces", 40, (((0, 10), (30, 40)), ((10, 30),)))
        inputs, starts = drawn("delta", 1, 40, seed=0), starts_of(1, 40, 0.05, 3)
        wanted = token_by_token(*inputs, starts, 0.5).detach()
        own = torch.from_numpy(layout.indices(mesh.get_local_rank()))
        shards = [x[:, own].detach() for x in inputs]
        with region(mesh, layout, sequences=1) as opened:
            positions = None if fault == "documents" else positions_of(starts)[:, own]
            plan = None if fault == "exchange" else opened.attention_plan
            if fault == "exchange":
                linear_attention(Tokens(*shards, positions, 0.5), opened.attention_plan)
            got = linear_attention(Tokens(*shards, positions, 0.5), plan)[0]
        return ((got - wanted[:, own]).norm() / wanted.norm()).item()


@pytest.mark.parametrize("fault", ["documents", "exchange"])
def test_the_test_sees_what_is_missing(pool: WorkerPool, fault: str) -> None:
    assert max(pool.run(2, wrong_case, fault)) > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_the_operator_keeps_the_rules_of_operators(kind: str) -> None:
    inputs = drawn(kind, 1, 20, seed=0)
    *tokens, beta = inputs
    positions = positions_of(starts_of(1, 20, 0.2, 1))
    torch.library.opcheck(operator, (tokens, beta, None, positions, 0.5))


def test_a_chunk_has_the_size_of_its_definition() -> None:
    """Kernels of others use 64, and blocks divide it by a power of two."""
    assert linear_chunks.CHUNK == 64
    size = importlib.import_module("longshard.context.linear_pass")._size
    assert [size(tokens) for tokens in (1, 4, 5, 9, 33, 64, 10**6)] == [4, 4, 8, 16, 64, 64, 64]
