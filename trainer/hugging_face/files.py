"""Files of a Hugging Face folder, and which of its tensors have the values of a model. Torch-free.

The entries of `config.json` are checked; a family says what they mean to it. Tensors are in files of the format
safetensors, of which a folder with several has an index:

    8 bytes            length of the header, little-endian
    header             {"name": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [first, last + 1]}, ...}
    bytes of tensors   row-major, little-endian; offsets count from here

The package safetensors reads and checks headers. Tensors are read by part and written tensor by tensor, so that no file
is ever whole in memory. For that the package has no way: it writes whole files. A slice is read from a map of the file,
where a file that is cut meanwhile kills the process (SIGBUS), or as the whole tensor (its backend "pread").
"""

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from safetensors import SafetensorError, safe_open

from trainer.config.errors import ConfigError
from trainer.grouping import grouped

CONFIG_FILE = "config.json"


@dataclass(frozen=True)
class Entries:
    """The entries of one file, or of a table in it."""

    file: Path
    content: Mapping[str, Any]

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number above 0; ConfigError if it is something else, or missing without a default."""
        value = self.content.get(key)
        value = default if value is None else value
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not 0 < value < math.inf
        ):
            raise ConfigError(f"{self.file}: {key} = {value!r} must be a number above 0")
        return value

    def whole(self, key: str, default: int | None = None, *, most: int | None = None) -> int:
        """Return a whole number above 0, at most `most`; otherwise as `number`."""
        value = self.number(key, default)
        if not isinstance(value, int):
            raise ConfigError(f"{self.file}: {key} = {value!r} must be a whole number")
        if most is not None and value > most:
            raise ConfigError(f"{self.file}: {key} = {value!r} must be at most {most:,}")
        return value

    def switch(self, key: str) -> bool:
        """Return whether a switch is on; missing or null: off; ConfigError if it is no switch."""
        value = self.content.get(key)
        if value not in (None, False, True):
            raise ConfigError(f"{self.file}: {key} = {value!r} must be true or false")
        return bool(value)

    def table(self, key: str) -> "Entries":
        """Return a table within; missing or null: an empty one; ConfigError if it is no table."""
        value = self.content.get(key) or {}
        if not isinstance(value, dict):
            raise ConfigError(f"{self.file}: {key} = {value!r} must be a table")
        return Entries(self.file, value)

    def only(self, key: str, *supported: Any) -> Any:
        """Return a value, one of these, or the first one if it is missing or null; ConfigError for another value."""
        value = self.content.get(key)
        if value is None:
            return supported[0]
        if value not in supported:
            words = " or ".join("null" if works is None else repr(works) for works in supported)
            raise ConfigError(
                f"{self.file}: {key} = {value!r} is not supported; it must be {words}"
            )
        return value


class HFConfig(Protocol):
    """How a family reads `config.json` and writes it."""

    model_type: str
    """What `model_type` says of it."""

    def read(self, config: Entries) -> Any:
        """Return model arguments, `max_seq_len` being the longest sequence that the file is for.

        Raises:
            ConfigError: by key and value, what the family does not have.
        """

    def write(self, args: Any) -> dict[str, Any]:
        """Return the entries of a model; ConfigError for what transformers does not have."""

    def check_start(self, args: Any) -> None:
        """Check that a model can start from weights of transformers, else raise a ConfigError."""


def folder_hint(folder: Path) -> str:
    """Return how to get a folder of that path."""
    name = (
        "/".join(folder.parts[-2:])
        if len(folder.parts) == 2 and not folder.is_absolute()
        else "ORG/NAME"
    )
    there = f"./{folder.name}" if name != "ORG/NAME" else folder
    return (
        f"name a folder of a Hugging Face model, with its weights, such as {str(there)!r} after "
        f"`hf download {name} --local-dir {there}`"
    )


def read_config(folder: Path) -> Entries:
    """Return the entries of a folder's `config.json`; ConfigError if it is missing, or no table of JSON."""
    file = folder / CONFIG_FILE
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be read ({error.strerror}); {folder_hint(folder)}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{file} is no JSON ({error}); copy it from the model again"
        ) from None
    if not isinstance(content, dict):
        raise ConfigError(f"{file} holds no table; copy it from the model again")
    return Entries(file, content)


if TYPE_CHECKING:
    import torch

Shape = tuple[int, ...]


def _unchanged(x: "torch.Tensor") -> "torch.Tensor":
    return x


@dataclass(frozen=True)
class HFTensor:
    """The tensor of a Hugging Face model that has the values of one of ours: its name, and the change of layout.

    Or several tensors: `stacked` has the names for each row of ours (dim 0), whose equal parts (dim 1) they are. Then
    no layout changes.
    """

    name: str = ""
    to_hf: "Callable[[torch.Tensor], torch.Tensor]" = _unchanged
    """Whole tensor -> whole tensor, also on meta."""
    from_hf: "Callable[[torch.Tensor], torch.Tensor]" = _unchanged
    moves_rows: bool = False
    """Whether both change nothing but the order of the rows (dim 0), also of a 1-D tensor, and move no row far: a rank
    then reads what is near its own rows, in place of the whole tensor."""
    keeps_rows: bool = False
    """Whether both change each row (dim 0) by itself: a rank then reads its own rows, in place of the whole tensor."""
    stacked: tuple[tuple[str, ...], ...] = ()
    first_row: int = 0
    """Of ours in the tensor there, if it has the rows of several tensors of ours, one after another."""
    all_rows: int = 0
    """Of the tensor there; 0: as many as ours."""

    @property
    def same_layout(self) -> bool:
        return self.from_hf is _unchanged

    @property
    def names(self) -> tuple[str, ...]:
        """All names there."""
        return sum(self.stacked, ()) or (self.name,)

    def tensors(self, x: "torch.Tensor") -> "dict[str, torch.Tensor]":
        """Return the tensors there, or our rows of one, by name, possibly as views. x: whole, also on meta."""
        if not self.stacked:
            return {self.name: self.to_hf(x)}
        rows = zip(self.stacked, x, strict=True)
        return {
            name: part
            for names, row in rows
            for name, part in zip(names, row.chunk(len(names)), strict=True)
        }


@dataclass(frozen=True)
class HFModel:
    """The tensors of a model that Hugging Face's has, too."""

    pairs: "Mapping[str, tuple[torch.Tensor, HFTensor]]"
    """Our name -> our tensor on meta, and its tensor there. A shared parameter comes once, by its first name. Parts of
    one tensor there come one after another."""
    second_names: Mapping[str, str]
    """Names of shared parameters there, which files need not have -> the first names."""
    unread: tuple[str, ...] = ()
    """Beginnings of the names of tensors there that the model does not have, and files may."""
    further: frozenset[str] = frozenset()
    """Our names of tensors for further tokens, which files may lack, all of them."""
    has_further: bool = False
    """Whether the model has layers for further tokens, which need not have a name there."""

    def without_further(self) -> "HFModel":
        """Return the model without its tensors for further tokens."""
        pairs = {name: pair for name, pair in self.pairs.items() if name not in self.further}
        return replace(self, pairs=pairs, further=frozenset())

    def shapes(self) -> dict[str, Shape]:
        """Return the shapes of the tensors there, by name, in our order."""
        return {
            there: (hf.all_rows or y.shape[0], *y.shape[1:])
            for x, hf in self.pairs.values()
            for there, y in hf.tensors(x).items()
        }


def check_shapes(found: Mapping[str, Shape], wanted: Mapping[str, Shape]) -> None:
    """Raise a ConfigError if a tensor of the model is not found, or found with another shape, or unknown."""
    for name, shape in found.items():
        if name not in wanted:
            raise ConfigError(f"{name} is no tensor of this model")
        if shape != wanted[name]:
            raise ConfigError(
                f"{name} has the shape {shape}, and this model's has {wanted[name]}"
            )
    if missing := [name for name in wanted if name not in found]:
        more = f" and {len(missing) - 1} more" * (len(missing) > 1)
        raise ConfigError(f"there is no {missing[0]}{more}, which this model has")


INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "U8": 1, "F8_E4M3": 1}
"""Data types that are read or written, with the bytes of an element."""
FLOAT8, FLOAT8_BLOCK = "F8_E4M3", 128
"""Published weights in float8 have a scale for each block of 128 x 128."""


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
        ConfigError: a file is missing or broken, a tensor is in another file than the index says, or there are two
            sets of weights.
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
        raise ConfigError(
            f"{folder / INDEX} is no index of tensors ({error}); copy it again"
        ) from None
    if (folder / SINGLE).is_file() and SINGLE not in files.values():
        raise ConfigError(
            f"{folder} holds two sets of weights, {SINGLE} and the files of {INDEX}; remove the one that is not meant"
        )
    found: dict[str, Stored] = {}
    for name in sorted(set(map(str, files.values()))):
        if Path(name).name != name:
            raise ConfigError(
                f"{folder / INDEX} names {name!r}, which is no file beside it; copy it again"
            )
        found |= read_file(folder / name)
    for name, file in files.items():
        if name not in found or found[name].file.name != file:
            raise ConfigError(
                f"{folder / INDEX} says that {name} is in {file}, and it is not; copy both again"
            )
    return _without_tables(found)


def _without_tables(found: dict[str, Stored]) -> dict[str, Stored]:
    """Leave out the tables of frequencies that transformers stored until 2023, and ignores since then."""
    return {
        name: stored
        for name, stored in found.items()
        if not name.endswith(".rotary_emb.inv_freq")
    }


def read_file(file: Path) -> dict[str, Stored]:
    """Return every tensor of a file, by name.

    Raises:
        ConfigError: the file is missing, cut short or no safetensors file, or a tensor has another data type.
    """
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
