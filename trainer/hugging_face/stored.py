"""The tensors of a Hugging Face folder: file, dtype, shape and place of each. Torch-free.

Tensors are in files of the format safetensors; a folder with several files has an index:

    8 bytes            length of the header, little-endian
    header             {"name": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [first, last + 1]}, ...}
    bytes of tensors   row-major, little-endian; offsets count from here

The package safetensors reads and checks headers. `reader.py` reads parts of tensors, so that no file is ever whole in
memory. The package cannot do this. It reads a slice from a map of the file, and a file that is cut meanwhile kills the
process (SIGBUS). Or it reads the whole tensor (its backend "pread").
"""

import json
import math
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from trainer.config.errors import ConfigError
from trainer.hugging_face.pairs import Shape

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
PEFT_TENSORS = "adapter_model.safetensors"
BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "U8": 1, "F8_E4M3": 1}
"""Data types that are read or written, with the bytes of an element."""
FLOAT8, FLOAT8_BLOCK = "F8_E4M3", 128
"""Published weights in float8 have a scale for each block of 128 x 128."""


@dataclass(frozen=True)
class Stored:
    """A tensor in a file.

    Attributes:
        file: The file.
        dtype: Name of the dtype in the file.
        shape: The shape.
        start: First byte of the tensor in the file.
        scales: Scales of the blocks of a float8 tensor. None for other tensors.
    """

    file: Path
    dtype: str
    shape: Shape
    start: int
    scales: "Stored | None" = None


def read_folder(folder: Path) -> dict[str, Stored]:
    """Return every tensor of a Hugging Face folder, by name, except rotary tables, which models compute.

    Only the index and the headers of files are read. A tensor that the index does not name counts too.

    Args:
        folder: The folder.

    Raises:
        ConfigError: A file is missing or broken, a tensor is in another file than the index says, or there are two sets
            of weights.
    """
    index, single = folder / INDEX, folder / SINGLE
    if not index.is_file():
        if not single.is_file():
            raise ConfigError(
                f"{folder} holds no weights: neither {SINGLE} nor {INDEX} is there; transformers' save_pretrained "
                f"writes them"
            )
        return _without_tables(read_file(single))
    try:
        files = dict(json.loads(index.read_text("utf-8"))["weight_map"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{index} is no index of tensors ({error}); copy it again") from None
    if single.is_file() and SINGLE not in files.values():
        raise ConfigError(
            f"{folder} holds two sets of weights, {SINGLE} and the files of {INDEX}; remove the one that is not meant"
        )
    tensors = {}
    for name in sorted(set(map(str, files.values()))):
        if Path(name).name != name:
            raise ConfigError(
                f"{index} names {name!r}, which is no file of the folder; copy it again"
            )
        tensors |= read_file(folder / name)
    for name, file in files.items():
        if name not in tensors or tensors[name].file.name != file:
            raise ConfigError(
                f"{index} says that {name} is in {file}, and it is not; copy both again"
            )
    return _without_tables(tensors)


def _without_tables(tensors: dict[str, Stored]) -> dict[str, Stored]:
    """Return the tensors without tables of frequencies, which transformers stored until 2023 and ignores since then."""
    return {
        name: stored
        for name, stored in tensors.items()
        if not name.endswith(".rotary_emb.inv_freq")
    }


def read_file(file: Path) -> dict[str, Stored]:
    """Return every tensor of a safetensors file by name: its data type, its shape and its place in the file.

    Only the header of the file is read.

    Args:
        file: The file.

    Raises:
        ConfigError: The file is missing, cut short or no safetensors file, or a tensor has a dtype that is not in
            `BYTES`.
    """
    # imported here: training without such files does not need the package
    from safetensors import SafetensorError, safe_open

    try:
        size = file.stat().st_size
        with safe_open(file, "numpy", backend="pread") as opened:
            slices = {name: opened.get_slice(name) for name in opened.offset_keys()}
            kinds = {name: (x.get_dtype(), tuple(x.get_shape())) for name, x in slices.items()}
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be read ({error.strerror or error}); copy it again"
        ) from None
    except SafetensorError as error:
        raise ConfigError(
            f"{file} is no safetensors file, or a part of one ({error}); copy it again"
        ) from None
    for name, (dtype, _) in kinds.items():
        if dtype not in BYTES:
            raise ConfigError(
                f"{file}: {name} has the data type {dtype}; those that can be read are {', '.join(BYTES)}"
            )
    # the package has checked that tensors fill the file, one after another, up to its end
    sizes = [math.prod(shape) * BYTES[dtype] for dtype, shape in kinds.values()]
    starts = accumulate(sizes, initial=size - sum(sizes))
    return {
        name: Stored(file, *kind, start)
        for (name, kind), start in zip(kinds.items(), starts, strict=False)
    }
