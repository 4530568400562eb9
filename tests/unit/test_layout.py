"""Laws of sequence layouts."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longshard.context.planning.balance import LOAD_BALANCERS, build_layout
from longshard.context.planning.mask import causal
from longshard.sharding.layout import LAYOUTS, AxisLayout, contiguous, head_tail, sized
from longshard.sharding.placement import rows_on

names = st.sampled_from(LOAD_BALANCERS)


def imbalance(layout: AxisLayout, work: np.ndarray) -> float:
    """Largest share of the work, over the mean."""
    shares = [int(work[layout.indices(rank)].sum()) for rank in range(layout.degree)]
    return max(shares) / np.mean(shares)


@given(names, st.integers(0, 300), st.integers(1, 20), st.integers(1, 5))
def test_every_token_has_one_owner(name: str, units: int, degree: int, multiple_of: int):
    layout = build_layout(name, units * multiple_of, degree, multiple_of=multiple_of)
    assert sorted(layout.order().tolist()) == list(range(layout.length))
    assert (layout.name, layout.length, layout.degree) == (name, units * multiple_of, degree)
    for rank in range(degree):
        indices = layout.indices(rank)
        assert len(indices) == layout.local_length(rank)
        assert layout.local_length(rank) % multiple_of == 0
        assert (np.diff(indices) > 0).all()
        borders = [border for part in layout.ranges[rank] for border in part]
        assert all(a < b for a, b in pairwise(borders))  # none empty, no two touching


@given(names, st.integers(0, 300), st.integers(1, 20), st.integers(1, 5))
def test_shards_differ_by_one_unit_at_most(name: str, units: int, degree: int, multiple_of: int):
    layout = build_layout(name, units * multiple_of, degree, multiple_of=multiple_of)
    lengths = [layout.local_length(rank) for rank in range(degree)]
    assert max(lengths) - min(lengths) in (0, multiple_of)


@given(names, st.integers(1, 200), st.integers(1, 12))
def test_the_order_undoes_itself(name: str, seq_len: int, degree: int):
    layout = build_layout(name, seq_len, degree)
    shards = np.concatenate([np.arange(seq_len)[layout.indices(rank)] for rank in range(degree)])
    assert (shards[np.argsort(layout.order())] == np.arange(seq_len)).all()


@given(names, st.integers(0, 60), st.integers(1, 6), st.integers(1, 4))
def test_a_repeated_layout_cuts_each_sequence_alike(name: str, seq_len: int, degree: int, rows: int):
    layout = build_layout(name, seq_len, degree)
    whole = layout.repeated(rows)
    assert whole.length == rows * seq_len
    for rank in range(degree):
        one = layout.indices(rank)
        assert whole.indices(rank).tolist() == [b * seq_len + i for b in range(rows) for i in one.tolist()]


@given(names, st.integers(0, 60), st.integers(1, 6), st.integers(1, 4), st.integers(1, 3))
def test_a_cut_layout_has_the_same_tokens_in_the_same_order(
    name: str, units: int, degree: int, pieces: int, multiple_of: int
):
    layout = build_layout(name, units * multiple_of, degree, multiple_of=multiple_of)
    cut = layout.cut(pieces, multiple_of=multiple_of)
    assert cut.degree == degree * pieces
    for rank in range(degree):
        shards = [cut.indices(rank * pieces + piece) for piece in range(pieces)]
        assert np.concatenate(shards).tolist() == layout.indices(rank).tolist()
        lengths = [len(shard) for shard in shards]
        assert max(lengths) - min(lengths) in (0, multiple_of)
        assert all(length % multiple_of == 0 for length in lengths)


@given(st.integers(1, 30), st.integers(1, 16))
def test_head_tail_is_exactly_balanced_when_it_divides(piece: int, degree: int):
    layout = head_tail(2 * degree * piece, degree)
    areas = {int((layout.indices(rank) + 1).sum()) for rank in range(degree)}
    assert len(areas) == 1


def test_contiguous_is_not():
    assert imbalance(contiguous(64, 4), causal(64).work()) > 1.7


def test_as_in_the_picture():
    assert head_tail(16, 2).ranges == (((0, 4), (12, 16)), ((4, 12),))
    assert contiguous(16, 2).ranges == (((0, 8),), ((8, 16),))
    assert head_tail(3, 4).ranges == (((0, 1),), ((1, 2),), ((2, 3),), ())


@pytest.mark.parametrize("name", LOAD_BALANCERS)
@pytest.mark.parametrize(("seq_len", "degree", "multiple_of"), [(10, 2, 4), (8, 0, 1), (8, 2, 0), (130, 2, 4)])
def test_what_cannot_be_cut(name: str, seq_len: int, degree: int, multiple_of: int):
    with pytest.raises(ValueError, match=f"a sequence of {seq_len} tokens cannot be cut"):
        build_layout(name, seq_len, degree, multiple_of=multiple_of)


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_no_sequence_has_a_negative_length(name: str):
    with pytest.raises(ValueError, match="a sequence of -1 tokens cannot be cut"):
        build_layout(name, -1, 2)


def test_rows_are_copied_to_a_device_once_for_each_layout() -> None:
    cpu = torch.device("cpu")
    rows = rows_on(head_tail(10, 2), 0, cpu)
    assert rows.tolist() == head_tail(10, 2).indices(0).tolist()
    assert rows_on(head_tail(10, 2), 0, cpu) is rows
    assert rows_on(head_tail(12, 2), 0, cpu) is not rows


@pytest.mark.parametrize(
    ("rows", "whole"), [((40, 30), (32, 38)), ((10, 50, 10), (0, 64, 6)), ((70, 0), (70, 0)), ((15, 15), (0, 30))]
)
def test_ends_are_rounded_to_whole_units(rows: tuple[int, ...], whole: tuple[int, ...]) -> None:
    layout = sized(rows).rounded(32)
    assert [layout.local_length(rank) for rank in range(layout.degree)] == [*whole]
