"""Laws of shards on a disk that is full."""

import errno
import json
import os
from pathlib import Path

import pytest

from trainer.data import DataSettings
from trainer.data.sources.registry import files_of, source_of
from trainer.data.token_files.shards import write_shard


def test_a_shard_that_cannot_be_written_leaves_the_disk_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (lines := tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": "x " * 9999}) + "\n" for _ in range(9)))
    settings = DataSettings("jsonl", str(lines))
    (part,) = source_of(settings).parts(settings, files_of(settings), 1 << 30)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("trainer.data.token_files.made.os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_shard(settings, part, tmp_path / "shard")
    assert os.path.getsize(tmp_path / "shard.bin") == 0
    monkeypatch.undo()
    write_shard(settings, part, tmp_path / "shard")
    assert os.path.getsize(tmp_path / "shard.bin") > 9 * 9999
