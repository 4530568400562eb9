"""Plans new files of the format safetensors: which tensors each file holds, and where. Torch-free.

`writer.py` writes them tensor by tensor. The package safetensors cannot do this: it writes whole files.
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
    """A planned file. Tensors of wide types come first, so that all tensors are aligned.

    Attributes:
        name: Name of the file.
        header: The header, with its length before it.
        tensors: The tensors in the order in which they are written.
        starts: The first byte of each tensor in the file.
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
    """Choose the file of each tensor; nothing is written. A file has at most `most_bytes`, or one larger tensor.

    Args:
        shapes: Shape of each tensor, at least one.
        dtypes: Dtype of each tensor.
        most_bytes: Largest number of bytes of the tensors of one file.
        stem: Beginning of the names of files.

    Returns:
        The files and the content of the index; "" for one file, which needs no index.
    """
    sizes = {name: math.prod(shape) * BYTES[dtypes[name]] for name, shape in shapes.items()}
    groups = grouped(sizes, most_bytes)
    count = len(groups)
    names = [f"{stem}-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    if count == 1:
        names = [f"{stem}.safetensors"]
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
    entries = {"__metadata__": {"format": "pt"}}  # transformers asks for it
    start = 0
    starts = {}
    for name in sorted(shapes, key=lambda name: -BYTES[dtypes[name]]):
        stop = start + math.prod(shapes[name]) * BYTES[dtypes[name]]
        entries[name] = {
            "dtype": dtypes[name],
            "shape": list(shapes[name]),
            "data_offsets": [start, stop],
        }
        starts[name] = start
        start = stop
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
    """Return the path where a folder is written before it gets its name.

    Args:
        output: The folder.
    """
    return output.with_name(f"{output.name}.tmp")


def check_output(output: Path) -> None:
    """Check that a folder that a command will write does not exist, also no rest of an interrupted command.

    Args:
        output: The folder.

    Raises:
        ConfigError: It exists.
    """
    for path in (output, unfinished_output(output)):
        if os.path.lexists(path):
            raise ConfigError(f"{path} is there already; name another folder, or remove it")
