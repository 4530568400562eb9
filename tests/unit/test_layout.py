"""Laws of sequence layouts."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.distributed.layout import LAYOUTS, contiguous, head_tail

names = st.sampled_from(sorted(LAYOUTS))


@given(names, st.integers(0, 300), st.integers(1, 20), st.integers(1, 5))
def test_every_token_has_one_owner(name: str, units: int, degree: int, multiple_of: int):
    layout = LAYOUTS[name](units * multiple_of, degree, multiple_of=multiple_of)
    assert sorted(layout.order().tolist()) == list(range(layout.seq_len))
    assert layout.degree == degree
    for rank in range(degree):
        indices = layout.indices(rank)
        assert len(indices) == layout.length(rank)
        assert layout.length(rank) % multiple_of == 0
        assert (np.diff(indices) > 0).all()


@given(names, st.integers(0, 300), st.integers(1, 20))
def test_shards_differ_by_one_unit_at_most(name: str, seq_len: int, degree: int):
    lengths = [LAYOUTS[name](seq_len, degree).length(rank) for rank in range(degree)]
    assert max(lengths) - min(lengths) <= 1


@given(names, st.integers(1, 200), st.integers(1, 12))
def test_the_order_undoes_itself(name: str, seq_len: int, degree: int):
    layout = LAYOUTS[name](seq_len, degree)
    shards = np.concatenate([np.arange(seq_len)[layout.indices(rank)] for rank in range(degree)])
    assert (shards[np.argsort(layout.order())] == np.arange(seq_len)).all()


@given(st.integers(1, 30), st.integers(1, 16))
def test_head_tail_is_exactly_balanced_when_it_divides(piece: int, degree: int):
    layout = head_tail(2 * degree * piece, degree)
    areas = {int((layout.indices(rank) + 1).sum()) for rank in range(degree)}
    assert len(areas) == 1


def test_contiguous_is_not():
    layout = contiguous(64, 4)
    areas = [int((layout.indices(rank) + 1).sum()) for rank in range(4)]
    assert max(areas) / np.mean(areas) > 1.7


def test_as_in_the_picture():
    assert head_tail(16, 2).ranges == (((0, 4), (12, 16)), ((4, 12),))
    assert contiguous(16, 2).ranges == (((0, 8),), ((8, 16),))
    assert head_tail(3, 4).ranges == (((0, 1),), ((1, 2),), ((2, 3),), ())


@pytest.mark.parametrize(("seq_len", "degree", "multiple_of"), [(10, 2, 4), (8, 0, 1), (8, 2, 0), (-1, 2, 1)])
def test_what_cannot_be_cut(seq_len: int, degree: int, multiple_of: int):
    with pytest.raises(ValueError, match="cannot be cut"):
        contiguous(seq_len, degree, multiple_of=multiple_of)
