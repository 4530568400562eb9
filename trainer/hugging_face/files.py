"""The safetensors format: files of tensors with a header in JSON, and the index of a folder of them. Torch-free.

    8 bytes            length of the header, little-endian
    header             {"name": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [first, last + 1]}, ...}
    bytes of tensors   row-major, little-endian; offsets count from here

Files are read by part of a tensor and written tensor by tensor, so that no file is ever whole in memory. The package
safetensors writes whole files, and maps those that it reads: one that is cut meanwhile kills the process (SIGBUS).
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trainer.config.errors import ConfigError
from trainer.hugging_face.tensors import Shape

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "U8": 1, "F8_E4M3": 1}
"""Data types that are read or written, with the bytes of an element."""
FLOAT8, FLOAT8_BLOCK = "F8_E4M3", 128
"""Published weights in float8 have a scale for each block of 128 x 128."""
_LONGEST_HEADER = 100 * 1000 * 1000


@dataclass(frozen=True)
class Stored:
    """A tensor in a file; `start` is the place of its first byte. scales: of blocks of a tensor in float8."""

    file: Path
    dtype: str
    shape: Shape
    start: int
    scales: "Stored | None" = None


def read_folder(folder: Path) -> dict[str, Stored]:
    """Return every tensor of a Hugging Face folder, by name, but for rotary tables, which models compute.

    Raises:
        ConfigError: a file is missing or broken, or a tensor is in another file than the index says.
    """
    if not (folder / INDEX).is_file():
        if not (folder / SINGLE).is_file():
            raise ConfigError(
                f"{folder} holds no weights: neither {SINGLE} nor {INDEX} is there; transformers' save_pretrained "
                f"writes them"
            )
        return _without_tables(read_file(folder / SINGLE))
    try:
        files = dict(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{folder / INDEX} is no index of tensors ({error}); copy it again") from None
    found: dict[str, Stored] = {}
    for name in sorted(set(map(str, files.values()))):
        if Path(name).name != name:
            raise ConfigError(f"{folder / INDEX} names {name!r}, which is no file beside it; copy it again")
        found |= read_file(folder / name)
    for name, file in files.items():
        if name not in found or found[name].file.name != file:
            raise ConfigError(f"{folder / INDEX} says that {name} is in {file}, and it is not; copy both again")
    return _without_tables(found)


def _without_tables(found: dict[str, Stored]) -> dict[str, Stored]:
    """Leave out the tables of frequencies that transformers stored until 2023, and ignores since then."""
    return {name: stored for name, stored in found.items() if not name.endswith(".rotary_emb.inv_freq")}


def read_file(file: Path) -> dict[str, Stored]:
    """Return every tensor of a file, by name.

    Raises:
        ConfigError: the file is missing, cut short or no safetensors file, or a tensor has another data type.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if not 2 <= length <= min(size - 8, _LONGEST_HEADER):
                raise ValueError(f"its header has {length} bytes, and the file {size}")
            entries = json.loads(opened.read(length))
        entries.pop("__metadata__", None)
        return {name: _stored(file, name, entry, 8 + length, size) for name, entry in entries.items()}
    except OSError as error:
        raise ConfigError(f"{file} cannot be read ({error.strerror}); copy it again") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{file} is no safetensors file, or a part of one ({error}); copy it again") from None


def _stored(file: Path, name: str, entry: dict, base: int, size: int) -> Stored:
    dtype, shape = entry["dtype"], tuple(map(int, entry["shape"]))
    if dtype not in BYTES:
        raise ConfigError(f"{file}: {name} has the data type {dtype}; those that can be read are {', '.join(BYTES)}")
    start, stop = map(int, entry["data_offsets"])
    if min((start, *shape)) < 0 or stop - start != math.prod(shape) * BYTES[dtype]:
        raise ValueError(f"{name} of shape {shape} has {stop - start} bytes")
    if base + stop > size:
        raise ValueError(f"{name} ends at byte {base + stop} of {size}")
    return Stored(file, dtype, shape, base + start)


@dataclass(frozen=True)
class NewFile:
    """A file that is to be written: its name, its header with the length before it, and its tensors in their order."""

    name: str
    header: bytes
    tensors: tuple[str, ...]


def grouped(sizes: Mapping[str, int], most: float) -> list[list[str]]:
    """Return the names in groups whose sizes add up to at most so much; a larger one is alone."""
    groups: list[list[str]] = []
    total = 0
    for name, size in sizes.items():
        total += size
        if not groups or total > most:
            groups.append([])
            total = size
        groups[-1].append(name)
    return groups


def plan_files(
    shapes: Mapping[str, Shape], dtype: str, most_bytes: float, stem: str = "model"
) -> tuple[list[NewFile], str]:
    """Return files of at most so many bytes of tensors, and the index; "" if there is one file, which needs none.

    A tensor that is larger has a file of its own. stem: what names of files begin with.
    """
    sizes = {name: math.prod(shape) * BYTES[dtype] for name, shape in shapes.items()}
    groups = grouped(sizes, most_bytes)
    count = len(groups)
    parts = [f"-{i:05}-of-{count:05}" for i in range(1, count + 1)] if count > 1 else [""]
    names = [f"{stem}{part}.safetensors" for part in parts]
    files = [
        NewFile(name, _header({tensor: shapes[tensor] for tensor in group}, dtype), tuple(group))
        for name, group in zip(names, groups, strict=True)
    ]
    if count == 1:
        return files, ""
    weight_map = {tensor: file.name for file in files for tensor in file.tensors}
    return files, json.dumps({"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}, indent=2)


def _header(shapes: Mapping[str, Shape], dtype: str) -> bytes:
    entries: dict[str, dict] = {"__metadata__": {"format": "pt"}}  # transformers asks for it
    start = 0
    for name, shape in shapes.items():
        stop = start + math.prod(shape) * BYTES[dtype]
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # so that tensors are aligned
    return len(text).to_bytes(8, "little") + text


def unfinished_output(output: Path) -> Path:
    """Return where a folder is written before it has its name."""
    return output.with_name(f"{output.name}.tmp")


def check_output(output: Path) -> None:
    """Raise a ConfigError if a folder that a command is to write is there, or was left by an interrupted command."""
    for path in (output, unfinished_output(output)):
        if os.path.lexists(path):
            raise ConfigError(f"{path} is there already; name another folder, or remove it")
