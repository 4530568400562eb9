"""Laws of token files of Megatron-LM: a pair is read as it is, or refused with the fault that it has."""

from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from tests.unit.token_file_cases import megatron, opened, refusal
from trainer.data import DataSettings
from trainer.data.token_files.catalog import check_data

pytestmark = pytest.mark.usefixtures("cache")


@pytest.mark.parametrize(
    ("dtype", "code"), [("<u1", 1), ("<i1", 2), ("<i2", 3), ("<i4", 4), ("<i8", 5), ("<u2", 8)], ids=str
)
def test_a_pair_of_megatron_is_read_as_it_is(tmp_path: Path, dtype: str, code: int):
    """Several sequences of a document follow each other; a document may have none."""
    last = min(4351, int(np.iinfo(dtype).max))
    documents = [[[5, 6, 7]], [[8], [9, 10], [], [11]], [], [[last]]]
    megatron(tmp_path / "a", documents, dtype, code)
    source = opened(tmp_path)
    assert [source[i].ids.tolist() for i in range(4)] == [list(chain(*document)) for document in documents]
    check_data(DataSettings("tokens", str(tmp_path / "a.idx")), 4)


@pytest.mark.parametrize(("dtype", "code"), [("<f8", 6), ("<f4", 7), ("<u2", 9)])
def test_a_pair_of_other_numbers_is_refused(tmp_path: Path, dtype: str, code: int):
    megatron(tmp_path / "a", [[[5, 6]]], dtype, code)
    assert "a.idx is no whole index of token ids (Megatron's format, version 1)" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("place", "number", "dtype"),
    [
        (0, -3, "<i4"),  # the length of the first sequence
        (4, 1, "<i4"),
        (20, 2, "<i8"),  # the place of the second one
        (36, 1, "<i8"),  # the first sequence of the first document
        (44, 4, "<i8"),  # documents that go back
        (52, 9, "<i8"),  # behind the last sequence
        (52, 2, "<i8"),
    ],
)
def test_a_damaged_index_of_megatron_is_refused(tmp_path: Path, place: int, number: int, dtype: str):
    megatron(tmp_path / "a", [[[5, 6, 7]], [[8, 9], [10, 11]]], "<u2", 8)
    file = tmp_path / "a.idx"
    content = bytearray(file.read_bytes())
    value = np.array([number], dtype=dtype).tobytes()
    content[34 + place : 34 + place + len(value)] = value
    file.write_bytes(content)
    assert "a.idx is damaged: its sequences do not follow each other in a.bin" in refusal(tmp_path)


def test_a_token_beyond_the_vocabulary_is_told(tmp_path: Path):
    megatron(tmp_path / "a", [[[5]], [[4352]], [[6]]], "<i4", 4)
    message = refusal(tmp_path)
    assert "a.bin, document 1, has the token id 4352, and the tokenizer has 4,352 (0 and up)" in message
    megatron(tmp_path / "a", [[[5]], [[-1]], [[6]]], "<i4", 4)
    assert "document 1, has the token id -1" in refusal(tmp_path)
    source = opened(tmp_path, skips=True)
    assert [source[i].ids.tolist() for i in range(3)] == [[5], [], [6]]


def test_ids_of_another_program_need_an_index(tmp_path: Path):
    np.arange(9).astype("<u2").tofile(tmp_path / "part-0.npy")
    assert "part-0.npy is no index of token ids; name an .idx file next to its .bin" in refusal(tmp_path / "part-0.npy")
    assert "is a folder without *.idx files" in refusal(tmp_path)
