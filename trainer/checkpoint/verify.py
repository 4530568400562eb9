"""Read a whole saved step: lengths, check sums, entries against the model, and values that must be finite."""

import zlib
from bisect import bisect_left
from collections.abc import Mapping, Sequence

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from trainer.checkpoint.weights import load_tensors, names_of, reader_of
from trainer.config.errors import ConfigError, first_line
from trainer.config.optimizer import OPTIMIZERS_HERE
from trainer.config.schema import JobConfig
from trainer.families.args import ModelArgs
from trainer.grouping import grouped
from trainer.models.matrices import matrices_of
from trainer.models.model_spec import model_spec
from trainer.stores.folder import read_state, unreadable
from trainer.stores.state import RunState, check_same_model
from trainer.stores.store import Store
from trainer.transforms.lora import apply_lora

Box = Sequence[tuple[int, int]]
"""Half-open ranges of places, one for each dimension."""
_AT_ONCE = 2**30
"""Largest number of bytes of the tensors that are read at once; a larger tensor is read alone."""
_BLOCK = 2**20
_MOMENTS = ("exp_avg", "exp_avg_sq")
_MOMENTUM = ("momentum",)


def verify_step(
    folder: Store, step: int, run: tuple[JobConfig, ModelArgs] | None
) -> tuple[int, int, int]:
    """Read a saved step whole, and check it.

    Args:
        folder: The folder of checkpoints.
        step: Number of the step.
        run: The configuration and the model that it must belong to. None: not compared.

    Returns:
        The number of files, their bytes, and the number of tensors.

    Raises:
        ConfigError: An entry is missing, damaged, of another model, surplus, or not finite.
    """
    try:
        return _verified(folder, step, run)
    except ConfigError:
        raise
    except Exception as error:  # metadata that are damaged may name any type, length and place
        raise unreadable(folder, step, f"{type(error).__name__}: {first_line(error)}") from None


def _verified(
    folder: Store, step: int, run: tuple[JobConfig, ModelArgs] | None
) -> tuple[int, int, int]:
    state = read_state(folder, step)
    reader = reader_of(folder, state)
    entries = reader.read_metadata().state_dict_metadata
    if run is not None:
        check_same_model(
            state, *run, reader.path, remedy="verify it with the configuration of its run"
        )
        with_optimizer = step > 0 and not state.model_only
        known = run[0].optimizer.name in OPTIMIZERS_HERE
        expected = expected_entries(*run, with_optimizer=with_optimizer and known)
        # The states of a package's optimizer are unknown; only check that each belongs to a parameter.
        compared = (
            entries if known or not with_optimizer else _without_states(entries, expected)
        )
        if problem := _difference(compared, expected):
            raise unreadable(folder, step, problem)
    for name, entry in entries.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise unreadable(folder, step, f"{name} is no tensor")
        places = (zip(chunk.offsets, chunk.sizes, strict=True) for chunk in entry.chunks)
        if not cover_once(
            [[(start, start + size) for start, size in box] for box in places], entry.size
        ):
            raise unreadable(folder, step, f"the parts of {name} are not the whole of it")
    sizes = {
        name: entry.size.numel() * entry.properties.dtype.itemsize
        for name, entry in entries.items()
    }
    for names in grouped(sizes, _AT_ONCE):
        tensors = {
            name: torch.empty(entries[name].size, dtype=entries[name].properties.dtype)
            for name in names
        }
        load_tensors(tensors, reader)
        for name, tensor in tensors.items():
            if not tensor.isfinite().all():
                raise unreadable(folder, step, f"{name} has values that are not finite")
    _check_files(folder, state)
    return len(state.files), sum(state.files.values()), len(entries)


def _without_states(
    entries: Mapping[str, TensorStorageMetadata], expected: Mapping[str, torch.Size]
) -> dict[str, TensorStorageMetadata]:
    """Return the entries that are no optimizer states of `expected` parameters."""
    states = {
        name
        for name in entries
        if name.startswith("optimizer.") and f"model.{name[10:].rpartition('.')[0]}" in expected
    }
    return {name: entry for name, entry in entries.items() if name not in states}


def _check_files(folder: Store, state: RunState) -> None:
    """Check each file by its check sum, if it has one. Raise a ConfigError if one is wrong.

    This also detects a file of another step, whose inner check sums are right.
    """
    for name in state.files:  # these names have been checked
        if (wanted := state.sums.get(name)) is None:
            continue
        check_sum = 0
        with folder.open(folder.step(state.step) / name, "rb") as file:
            while block := file.read(_BLOCK):
                check_sum = zlib.crc32(block, check_sum)
        if check_sum != wanted:
            raise unreadable(
                folder,
                state.step,
                f"the check sum of {name} is wrong: damaged, or of another step",
            )


def expected_entries(
    config: JobConfig, args: ModelArgs, *, with_optimizer: bool
) -> dict[str, torch.Size]:
    """Return name and global shape of every entry of a checkpoint of this run.

    Args:
        config: The configuration.
        args: The arguments of the model.
        with_optimizer: Whether the checkpoint has optimizer states.
    """
    with torch.device("meta"):
        model = model_spec(config.model.name).build(args)
        apply_lora(model, config.lora)
    matrices = matrices_of([model]) if config.optimizer.name == "Muon" else {}
    expected = {}
    for tensor, name in names_of([model]).items():
        trained = isinstance(tensor, torch.nn.Parameter)
        if trained and not tensor.requires_grad:
            continue
        expected[f"model.{name}"] = tensor.shape
        if trained and with_optimizer:
            moments = _MOMENTUM if tensor in matrices else _MOMENTS
            expected |= {f"optimizer.{name}.{moment}": tensor.shape for moment in moments}
            expected[f"optimizer.{name}.step"] = torch.Size()
    return expected


def cover_once(boxes: Sequence[Box], sizes: Sequence[int]) -> bool:
    """Return whether boxes lie within a box of these sizes, and cover each place in it once.

    Args:
        boxes: The boxes.
        sizes: Size of each dimension.
    """
    if not sizes:
        return len(boxes) == 1
    if any(
        len(box) != len(sizes) or not 0 <= box[0][0] <= box[0][1] <= sizes[0] for box in boxes
    ):
        return False
    edges = sorted({0, sizes[0], *(edge for box in boxes for edge in box[0])})
    slabs = [[] for _ in edges[1:]]
    for (start, stop), *other_ranges in boxes:
        for slab in slabs[bisect_left(edges, start) : bisect_left(edges, stop)]:
            slab.append(other_ranges)
    return all(cover_once(slab, sizes[1:]) for slab in slabs)


def _difference(
    entries: Mapping[str, TensorStorageMetadata], expected: Mapping[str, torch.Size]
) -> str:
    for name, shape in expected.items():
        if name not in entries:
            return f"{name} is missing"
        if entries[name].size != shape:
            return f"{name} has the shape {tuple(entries[name].size)}, and {tuple(shape)} in the model"
    return next(
        (f"it holds {name} and the model has none" for name in entries if name not in expected),
        "",
    )
