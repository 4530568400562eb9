"""Law: linear attention of ranks that are threads is the recurrence, by both ways of its scan, and under autocast.

With deterministic algorithms they have the bits of one process.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longshard.context import linear_scan
from longshard.context.execution.linear_chunks import LONGEST_RUN, Tokens
from longshard.context.linear_attention import linear_attention
from longshard.context.live import LivePlan, opened
from longshard.sharding.layout import AxisLayout, head_tail
from tests.distributed.test_linear_attention import (
    KINDS,
    TOLERANCE,
    differences,
    drawn,
    positions_of,
    starts_of,
    token_by_token,
)
from tests.thread_ranks import ThreadMesh, run_ranks
from tests.unit.test_windows import layouts

LENGTH, RANKS = 37, 3


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    with mock.patch.dict(LONGEST_RUN, cpu=1):  # as on a GPU: which are not to be
        yield
    torch.use_deterministic_algorithms(False)


def scanned(
    rank: int,
    mesh: ThreadMesh,
    layout: AxisLayout,
    kind: str,
    dtype: torch.dtype,
    autocast: bool,
    share: float = 0.1,
    strength: float = 1.0,
) -> list[torch.Tensor]:
    """Output and gradients of this rank's rows; share: of the tokens at which a document begins."""
    own = torch.from_numpy(layout.indices(rank))
    inputs = drawn(kind, 2, layout.length, seed=1, strength=strength, dtype=dtype)
    shards = [None if x is None else x[:, own].detach().requires_grad_() for x in inputs]
    positions = positions_of(starts_of(2, layout.length, share, 3))[:, own]
    with opened(LivePlan(mesh, layout), 2) as handle:
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            out = linear_attention(Tokens(*shards, positions, 0.5), handle)[0]
        leaves = [x for x in shards if x is not None]
        return [out.detach(), *torch.autograd.grad(out, leaves, _cotangent(out.dtype, layout.length)[:, own])]


def _cotangent(dtype: torch.dtype, length: int = LENGTH) -> torch.Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(2, length, 4, 3, dtype=torch.float64, generator=generator).to(dtype)


def whole_of(layout: AxisLayout, parts: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    places = torch.from_numpy(layout.order().argsort())
    return [torch.cat(shards, 1)[:, places] for shards in zip(*parts, strict=True)]


@pytest.mark.parametrize("most", [0, linear_scan.GATHERED_BYTES], ids=["in_turn", "gathered"])
@pytest.mark.parametrize("kind", KINDS)
def test_threads_are_ranks(kind: str, most: int) -> None:
    layout = head_tail(LENGTH, RANKS)
    with mock.patch.object(linear_scan, "GATHERED_BYTES", most):
        got = whole_of(layout, run_ranks(RANKS, scanned, layout, kind, torch.float64, False))
    inputs = drawn(kind, 2, LENGTH, seed=1)
    wanted = token_by_token(*inputs, starts_of(2, LENGTH, 0.1, 3), 0.5)
    gradients = torch.autograd.grad(wanted, [x for x in inputs if x is not None], _cotangent(torch.float64))
    assert differences(got, [wanted, *gradients]) < TOLERANCE


@pytest.mark.parametrize("examples", [25, pytest.param(400, marks=pytest.mark.slow)])
def test_any_layout_is_the_recurrence(examples: int) -> None:
    """Any owner of each token, ranks without any, documents down to one token, strong and weak decays, short chunks."""

    @settings(max_examples=examples, deadline=None)
    @given(
        layouts(40),
        st.sampled_from(KINDS),
        st.sampled_from([0.0, 0.1, 0.5, 1.0]),
        st.sampled_from([0.01, 1.0, 30.0]),
        st.sampled_from([0, linear_scan.GATHERED_BYTES]),
        st.sampled_from([8, 16, 64]),
        st.sampled_from([1, 4]),
    )
    def law(layout: AxisLayout, kind: str, share: float, strength: float, most: int, chunk: int, run: int) -> None:
        with (
            mock.patch.object(linear_scan, "GATHERED_BYTES", most),
            mock.patch("longshard.context.linear_pass.CHUNK", chunk),
            mock.patch.dict(LONGEST_RUN, cpu=run),
        ):
            parts = run_ranks(layout.degree, scanned, layout, kind, torch.float64, False, share, strength)
        inputs = drawn(kind, 2, layout.length, seed=1, strength=strength)
        wanted = token_by_token(*inputs, starts_of(2, layout.length, share, 3), 0.5)
        cotangent = _cotangent(torch.float64, layout.length)
        gradients = torch.autograd.grad(wanted, [x for x in inputs if x is not None], cotangent)
        assert differences(whole_of(layout, parts), [wanted, *gradients]) < TOLERANCE

    law()


@settings(max_examples=200, deadline=None)
@given(layouts(40), st.integers(1, 9))
def test_fragments_are_in_the_order_of_their_tokens(layout: AxisLayout, size: int) -> None:
    """Check the owners of fragments and the maps that a rank needs, for a layout and for its cuts at chunks."""
    for cut in (layout, linear_scan.aligned(layout, size)):
        starts = sorted(start for ranges in cut.ranges for start, _ in ranges)
        fragments = linear_scan.fragments_of(cut)
        for rank, ranges in enumerate(cut.ranges):
            own_fragments = [starts.index(start) for start, _ in ranges]
            assert [i for a, b in fragments.ranges[rank] for i in range(a, b)] == own_fragments
            before, behind = linear_scan.maps_before(fragments)[rank], linear_scan.maps_after(fragments)[rank]
            assert {i for a, b in before for i in range(a, b)} == set(range(max(own_fragments, default=0)))
            assert {i for a, b in behind for i in range(a, b)} == set(
                range(min(own_fragments, default=len(starts)) + 1, len(starts))
            )
    chunks = {start // size: rank for rank, ranges in enumerate(cut.ranges) for a, b in ranges for start in range(a, b)}
    last_tokens = {(stop - 1) // size: stop - 1 for stop in [*range(size, layout.length, size), layout.length]}
    owner = {t: rank for rank, ranges in enumerate(layout.ranges) for a, b in ranges for t in range(a, b)}
    assert chunks == {chunk: owner[token] for chunk, token in last_tokens.items()}


def test_autocast_changes_nothing() -> None:
    """States and maps stay in float32, whatever the type of the products around."""
    layout = head_tail(LENGTH, RANKS)
    plain, cast = (run_ranks(RANKS, scanned, layout, "delta", torch.float32, autocast) for autocast in (False, True))
    for a, b in zip(whole_of(layout, plain), whole_of(layout, cast), strict=True):
        assert b.dtype == torch.float32
        assert torch.equal(a, b)


CUTS = {
    "head_tail": head_tail(300, RANKS),
    "uneven": AxisLayout("uneven", 300, (((0, 5), (70, 150)), ((5, 6), (150, 290)), ((6, 70), (290, 300)))),
    "one rank has nothing": AxisLayout("empty", 300, (((0, 131),), (), ((131, 300),))),
}


def rank_gradients(
    rank: int, mesh: ThreadMesh, layout: AxisLayout, tensors: list[torch.Tensor | None]
) -> list[torch.Tensor]:
    with opened(LivePlan(mesh, layout), 2) as handle:
        return with_gradients(tensors, torch.from_numpy(layout.indices(rank)), handle)


def with_gradients(
    tensors: list[torch.Tensor | None], own: torch.Tensor, handle: torch.Tensor | None
) -> list[torch.Tensor]:
    """Output and gradients of some rows; the last two inputs are positions and a cotangent."""
    *inputs, positions, cotangent = (None if x is None else x[:, own].detach() for x in tensors)
    inputs = [None if x is None else x.requires_grad_() for x in inputs]
    out = linear_attention(Tokens(*inputs, positions, 0.5), handle)[0]
    return [out.detach(), *torch.autograd.grad(out, [x for x in inputs if x is not None], cotangent)]


def ranks_and_one(kind: str, cut: str, dtype: torch.dtype) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Output and gradients of ranks, and of one process."""
    layout = CUTS[cut]
    cotangent = torch.randn(2, 300, 4, 3, generator=torch.Generator().manual_seed(5)).to(dtype)
    tensors = [
        *drawn(kind, 2, 300, seed=1, strength=0.01, dtype=dtype),
        positions_of(starts_of(2, 300, 0.002, 3)),
        cotangent,
    ]
    got = whole_of(layout, run_ranks(RANKS, rank_gradients, layout, tensors))
    return zip(got, with_gradients(tensors, torch.arange(300), None), strict=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_deterministic_ranks_have_the_bits_of_one_process(
    deterministic: None, kind: str, cut: str, dtype: torch.dtype
) -> None:
    for several, single in ranks_and_one(kind, cut, dtype):
        assert torch.equal(several, single)


@pytest.mark.parametrize("kind", KINDS)
def test_bits_of_other_ranks_differ_otherwise(kind: str) -> None:
    assert any(not torch.equal(*pair) for pair in ranks_and_one(kind, "head_tail", torch.float32))
