"""A new folder in transformers' format, written tensor by tensor: safetensors, a file of JSON, the tokenizer's files.

Also a copy of a folder with more special tokens: in its tokenizer, and as rows of its embedding and output. A new row
is the mean of the rows of all earlier tokens, in float64 (Hewitt, 2021, "Initializing new word embeddings"). A new
token is then about as likely as an average token, and likely tokens stay likely.
"""

import contextlib
import json
import math
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from trainer.config.errors import ConfigError
from trainer.config.writable import sync
from trainer.hugging_face.config_json import CONFIG_FILE
from trainer.hugging_face.files import plan_files, unfinished_output
from trainer.hugging_face.folder import HFFolder
from trainer.hugging_face.pairs import Shape
from trainer.hugging_face.parts import DTYPES, FLOATS, read_part
from trainer.hugging_face.stored import INDEX, Stored

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
    """Writes tensors to a new folder, which gets its name when everything is on the disk.

    As a context manager it removes its files after an error. `put` each tensor in the order of `shapes`, then `finish`.

    Args:
        output: The folder.
        shapes: Shapes of the tensors, by name.
        dtype: Dtype of the tensors that are not in `other_types`.
        other_types: Dtypes of other tensors, by name.
        most_bytes: See `plan_files`.
        stem: See `plan_files`.
        copied: Tensors of another folder, by name, that `finish` copies behind the others.

    Raises:
        OSError: Nothing can be written.
    """

    def __init__(
        self,
        output: Path,
        shapes: Mapping[str, Shape],
        dtype: torch.dtype,
        *,
        other_types: Mapping[str, torch.dtype] | None = None,
        most_bytes: float = MOST_BYTES,
        stem: str = "model",
        copied: Mapping[str, Stored] | None = None,
    ) -> None:
        self._output = output
        self._copied = copied or {}
        shapes = {**shapes, **{name: x.shape for name, x in self._copied.items()}}
        self._dtypes = dict.fromkeys(shapes, dtype) | dict(other_types or {})
        self._dtypes |= {name: DTYPES[x.dtype] for name, x in self._copied.items()}
        named = {name: _NAMES[self._dtypes[name]] for name in shapes}
        files, self._index = plan_files(shapes, named, most_bytes, stem)
        self._first = {file.tensors[0]: file for file in files}
        self._starts = {name: start for file in files for name, start in file.starts.items()}
        self._unfinished = unfinished_output(output)
        self._file: BinaryIO | None = None
        if self._unfinished.is_dir():
            shutil.rmtree(self._unfinished)
        self._unfinished.mkdir(parents=True)

    def put(self, name: str, tensor: Tensor) -> None:
        """Write a whole tensor, or the next rows of one, in the dtype of the folder. The order follows `shapes`.

        The memory holds at most one more copy of the tensor.

        Args:
            name: Name of the tensor.
            tensor: The tensor, or some whole rows of it, any shape, on the CPU.

        Raises:
            OSError: It cannot be written.
        """
        if (file := self._first.pop(name, None)) is not None:
            self._close()
            self._file = (self._unfinished / file.name).open("wb")
            self._file.write(file.header)
        # otherwise these are its next rows
        if (start := self._starts.pop(name, None)) is not None:
            self._file.seek(start)
        for block in tensor.reshape(-1).split(_BLOCK):
            self._file.write(memoryview(block.to(self._dtypes[name]).view(torch.uint8).numpy()))

    def finish(self, files: Mapping[str, Any], carried_from: Path | None = None) -> None:
        """Write the small files, and give the folder its name. An older folder of this name is replaced.

        Args:
            files: Texts, or contents of JSON files, by name.
            carried_from: Folder whose files of tokenizer and generation are copied before `files` are written.

        Raises:
            OSError: A file cannot be written.
        """
        for name, stored in self._copied.items():
            self.put(name, read_part(stored, [0] * len(stored.shape), stored.shape))
        self._close()
        if self._index:
            (self._unfinished / INDEX).write_text(self._index, "utf-8")
        if carried_from is not None:
            carry(carried_from, self._unfinished)
        for name, content in files.items():
            text = content if isinstance(content, str) else f"{json.dumps(content, indent=2)}\n"
            (self._unfinished / name).write_text(text, "utf-8")
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
            # the content of its buffer cannot be written, either
            with contextlib.suppress(OSError):
                self._file.close()
        shutil.rmtree(self._unfinished, ignore_errors=True)

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            sync(Path(self._file.name))
            self._file = None


def carry(source: Path, target: Path) -> None:
    """Copy the files of tokenizer and generation of a Hugging Face folder.

    Args:
        source: The folder.
        target: The folder that gets the copies.
    """
    for file in (file for pattern in _CARRIED for file in source.glob(pattern)):
        if file.is_file():
            shutil.copy(file, target)


_EMBEDDING, _OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
_ROWS = 4096  # rows that are summed at once


def add_tokens(source: Path, output: Path, tokens: Sequence[str]) -> tuple[list[int], int]:
    """Return the ids of new tokens and the rows of the embedding, after writing a copy of the folder with these tokens.

    Spare rows are used first. Then rows are added up to a multiple of the largest power of two, at most 128, that
    divides the old number of rows. Rows from the first new id on get the mean of the rows before this id.

    Args:
        source: The folder.
        output: The copy.
        tokens: The new tokens.

    Raises:
        ConfigError: A token exists already, is empty or comes twice, or the folder has no embedding or tokenizer, or
            quantised weights.
        OSError: The copy cannot be written.
    """
    there = HFFolder(source)
    tensors = there.tensors
    entries = there.whole_entries.content
    if _EMBEDDING not in tensors:
        raise ConfigError(
            f"{source} has no tensor {_EMBEDDING}, so that no rows can be added; name a language model"
        )
    if quantised := next(
        (name for name, stored in tensors.items() if stored.dtype not in FLOATS), None
    ):
        raise ConfigError(
            f"{source} has quantised weights, such as {quantised} in {tensors[quantised].dtype}, to which "
            f"no rows are added; name a folder that a run has exported"
        )
    with tempfile.TemporaryDirectory() as carried:
        carry(source, Path(carried))
        ids = _added_to_tokenizer(Path(carried), source, tokens)
        before = tensors[_EMBEDDING].shape[0]
        unit = math.gcd(before, 128)
        rows = max(before, -(-(max(ids) + 1) // unit) * unit)
        grown = {
            name: (rows, *tensors[name].shape[1:])
            for name in (_EMBEDDING, _OUTPUT)
            if name in tensors
        }
        shapes = {name: stored.shape for name, stored in tensors.items()} | grown
        types = {name: DTYPES[stored.dtype] for name, stored in tensors.items()}
        with NewFolder(output, shapes, types[_EMBEDDING], other_types=types) as folder:
            for name, stored in tensors.items():
                tensor = read_part(stored, [0] * len(stored.shape), stored.shape)
                folder.put(name, _with_rows(tensor, rows, ids[0]) if name in grown else tensor)
                del tensor
            folder.finish({CONFIG_FILE: {**entries, "vocab_size": rows}}, Path(carried))
    return ids, rows


def _with_rows(tensor: Tensor, rows: int, first: int) -> Tensor:
    """Return a new tensor of `rows` rows: the rows before `first`, followed by copies of their mean."""
    sums = sum(block.double().sum(0) for block in tensor[:first].split(_ROWS))
    mean = (sums / first).to(tensor.dtype)
    return torch.cat([tensor[:first], mean.expand(rows - first, -1)])


def _added_to_tokenizer(folder: Path, source: Path, tokens: Sequence[str]) -> list[int]:
    from tokenizers import AddedToken, Tokenizer

    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(
            f"{source} has no tokenizer.json to which tokens can be added; save its tokenizer there"
        )
    tokenizer = Tokenizer.from_file(str(file))
    for token in tokens:
        if (
            not token.strip()
            or tokenizer.token_to_id(token) is not None
            or tokens.count(token) > 1
        ):
            raise ConfigError(
                f"the token {token!r} must be a name that the tokenizer does not have, once; write another, such as "
                "'<|tool|>'"
            )
    added = [AddedToken(token, special=True, normalized=False) for token in tokens]
    tokenizer.add_special_tokens(added)
    tokenizer.save(str(file))
    ids = [tokenizer.token_to_id(token) for token in tokens]
    settings = folder / "tokenizer_config.json"
    if settings.is_file() and "added_tokens_decoder" in (
        content := json.loads(settings.read_text("utf-8"))
    ):
        flags = {
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        content["added_tokens_decoder"] |= {
            str(i): {"content": token} | flags for i, token in zip(ids, tokens, strict=True)
        }
        settings.write_text(f"{json.dumps(content, indent=2, ensure_ascii=False)}\n", "utf-8")
    return ids
