"""Laws of columns: the named column is read, and a row that cannot be converted is a bad record."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from trainer.data.sources.records import BadRecord, HubData, rows_of, text_of_row


def test_a_column_with_a_dot_is_not_a_field_of_a_struct(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"a": [{"b": "of the struct"}], "a.b": ["of the column"]})
    parquet.write_table(table, tmp_path / "x.parquet")
    assert list(rows_of(str(tmp_path / "x.parquet"), ["a.b"], partial(text_of_row, "a.b"))) == ["of the column"]


class Rows:
    """A shard of the hub whose third row cannot be converted."""

    num_shards = 1

    def __init__(self, error: Exception) -> None:
        self.error = error

    def shard(self, *_: int) -> Iterator[dict[str, str]]:
        yield {"text": "a"}
        yield {"text": "b"}
        raise self.error


def test_a_row_of_the_hub_that_cannot_be_converted_is_a_bad_record() -> None:
    data = HubData("some/data")
    data.__dict__["_rows"] = Rows(ValueError("Couldn't cast int64 to string"))
    *texts, bad = data.records(0, partial(text_of_row, "text"))
    assert texts == ["a", "b"]
    assert isinstance(bad, BadRecord)
    assert "shard 0, cannot be read from row 2 on (Couldn't cast int64 to string); correct its file" in str(bad)
    assert "same command" not in str(bad)
