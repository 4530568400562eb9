"""Token files that tests make and open."""

import struct
from pathlib import Path

import numpy as np
import pytest

from trainer.commands.main import main as lct
from trainer.config.errors import ConfigError
from trainer.data import DataSettings
from trainer.data.sources.registry import source_of
from trainer.data.token_files import made as module
from trainer.data.token_files.catalog import open_documents
from trainer.data.token_files.format import TokenFiles

TEXTS = ["eins zwei", "", "drei\nä \U0001f600", "x" * 3000, "vier", "fünf sechs sieben", "y " * 500]


def lct_tokenize(*argv: object) -> int:
    return lct(["tokenize", *map(str, argv), "--processes", "1"])


def made(path: Path, output: Path, *arguments: object) -> str:
    assert lct_tokenize("--path", path, "--output", output, *arguments) == 0
    return str(output)


def opened(path: object, dataset: str = "tokens", **how: object) -> TokenFiles:
    return open_documents(DataSettings(dataset, str(path), **how))


def refusal(path: object, **how: object) -> str:
    def read() -> None:
        source = opened(path, **how)
        for i in range(len(source)):
            source[i]

    with pytest.raises(ConfigError) as error:
        read()
    assert "\n" not in str(error.value)
    return str(error.value)


def small_shards(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Cut the inputs into parts of at most `size` bytes."""
    monkeypatch.setattr(
        module.Inputs, "parts", lambda self, _: source_of(self.settings).parts(self.settings, self.files, size)
    )


def megatron(stem: Path, documents: list[list[list[int]]], dtype: str, code: int) -> None:
    """Write a pair as Megatron-LM does; a document has one sequence or more."""
    sequences = [sequence for document in documents for sequence in document]
    content = [np.array(sequence, dtype=dtype).tobytes() for sequence in sequences]
    stem.with_suffix(".bin").write_bytes(b"".join(content))
    ends = np.cumsum([0, *map(len, documents)])
    places = np.cumsum([0, *map(len, content)])[:-1]
    stem.with_suffix(".idx").write_bytes(
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, code, len(sequences), len(ends))
        + np.array([len(sequence) for sequence in sequences], dtype="<i4").tobytes()
        + places.astype("<i8").tobytes()
        + ends.astype("<i8").tobytes()
    )
