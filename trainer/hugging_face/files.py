"""Planning new files of the format safetensors: which tensors each file holds, and where. Torch-free.

`writer.py` writes them tensor by tensor, for which the package safetensors has no way: it writes whole files.
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trainer.config.errors import ConfigError
from trainer.grouping import grouped
from trainer.hugging_face.pairs import Shape
from trainer.hugging_face.stored import BYTES


@dataclass(frozen=True)
class NewFile:
    """A file that is to be written: its name, its header with the length before it, and its tensors in their order.

    starts: the first byte of each tensor in the file. Tensors of wide types come first, so that all are aligned.
    """

    name: str
    header: bytes
    tensors: tuple[str, ...]
    starts: Mapping[str, int]


def plan_files(
    shapes: Mapping[str, Shape],
    dtypes: Mapping[str, str],
    most_bytes: float,
    stem: str = "model",
) -> tuple[list[NewFile], str]:
    """Return files of at most so many bytes of tensors, and the index; "" if there is one file, which needs none.

    A tensor that is larger has a file of its own. dtypes: of each tensor; stem: what names of files begin with.
    """
    sizes = {name: math.prod(shape) * BYTES[dtypes[name]] for name, shape in shapes.items()}
    groups = grouped(sizes, most_bytes)
    count = len(groups)
    parts = [f"-{i:05}-of-{count:05}" for i in range(1, count + 1)] if count > 1 else [""]
    names = [f"{stem}{part}.safetensors" for part in parts]
    files = [
        _new_file(name, {tensor: shapes[tensor] for tensor in group}, dtypes)
        for name, group in zip(names, groups, strict=True)
    ]
    if count == 1:
        return files, ""
    weight_map = {tensor: file.name for file in files for tensor in file.tensors}
    return files, json.dumps(
        {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}, indent=2
    )


def _new_file(file: str, shapes: Mapping[str, Shape], dtypes: Mapping[str, str]) -> NewFile:
    entries: dict[str, dict] = {"__metadata__": {"format": "pt"}}  # transformers asks for it
    start = 0
    starts = {}
    for name in sorted(shapes, key=lambda name: -BYTES[dtypes[name]]):
        stop = start + math.prod(shapes[name]) * BYTES[dtypes[name]]
        entries[name] = {
            "dtype": dtypes[name],
            "shape": list(shapes[name]),
            "data_offsets": [start, stop],
        }
        starts[name], start = start, stop
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # so that tensors are aligned
    header = len(text).to_bytes(8, "little") + text
    return NewFile(
        file,
        header,
        tuple(shapes),
        {name: len(header) + first for name, first in starts.items()},
    )


def unfinished_output(output: Path) -> Path:
    """Return where a folder is written before it has its name."""
    return output.with_name(f"{output.name}.tmp")


def check_output(output: Path) -> None:
    """Raise a ConfigError if a folder that a command is to write is there, or was left by an interrupted command."""
    for path in (output, unfinished_output(output)):
        if os.path.lexists(path):
            raise ConfigError(f"{path} is there already; name another folder, or remove it")
