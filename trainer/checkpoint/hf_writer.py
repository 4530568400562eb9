"""Weights as a Hugging Face folder, written tensor by tensor: safetensors, `config.json`, the tokenizer's files."""

import contextlib
import json
import os
import shutil
from pathlib import Path
from typing import Any, BinaryIO

import torch

from trainer.checkpoint.hf_reader import DTYPES
from trainer.checkpoint.safetensors import INDEX, plan_files
from trainer.checkpoint.store import sync
from trainer.config.errors import ConfigError
from trainer.config.schema import JobConfig
from trainer.data.tokenizer import open_tokenizer
from trainer.models.args import DecoderArgs
from trainer.models.hf_config import CONFIG_FILE, read_config
from trainer.models.model_spec import model_spec
from trainer.models.registry import hf_config
from trainer.models.state_dict import pairs

MOST_BYTES = 5 * 10**9
"""Bytes of the tensors of one file, as transformers has it."""
_CARRIED = (
    "generation_config.json",
    "tokenizer*",
    "chat_template*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
)
_CARRIED += ("merges.txt", "chat_template*")
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_BLOCK = 2**20  # elements that are converted to another data type at once


class HFWriter:
    """Writes the tensors of one model to a new folder, which has its name when all of it is on the disk.

    `put` each tensor of `names`, in this order, then `finish`.
    """

    def __init__(
        self, output: Path, config: JobConfig, args: DecoderArgs, dtype: torch.dtype, most_bytes: int = MOST_BYTES
    ) -> None:
        """output: the folder; dtype: data type of the files; most_bytes: of the tensors of one file.

        Raises:
            ConfigError: the model has no counterpart at Hugging Face.
            OSError: nothing can be written.
        """
        hf_config(config.model.name).write(args)  # refuses what transformers does not have
        self._output, self._config, self._args, self._dtype = output, config, args, dtype
        self._pairs = pairs(model_spec(config.model.name), args)
        shapes = {name: tuple(shape) for pair in self._pairs.values() for name, shape in pair.hf_shapes.items()}
        self._files, self._index = plan_files(shapes, _NAMES[dtype], most_bytes)
        self._first = {file.tensors[0]: file for file in self._files}
        self._unfinished = unfinished_output(output)
        self._file: BinaryIO | None = None
        if self._unfinished.is_dir():
            shutil.rmtree(self._unfinished)
        self._unfinished.mkdir(parents=True)

    @property
    def names(self) -> tuple[str, ...]:
        """Our names of the tensors, in the order in which they are written."""
        return tuple(self._pairs)

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Write a whole tensor. Beside it at most its like is in memory.

        Raises:
            OSError: it cannot be written.
        """
        for there, part in self._pairs[name].hf.tensors(tensor.cpu()).items():
            if (file := self._first.get(there)) is not None:
                self._close()
                self._file = (self._unfinished / file.name).open("wb")
                self._file.write(file.header)
            for block in part.reshape(-1).split(_BLOCK):
                self._file.write(memoryview(block.to(self._dtype).view(torch.uint8).numpy()))

    def finish(self, carried_from: Path | None) -> None:
        """Write the small files, and give the folder its name; what had it before is replaced.

        carried_from: folder whose files of tokenizer and generation are copied.

        Raises:
            OSError: something cannot be written.
        """
        self._close()
        if self._index:
            (self._unfinished / INDEX).write_text(self._index, encoding="utf-8")
        if carried_from is not None:
            carry(carried_from, self._unfinished)
        content = self._content(carried_from)
        (self._unfinished / CONFIG_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        sync(self._unfinished)
        if self._output.is_dir():
            shutil.rmtree(self._output)
        self._unfinished.rename(self._output)
        sync(self._output.parent)

    def discard(self) -> None:
        """Remove what was written."""
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

    def _content(self, carried_from: Path | None) -> dict[str, Any]:
        """Return the entries of `config.json`."""
        content = hf_config(self._config.model.name).write(self._args)
        dtype = str(self._dtype).removeprefix("torch.")
        content |= {"dtype": dtype, "torch_dtype": dtype}  # the second name is that of transformers 4
        if carried_from is None:
            tokenizer = open_tokenizer(self._config.model.tokenizer_file)
            return content | {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
        there = read_config(carried_from)
        longest = max(there.whole("max_position_embeddings", 1), content["max_position_embeddings"])
        tokens = {key: there.content[key] for key in _TOKENS if key in there.content}
        return content | tokens | {"max_position_embeddings": longest}


def carry(source: Path, target: Path, *more: str) -> None:
    """Copy the files of tokenizer and generation of a Hugging Face folder, and those of the names `more`."""
    for file in (file for pattern in (*_CARRIED, *more) for file in source.glob(pattern)):
        if file.is_file():
            shutil.copy(file, target)


def unfinished_output(output: Path) -> Path:
    """Return where a folder is written before it has its name."""
    return output.with_name(f"{output.name}.tmp")


def check_output(output: Path) -> None:
    """Check that a folder that a command is to write is not there yet.

    Raises:
        ConfigError: it is, or what an interrupted command has left of it.
    """
    for path in (output, unfinished_output(output)):
        if os.path.lexists(path):
            raise ConfigError(f"{path} is there already; name another folder, or remove it")
