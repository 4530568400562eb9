"""Masks as ranges against dense matrices, written out from the definitions."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longshard.context.planning.mask import (
    Band,
    Mask,
    Relation,
    by_sequence,
    causal,
    documents,
    documents_of,
    full,
    sliding_window,
)
from tests.masks import dense

lengths = st.integers(0, 12)
document_lengths = st.lists(st.integers(0, 5), max_size=5)


def places(q_len: int, kv_len: int) -> tuple[np.ndarray, np.ndarray]:
    """(q_len, 1) place of each query among the keys, the last at the last; (1, kv_len) of each key."""
    return np.arange(kv_len - q_len, kv_len)[:, None], np.arange(kv_len)[None, :]


def naive_causal(q_len: int, kv_len: int) -> np.ndarray:
    query, key = places(q_len, kv_len)
    return key <= query


def naive_window(q_len: int, kv_len: int, window: int, is_causal: bool) -> np.ndarray:
    query, key = places(q_len, kv_len)
    distance = query - key
    return (abs(distance) < window) & ((distance >= 0) | (not is_causal))


def naive_documents(q_lengths: list[int], kv_lengths: list[int], is_causal: bool) -> np.ndarray:
    dense = np.zeros((sum(q_lengths), sum(kv_lengths)), dtype=bool)
    i = j = 0
    for n, m in zip(q_lengths, kv_lengths, strict=True):
        dense[i : i + n, j : j + m] = naive_causal(n, m) if is_causal else True
        i, j = i + n, j + m
    return dense


def cut(total: int, ends: list[int]) -> list[int]:
    """Lengths of the pieces of [0, total) between some ends."""
    return np.diff([0, *sorted(min(end, total) for end in ends), total]).tolist()


def check(mask: Mask, expected: np.ndarray) -> None:
    """The mask shows these pairs, (rows, q_len, kv_len), and counts them right."""
    assert (dense(mask) == expected).all()
    assert dense(mask).shape == expected.shape
    assert (mask.work() == expected.sum(axis=(0, 2))).all()
    assert mask.work().shape == (mask.q_len,)
    assert mask.area() == expected.sum()
    queries = [query for band in mask.bands for query in range(band.q_start, band.q_stop)]
    assert queries == sorted(set(queries))
    for row in range(mask.sequences):
        assert (dense(mask.sequence(row))[0] == expected[row]).all()


@st.composite
def single_masks(draw: Callable, q_len: int, kv_len: int) -> tuple[Mask, np.ndarray]:
    """A mask of one row and the matrix that its definition gives."""
    kind = draw(st.sampled_from(["full", "causal", "window", "documents", "nothing"]))
    if kind == "full":
        return full(q_len, kv_len), np.ones((q_len, kv_len), dtype=bool)
    if kind == "causal":
        return causal(q_len, kv_len), naive_causal(q_len, kv_len)
    if kind == "window":
        window, is_causal = draw(st.integers(1, 14)), draw(st.booleans())
        return (
            sliding_window(q_len, window, kv_len, is_causal=is_causal),
            naive_window(q_len, kv_len, window, is_causal),
        )
    if kind == "documents":
        number, is_causal = draw(st.integers(0, 4)), draw(st.booleans())
        ends = st.lists(st.integers(0, 12), min_size=number, max_size=number)
        parts = cut(q_len, draw(ends)), cut(kv_len, draw(ends))
        return documents(*parts, is_causal=is_causal), naive_documents(*parts, is_causal)
    return Mask(q_len, kv_len, ()), np.zeros((q_len, kv_len), dtype=bool)


@st.composite
def masks(draw: Callable, q_len: int, kv_len: int, rows: int) -> tuple[Mask, np.ndarray]:
    """One mask a row, or one for all: (mask, (rows or 1, q_len, kv_len))."""
    if draw(st.booleans()):
        mask, dense = draw(single_masks(q_len, kv_len))
        return mask, dense[None]
    parts = [draw(single_masks(q_len, kv_len)) for _ in range(rows)]
    return by_sequence([mask for mask, _ in parts]), np.stack([dense for _, dense in parts])


@given(st.data(), lengths, lengths, st.integers(1, 3))
def test_every_mask_shows_what_its_definition_says(data: st.DataObject, q_len: int, kv_len: int, rows: int):
    check(*data.draw(masks(q_len, kv_len, rows)))


@given(st.data(), lengths, lengths, st.integers(1, 3))
def test_an_intersection_shows_what_all_its_masks_show(data: st.DataObject, q_len: int, kv_len: int, rows: int):
    (a, dense_a), (b, dense_b), (c, dense_c) = (data.draw(masks(q_len, kv_len, rows)) for _ in range(3))
    check(a & b, dense_a & dense_b)
    check(a & b & c, dense_a & dense_b & dense_c)
    assert (dense(b & a) == dense(a & b)).all()


@given(lengths)
def test_causal_of_equal_lengths_is_a_triangle(seq_len: int):
    check(causal(seq_len), np.tri(seq_len, dtype=bool)[None])
    assert causal(seq_len) == causal(seq_len, seq_len)


def test_the_last_query_stands_at_the_last_key():
    assert dense(causal(2, 4))[0].astype(int).tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert dense(causal(4, 2))[0].astype(int).tolist() == [[0, 0], [0, 0], [1, 0], [1, 1]]
    assert dense(sliding_window(2, 2, 4))[0].astype(int).tolist() == [[0, 1, 1, 0], [0, 0, 1, 1]]


@given(document_lengths, st.booleans())
def test_documents_by_lengths_and_numbers_are_one_mask(parts: list[int], is_causal: bool):
    mask = documents(parts, is_causal=is_causal)
    check(mask, naive_documents(parts, parts, is_causal)[None])
    # Any numbers do, also descending ones.
    ids = np.repeat(np.arange(len(parts), dtype=np.int64)[::-1] * 7 - 3, parts)
    assert documents_of(ids, is_causal=is_causal) == mask


@given(st.integers(1, 10), st.lists(st.lists(st.integers(0, 10), max_size=3), min_size=1, max_size=3))
def test_document_numbers_row_by_row(seq_len: int, ends: list[list[int]]):
    ids = np.stack([np.repeat(np.arange(len(e) + 1), cut(seq_len, e)) for e in ends])
    mask = documents_of(ids, is_causal=True)
    assert mask.sequences == len(ends)
    check(mask, (ids[:, :, None] == ids[:, None, :]) & np.tri(seq_len, dtype=bool))


@given(st.data(), lengths, lengths, st.integers(1, 4))
def test_rows_come_out_as_they_went_in(data: st.DataObject, q_len: int, kv_len: int, rows: int):
    parts = [data.draw(single_masks(q_len, kv_len))[0] for _ in range(rows)]
    whole = by_sequence(parts)
    assert [whole.sequence(number) for number in range(rows)] == parts
    assert whole.repeated(rows) is whole
    again = parts[0].repeated(rows)
    assert again.sequences == rows
    assert all(again.sequence(number) == parts[0] for number in range(rows))
    assert again.area() == rows * parts[0].area()


@given(st.integers(1, 9), st.integers(0, 9))
def test_a_relation_counts_its_pairs(n: int, extra: int):
    m = n + extra
    i, j = np.arange(n)[:, None], np.arange(m)[None, :]
    dense = {
        Relation.FULL: np.ones((n, m), dtype=bool),
        Relation.CAUSAL: j <= i + m - n,
        Relation.BI_CAUSAL: (i <= j) & (j <= i + m - n),
        Relation.INV_CAUSAL: j >= i,
    }
    assert {relation: int(pairs.sum()) for relation, pairs in dense.items()} == {r: r.pairs(n, m) for r in Relation}


def test_a_long_mask_is_never_dense():
    parts = [1 << 20, 3 << 20, 1 << 10]
    mask = documents(parts) & sliding_window(sum(parts), 4096)
    assert len(mask.bands) == 3
    assert mask.area() == sum(n * 4096 - 4096 * 4095 // 2 if n >= 4096 else n * (n + 1) // 2 for n in parts)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: sliding_window(4, 0), "a sliding window of 0 tokens shows nothing; use at least 1"),
        (lambda: documents([2, -1]), "no length may be negative"),
        (lambda: documents([2, 3], [2]), "2 documents of queries and 1 of keys: there must be as many of both"),
        (lambda: documents_of(np.array([5, 5, 4, 5])), "document number 5 comes back after another one"),
        (lambda: documents_of(np.array([[1, 2], [1, 2], [0, 0]])[:, [0, 1, 0]]), "document number 1 comes back"),
        (lambda: causal(4) & causal(4, 5), "masks of 1 x 4 queries, 4 keys and of 1 x 4 queries, 5 keys cannot"),
        (lambda: full(4).repeated(2) & full(4).repeated(3), "masks of 2 x 4 queries, 4 keys and of 3 x 4"),
        (lambda: by_sequence([full(3), full(4)]), "there must be one, of the same lengths, a sequence"),
        (lambda: by_sequence([full(3).repeated(2)]), "there must be one, of the same lengths, a sequence"),
        (lambda: by_sequence([]), "there must be one, of the same lengths, a sequence"),
    ],
)
def test_what_makes_no_mask_is_told_in_one_sentence(make: Callable[[], Mask], sentence: str):
    with pytest.raises(ValueError, match=sentence) as caught:
        make()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "bands",
    [
        [Band(0, 4, 0, 8), Band(2, 6, 0, 8)],
        [Band(4, 8, 0, 8), Band(0, 4, 0, 8)],
        [Band(0, 9, 0, 8)],
        [Band(0, 8, 0, 9)],
        [Band(-1, 4, 0, 8)],
        [Band(4, 4, 0, 8)],
        [Band(0, 8, 3, 3)],
        [Band(0, 8, 0, 8, lower=1, upper=0)],
        [Band(16, 17, 16, 17)],
        [Band(4, 12, 0, 8)],
        [Band(8, 12, 0, 8)],
    ],
)
def test_bands_that_would_be_planned_wrong_are_refused(bands: list[Band]) -> None:
    """Overlapping, descending, empty, and beyond the mask or the row (of two)."""
    with pytest.raises(ValueError, match="Bands must ascend, share no query"):
        Mask(8, 8, tuple(bands), sequences=2)


@pytest.mark.parametrize(("q_len", "kv_len", "rows"), [(-1, 8, 1), (8, -1, 1), (8, 8, 0)])
def test_sizes_that_cannot_be_are_refused(q_len: int, kv_len: int, rows: int) -> None:
    with pytest.raises(ValueError, match="at least one sequence, and no length may be negative"):
        Mask(q_len, kv_len, (), rows)
