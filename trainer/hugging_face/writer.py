"""A new folder as transformers has it, written tensor by tensor: safetensors, a file of JSON, the tokenizer's files."""

import contextlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from trainer.config.writable import sync
from trainer.hugging_face.files import INDEX, plan_files, unfinished_output
from trainer.hugging_face.reader import FLOATS
from trainer.hugging_face.tensors import Shape

MOST_BYTES = 5 * 10**9
"""Bytes of the tensors of one file, as transformers has it."""
_CARRIED = (
    "generation_config.json",
    "tokenizer*",
    "chat_template*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
)
_NAMES = {dtype: name for name, dtype in FLOATS.items()}
_BLOCK = 2**20  # elements that are converted to another data type at once


class NewFolder:
    """Writes tensors to a new folder, which has its name when all of it is on the disk.

    As a context manager it removes what was written before an error. `put` each tensor in the order of `shapes`, then
    `finish`.
    """

    def __init__(
        self,
        output: Path,
        shapes: Mapping[str, Shape],
        dtype: torch.dtype,
        *,
        most_bytes: float = MOST_BYTES,
        stem: str = "model",
    ) -> None:
        """shapes: of the tensors by name; dtype: of the files; most_bytes, stem: see `plan_files`.

        Raises:
            OSError: nothing can be written.
        """
        self._output, self._dtype = output, dtype
        self._files, self._index = plan_files(shapes, _NAMES[dtype], most_bytes, stem)
        self._first = {file.tensors[0]: file for file in self._files}
        self._unfinished = unfinished_output(output)
        self._file: BinaryIO | None = None
        if self._unfinished.is_dir():
            shutil.rmtree(self._unfinished)
        self._unfinished.mkdir(parents=True)

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Write a whole tensor, or the next rows of one; OSError. Beside it at most its like is in memory."""
        if (file := self._first.pop(name, None)) is not None:
            self._close()
            self._file = (self._unfinished / file.name).open("wb")
            self._file.write(file.header)
        for block in tensor.reshape(-1).split(_BLOCK):
            self._file.write(memoryview(block.to(self._dtype).view(torch.uint8).numpy()))

    def finish(self, files: Mapping[str, Any], carried_from: Path | None = None) -> None:
        """Write the small files, and give the folder its name; what had it before is replaced.

        files: by name, texts, or the contents of files of JSON; carried_from: folder whose files of tokenizer and
        generation are copied before.

        Raises:
            OSError: something cannot be written.
        """
        self._close()
        if self._index:
            (self._unfinished / INDEX).write_text(self._index, encoding="utf-8")
        if carried_from is not None:
            carry(carried_from, self._unfinished)
        for name, content in files.items():
            text = content if isinstance(content, str) else json.dumps(content, indent=2) + "\n"
            (self._unfinished / name).write_text(text, encoding="utf-8")
        sync(self._unfinished)
        if self._output.is_dir():
            shutil.rmtree(self._output)
        self._unfinished.rename(self._output)
        sync(self._output.parent)

    def __enter__(self) -> "NewFolder":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            return
        if self._file is not None:
            with contextlib.suppress(OSError):  # what is left in its buffer cannot be written either
                self._file.close()
        shutil.rmtree(self._unfinished, ignore_errors=True)

    def _close(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None


def carry(source: Path, target: Path) -> None:
    """Copy the files of tokenizer and generation of a Hugging Face folder."""
    for file in (file for pattern in _CARRIED for file in source.glob(pattern)):
        if file.is_file():
            shutil.copy(file, target)
