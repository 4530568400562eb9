"""A Hugging Face folder as a checkpoint of weights. DCP asks for parts of our tensors, and only these are read."""

import json
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.futures import Future

from trainer.config.errors import ConfigError
from trainer.hugging_face.folder import HFFolder
from trainer.hugging_face.pairs import LEFT_ASIDE, HFModel, check_shapes
from trainer.hugging_face.parts import FLOATS, dtype_of, read_part, read_rows, wider_types
from trainer.hugging_face.quantised import BLOCKS, SCALES, dequantise, shapes_of, with_scales
from trainer.hugging_face.stored import Stored

_ROWS = 4096  # rows that are compared at once


class HFReader(FileSystemReader):
    """Reads the tensors `model.<name>` of a model from the safetensors files of a folder, in the model's own layout.

    Args:
        folder: The folder.
        model: The tensors of the model.
        headers: `headers` of a reader of another rank, which has read and checked the files. None: this reader does it.

    Raises:
        ConfigError: A file is missing or broken; a tensor is missing, unknown or of another shape.
    """

    def __init__(self, folder: HFFolder, model: HFModel, headers: bytes | None = None) -> None:
        super().__init__(folder.path)
        if headers is None:
            places = {
                name: (x.file.name, x.dtype, x.shape, x.start)
                for name, x in folder.tensors.items()
            }
        self.headers = headers or json.dumps(places).encode()
        """Names, shapes and places of all tensors, for readers of other ranks: their folder may have another path."""
        entries = json.loads(self.headers).items()
        stored = {
            name: Stored(folder.path / file, dtype, tuple(shape), at)
            for name, (file, dtype, shape, at) in entries
        }
        try:
            stored = with_scales(stored)
        except ConfigError as error:
            raise ConfigError(f"{folder.path}: {error}") from None
        self.left_aside = sum(name.startswith(LEFT_ASIDE) for name in stored)
        """Number of tensors of the folder that belong to the part that reads images."""
        model = model.in_folder(stored)
        for name, first in model.second_names.items():
            if name in stored and first not in stored:
                stored[first] = stored.pop(name)
        self._stored = stored
        there = (name for ours in model.further for name in model.pairs[ours][1].names)
        self.lacks_further = model.has_further and not any(name in stored for name in there)
        """Whether the folder lacks the model's layers for further tokens."""
        model = model.without_further() if self.lacks_further else model
        self.pairs = model.pairs
        if headers is None:
            self._check(model)

    def _check(self, model: HFModel) -> None:
        second_names = {
            name: first
            for name, first in model.second_names.items()
            if {name, first} <= {*self._stored}
        }
        others = {name for name in self._stored if name.startswith(model.unread)} | {
            *second_names
        }
        shapes = {
            name: shape for name, shape in shapes_of(self._stored).items() if name not in others
        }
        try:
            for name in shapes:
                if name in self._stored and dtype_of(self._stored[name]) not in FLOATS.values():
                    raise ConfigError(
                        f"{name} is stored as whole numbers, without their scales"
                    )
            check_shapes(shapes, model.shapes())
            for name, first in second_names.items():
                self._check_equal(name, first)
        except ConfigError as error:
            raise ConfigError(
                f"{self.path}: {error}; the folder must hold the weights of this very model"
            ) from None

    def read(
        self,
        name: str,
        offsets: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
    ) -> Tensor:
        """Return a part of our tensor, by default all of it: of shape `lengths`, on the CPU, in the file's dtype.

        Float8 tensors become float32, and MXFP4 tensors become bfloat16. The part is in memory at most twice. If each
        row (dim 0) changes by itself, whole rows are read. If more than the order of rows changes, the whole tensor is
        read.

        Args:
            name: Our name of the tensor.
            offsets: First index in each dimension.
            lengths: Length in each dimension.

        Raises:
            OSError: The file cannot be read, or is shorter than before.
        """
        ours, hf = self.pairs[name]
        shape = ours.shape
        offsets = offsets or [0] * len(shape)
        lengths = shape if lengths is None else lengths
        if hf.stacked:
            return self._read_stacked(hf.stacked, shape, offsets, lengths)
        first, *others = offsets
        within_rows = _places([0, *others], lengths)
        if hf.name not in self._stored:  # an MXFP4 tensor
            packed = (self._stored[hf.name + kind] for kind in (BLOCKS, SCALES))
            rows = dequantise(*(read_rows(part, first, lengths[0]) for part in packed))
            return hf.from_hf(rows)[within_rows]
        stored = self._stored[hf.name]
        if hf.same_layout or 0 in lengths:
            return read_part(stored, [hf.first_row + first, *others], lengths)
        if hf.keeps_rows:
            return hf.from_hf(read_rows(stored, first, lengths[0]))[within_rows]
        if not hf.moves_rows:
            return hf.from_hf(read_rows(stored, 0, stored.shape[0]))[_places(offsets, lengths)]
        rows = hf.from_hf(torch.arange(shape[0]))[first : first + lengths[0]]
        first, last = map(int, rows.aminmax())
        size = last + 1 - first
        part = read_part(stored, [hf.first_row + first, *others], [size, *lengths[1:]])
        return part[rows - first]

    def _read_stacked(
        self,
        names: Sequence[Sequence[str]],
        shape: Sequence[int],
        offsets: Sequence[int],
        lengths: Sequence[int],
    ) -> Tensor:
        """Return a part of a tensor, of shape `lengths`, whose rows are built from other tensors.

        names: for each index of dim 0, the stored tensors whose concatenation is dim 1; all have equal lengths.
        shape: the shape of the whole tensor.
        """
        part = torch.empty(tuple(lengths), dtype=self._dtype_of_all(sum(map(tuple, names), ())))
        size = shape[1] // len(names[0])
        first = offsets[1]
        last = offsets[1] + lengths[1]
        for row, row_names in zip(
            part, names[offsets[0] : offsets[0] + lengths[0]], strict=True
        ):
            for start, name in zip(range(0, shape[1], size), row_names, strict=True):
                begin = max(first, start)
                end = min(last, start + size)
                if begin < end:
                    cut = [begin - start, *offsets[2:]], [end - begin, *lengths[2:]]
                    row[begin - first : end - first] = read_part(self._stored[name], *cut)
        return part

    def _check_equal(self, name: str, first: str) -> None:
        a = self._stored[name]
        b = self._stored[first]
        same = a.shape == b.shape
        wide = torch.promote_types(dtype_of(a), dtype_of(b))
        for start in range(0, a.shape[0], _ROWS) if same else ():
            rows = min(_ROWS, a.shape[0] - start)
            same = same and torch.equal(
                read_rows(a, start, rows).to(wide), read_rows(b, start, rows).to(wide)
            )
        if not same:
            raise ConfigError(
                f"{name} and {first} differ, and the model has one tensor for both (tie_word_embeddings)"
            )

    def _dtype_of_all(self, names: Sequence[str]) -> torch.dtype:
        """Return the dtype that can hold these tensors unchanged; bfloat16 for numbers in MXFP4."""
        dtypes = [dtype_of(self._stored[name]) for name in names if name in self._stored]
        return reduce(torch.promote_types, dtypes) if dtypes else torch.bfloat16

    def rounded_to(self, types: Mapping[str, torch.dtype]) -> list[str]:
        """Return the tensors of the folder that the run rounds: wider than most of the folder, and than the run's.

        Args:
            types: Dtypes of the run's tensors, by their names in this program. Other tensors are ignored.

        Returns:
            Names in the folder.
        """
        wide = wider_types(self._stored)
        ours = {
            there: types[name]
            for name, (_, hf) in self.pairs.items()
            if name in types
            for there in hf.names
        }
        return [
            name
            for name, dtype in wide.items()
            if name in ours and ours[name].itemsize < dtype.itemsize
        ]

    # ---- the protocol of DCP

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the whole shapes and the dtypes of our tensors, for DCP. Each name is "model." and our name.

        Args:
            *args: Not used.
            **kwargs: Not used.
        """
        entries = {}
        for name, (ours, hf) in self.pairs.items():
            shape = ours.shape
            dtype = self._dtype_of_all(hf.names)
            whole = ChunkStorageMetadata(torch.Size([0] * len(shape)), shape)
            entries[f"model.{name}"] = TensorStorageMetadata(
                TensorProperties(dtype), shape, [whole]
            )
        return Metadata(entries, storage_data={})

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the parts that DCP asks for into their targets, one after another, in the dtype of each target.

        Args:
            plan: The parts.
            planner: Gives the target of each part.

        Returns:
            A finished future.
        """
        for item in plan.items:
            target = planner.resolve_tensor(item)
            target.copy_(
                self.read(
                    item.storage_index.fqn.removeprefix("model."),
                    item.storage_offsets,
                    item.lengths,
                )
            )
            planner.commit_tensor(item, target)
        done = Future()
        done.set_result(None)
        return done


def _places(offsets: Sequence[int], lengths: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(start, start + n) for start, n in zip(offsets, lengths, strict=True))
