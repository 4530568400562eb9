"""Laws of packing: nothing is lost or invented, and no label leaves its document."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.packing import pack
from trainer.data.packing import IGNORE_INDEX

# Every token of every document is another number, so that a wrong place cannot pass unseen.
LENGTHS = st.lists(st.integers(0, 20), max_size=12)
SEQ_LEN = st.integers(1, 9)


def make(lengths: list[int]) -> list[np.ndarray]:
    ends = np.cumsum([0, *lengths])
    return [np.arange(start, end, dtype=np.int64) for start, end in pairwise(ends)]


def reference(lengths: list[int], seq_len: int) -> dict[str, list[list[int]]]:
    """The definition, token by token."""
    flat = [(d, i, token) for d, document in enumerate(make(lengths)) for i, token in enumerate(document.tolist())]
    rows: dict[str, list[list[int]]] = {"tokens": [], "labels": [], "positions": [], "document_ids": []}
    for start in range(0, len(flat) - seq_len + 1, seq_len):
        part = flat[start : start + seq_len]
        seen = sorted({d for d, _, _ in part})
        first = {d: min(i for e, i, _ in part if e == d) for d in seen}
        rows["tokens"].append([token for _, _, token in part])
        rows["labels"].append([token + 1 if i + 1 < lengths[d] else IGNORE_INDEX for d, i, token in part])
        rows["positions"].append([i - first[d] for d, i, _ in part])
        rows["document_ids"].append([seen.index(d) for d, _, _ in part])
    return rows


@given(LENGTHS, SEQ_LEN)
def test_rows_are_what_the_definition_says(lengths, seq_len):
    rows = list(pack(make(lengths), seq_len))
    for name, expected in reference(lengths, seq_len).items():
        assert [getattr(row, name).tolist() for row in rows] == expected, name


@given(LENGTHS, SEQ_LEN)
def test_rows_joined_are_the_documents_joined(lengths, seq_len):
    rows = list(pack(make(lengths), seq_len))
    joined = [token for row in rows for token in row.tokens.tolist()]
    total = sum(lengths)
    assert joined == list(range(total - total % seq_len))


@given(LENGTHS, SEQ_LEN)
def test_a_document_of_n_tokens_has_n_minus_one_labels_wherever_it_is_cut(lengths, seq_len):
    padded = [*lengths, seq_len]  # fills the last row
    rows = list(pack(make(padded), seq_len))
    labels = {label for row in rows for label in row.labels.tolist()} - {IGNORE_INDEX}
    tokens = {token for row in rows for token in row.tokens.tolist()}
    expected = {int(token) + 1 for document in make(padded) for token in document[:-1] if int(token) in tokens}
    assert labels == expected


@given(LENGTHS, SEQ_LEN)
def test_positions_stay_below_seq_len_and_restart_where_the_document_changes(lengths, seq_len):
    for row in pack(make(lengths), seq_len):
        starts = np.flatnonzero(np.diff(row.document_ids, prepend=-1))
        assert (row.positions[starts] == 0).all()
        assert row.document_ids.tolist() == sorted(row.document_ids.tolist())
        assert row.document_ids[0] == 0
        assert (np.diff(row.positions)[np.diff(row.document_ids) == 0] == 1).all()
        assert row.positions.max() < seq_len


def test_the_example_of_the_docstring():
    bos, a, b, c, eos = 0, 1, 2, 3, 4
    documents = [np.array([bos, a, b, eos]), np.array([bos, c, eos]), np.array([bos, a, b, b, b, b, eos])]
    first, second, third = pack(documents, 4)
    assert first.labels.tolist() == [a, b, eos, IGNORE_INDEX]
    assert second.tokens.tolist() == [bos, c, eos, bos]
    assert second.labels.tolist() == [c, eos, IGNORE_INDEX, a]  # the label of the cut document stands in the next row
    assert second.document_ids.tolist() == [0, 0, 0, 1]
    assert third.tokens.tolist() == [a, b, b, b]
    assert third.positions.tolist() == [0, 1, 2, 3]
    assert third.document_ids.tolist() == [0, 0, 0, 0]


def test_arrays_of_rows_share_no_memory():
    rows = list(pack([np.arange(20)], 4))
    arrays = [getattr(row, name) for row in rows for name in ("tokens", "labels", "positions", "document_ids")]
    assert not any(np.shares_memory(x, y) for i, x in enumerate(arrays) for y in arrays[:i])


def test_rows_without_length_are_refused():
    with pytest.raises(ValueError, match="seq_len = 0"):
        list(pack([np.arange(3)], 0))
