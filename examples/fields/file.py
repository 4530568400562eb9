"""The file format of fields: a zarr group with trajectories of a 2-D field, made by make_fields.py. Torch-free.

Files whose names end in .nc are NetCDF: see netcdf.py.

fields.zarr
  fields        (trajectories, times, channels, height, width) float32, in chunks of a few times and a piece of the
                grid, so that a rank reads little more than its part
  attributes    format_version, equation, parameters, channels, spacing (in space), interval (in time), seed,
                mean and std of each channel
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from hashlib import blake2b
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from examples.fields import netcdf
from longshard.sharding.ranges import Range, Ranges, size
from trainer.config.errors import ConfigError, MissingFile
from trainer.data.sources.files import number_of

Part = tuple[Range | Ranges, Range | Ranges]
"""Rows and columns of a rank's part of the grid: each one half-open range, or several in ascending order, or ()."""

FORMAT_VERSION = 1
_MAKE = "python -m examples.fields.make_fields"
_NAME = "fields"
HASHED = 1 << 24
"""Numbers up to which an array is hashed whole: 64 MiB."""
PIECES = 1024
"""Pieces of a larger array that are hashed."""
CHUNK = 32
"""Rows and columns of a chunk of a grid, of four times and all channels: 48 KiB with three of them."""


def write_fields(
    path: str | Path, trajectories: Iterable[np.ndarray], shape: tuple[int, ...], attributes: Mapping[str, Any]
) -> None:
    """Write a file of fields. It appears at `path` when it is complete; an interrupted run leaves nothing there.

    Args:
        path: The new file, .zarr or .nc.
        trajectories: Arrays (times, channels, height, width).
        shape: (trajectories, times, channels, height, width).
        attributes: Attributes of the group; the function adds format version, mean and standard deviation.

    Raises:
        ConfigError: `path` exists, or zarr is missing.
    """
    moments = netcdf.Moments(shape[2])
    with unfinished_file(path) as folder:
        array = create(folder, shape, attributes)
        for number, frames in enumerate(trajectories):
            array[number] = frames
            moments.add(frames.swapaxes(0, 1).reshape(shape[2], -1))
        _zarr().open_group(folder).attrs.update({"mean": moments.mean.tolist(), "std": moments.std.tolist()})


@contextmanager
def unfinished_file(path: str | Path) -> Iterator[Path]:
    """Enter a context with a temporary name; the file appears at `path` if the context ends without an error.

    Args:
        path: The new file.

    Yields:
        The temporary name.

    Raises:
        ConfigError: `path` exists.
    """
    refuse_existing(path := Path(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        yield (unfinished := Path(folder, path.name))
        refuse_existing(path)  # another run may have made it meanwhile
        os.rename(unfinished, path)


def chunk_of(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return rows and columns of a chunk of fields. Fields with one column are points.

    Args:
        shape: Shape of the fields, (..., height, width).
    """
    return (CHUNK**2, 1) if shape[-1] == 1 else (CHUNK, CHUNK)


def create(folder: Path, shape: tuple[int, ...], attributes: Mapping[str, Any]) -> Any:
    """Create a file with missing values.

    Several processes may open it and write parts, if each writes whole chunks (`chunk_of`). To a NetCDF file they must
    write in turn.

    Args:
        folder: The new file, .zarr or .nc.
        shape: (trajectories, times, channels, height, width).
        attributes: Attributes of the file.

    Returns:
        The array of a zarr group; None for a NetCDF file.
    """
    if folder.suffix == netcdf.ENDING:
        return netcdf.create(folder, shape, attributes)
    group = _zarr().create_group(folder)
    group.attrs.update({"format_version": FORMAT_VERSION, **attributes})
    return group.create_array(
        _NAME,
        shape=shape,
        dtype="float32",
        chunks=tuple(map(min, (1, 4, 1 << 30, *chunk_of(shape)), shape)),
        compressors=None,  # float32 noise in the low bits: compression saves a tenth, and costs each read
        fill_value=np.nan,  # the value of a missing chunk, which a reader detects
        dimension_names=("trajectory", "time", "channel", "height", "width"),
    )


def write_part(folder: Path, frames: np.ndarray, part: Part) -> None:
    """Write a part of the grid for all trajectories and times.

    Args:
        folder: A file that `create` made.
        frames: (trajectories, times, channels, rows, columns).
        part: Rows and columns of the part.

    Raises:
        ConfigError: The part cannot be written.
    """
    if folder.suffix == netcdf.ENDING:
        return netcdf.write_part(folder, frames, partial(_placed_cells, part))
    array = _zarr().open_group(folder, mode="r+")[_NAME]
    try:
        for to_rows, to_columns, from_rows, from_columns in _placed_cells(part, array.shape[3:]):
            array[:, :, :, from_rows, from_columns] = frames[:, :, :, to_rows, to_columns]
    except OSError as error:
        raise ConfigError(f"a part of {folder} cannot be written ({error}); all ranks must see this folder") from None


def refuse_existing(path: Path) -> None:
    """Refuse to overwrite a file.

    Args:
        path: The file.

    Raises:
        ConfigError: `path` exists.
    """
    if os.path.lexists(path):
        raise ConfigError(f"{path} exists already, and nothing is overwritten; give another name, or remove it")


@dataclass(frozen=True)
class FieldSource:
    """An open file of fields.

    Attributes:
        path: Path of the file.
        array: The fields, (trajectories, times, channels, height, width); parts are read when they are indexed.
        channels: Names of the channels.
        mean: Mean of each channel, (channels, 1, 1) float32.
        std: Standard deviation of each channel, (channels, 1, 1) float32.
        attributes: All attributes of the file.
    """

    path: str
    array: Any
    channels: tuple[str, ...]
    mean: np.ndarray
    std: np.ndarray
    attributes: Mapping[str, Any]

    @classmethod
    def open(cls, path: str | Path) -> FieldSource:
        """Return the fields at `path`. Only their attributes are read.

        Args:
            path: A file of fields, .zarr or .nc.

        Raises:
            ConfigError: The file does not exist or is no file of fields of this version. Or its attributes do not fit
                the
                array, or a package is missing.
        """
        path = Path(path).expanduser()
        if not path.exists():
            raise MissingFile(
                f"{path} does not exist; make it with `python -m examples.fields.make_fields --output {path}`"
            )
        array, attributes = netcdf.opened(path) if path.suffix == netcdf.ENDING else _opened(path)
        shape = getattr(array, "shape", ())
        dtype = getattr(array, "dtype", None)
        if len(shape) != 5 or dtype != np.float32 or not all(shape):
            raise _foreign(path, f"its array {_NAME!r} must have 5 dimensions in float32, and has {shape} in {dtype}")
        channels = attributes.get("channels", [])
        try:
            mean, std = (np.asarray(attributes[name], np.float32) for name in ("mean", "std"))
        except (KeyError, ValueError, TypeError):
            mean = std = np.zeros(0, np.float32)
        whole = len(channels) == shape[2] and mean.shape == std.shape == (shape[2],)
        if not (whole and np.isfinite(mean).all() and np.isfinite(std).all() and np.all(std > 0)):
            rule = f"it must have a name, a finite mean and a finite, positive standard deviation of its {shape[2]}"
            raise _foreign(path, f"{rule} channels")
        return cls(str(path), array, tuple(channels), mean[:, None, None], std[:, None, None], attributes)

    @property
    def trajectories(self) -> int:
        """The number of trajectories."""
        return self.array.shape[0]

    @property
    def times(self) -> int:
        """The number of times of each trajectory."""
        return self.array.shape[1]

    @property
    def grid(self) -> tuple[int, int]:
        """Height and width of the grid."""
        return self.array.shape[3], self.array.shape[4]

    @cached_property
    def numbers(self) -> int:
        """A 63-bit hash of the unscaled values of the array: of all values up to HASHED, else of pieces.

        A piece has up to CHUNK rows and columns of one time, in the middle of the grid. There are up to PIECES pieces,
        with the same number of times for each trajectory. Of more than PIECES trajectories, PIECES at equal distances
        are hashed.
        """
        trajectories, times, _, *grid = self.array.shape
        which = range(trajectories)
        when = [slice(None)]
        rows = columns = slice(None)
        if np.prod(self.array.shape, dtype=float) > HASHED:
            which = np.linspace(0, trajectories - 1, min(trajectories, PIECES), dtype=int).tolist()
            frames = np.linspace(0, times - 1, min(times, max(PIECES // trajectories, 1)), dtype=int).tolist()
            when = [slice(time, time + 1) for time in frames]
            rows, columns = (slice(n // 2 - min(n, CHUNK) // 2, n // 2 + (min(n, CHUNK) + 1) // 2) for n in grid)
        digest = blake2b(digest_size=8)
        for trajectory, part in product(which, when):
            try:
                piece = self.array[trajectory, part, :, rows, columns]
            except (OSError, ValueError, RuntimeError) as error:
                raise self._damaged(trajectory, f"cannot be read ({error})") from None
            digest.update(np.ascontiguousarray(piece, np.float32).tobytes())
        return number_of(digest)

    def read(self, trajectory: int, times: slice, part: Part | None = None) -> np.ndarray:
        """Return normalised frames of a part of the grid, (times, channels, rows, columns).

        Only the chunks in which the part has cells are read.

        Args:
            trajectory: Number of the trajectory.
            times: Times to read.
            part: Rows and columns. None: the whole grid.

        Raises:
            ConfigError: A chunk is missing or cannot be read.
            ValueError: The part reaches beyond the grid.
        """
        part = part or tuple((0, n) for n in self.grid)
        count = len(range(*times.indices(self.times)))
        sizes = (size(_ranges(axis, n)) for axis, n in zip(part, self.grid, strict=True))
        frames = np.empty((count, len(self.channels), *sizes), np.float32)
        try:
            for to_rows, to_columns, from_rows, from_columns in _placed_cells(part, self.grid):
                piece = self.array[trajectory, times, :, from_rows, from_columns]
                frames[:, :, to_rows, to_columns] = piece
        except (OSError, ValueError, RuntimeError) as error:
            raise self._damaged(trajectory, f"cannot be read ({error})") from None
        if not np.isfinite(frames).all():
            fault = (
                "lacks a chunk, or has numbers that are not finite (cells without data, such as land, must be filled)"
            )
            raise self._damaged(trajectory, fault)
        return (frames - self.mean) / self.std

    def _damaged(self, trajectory: int, fault: str) -> ConfigError:
        return ConfigError(f"trajectory {trajectory} of {self.path} {fault}; restore the file, or make it again")


def check_fields(source: FieldSource, *, lead: int, held_out: int) -> None:
    """Check that a file has frames to predict, and trajectories to train on.

    Args:
        source: The open file.
        lead: Frames from inputs to targets.
        held_out: Number of last trajectories that are not trained on.

    Raises:
        ConfigError: The lead is below 1 or beyond the last frame, or no trajectory is left for training.
    """
    if not 1 <= lead < source.times:
        raise ConfigError(
            f"fields.lead = {lead} must be at least 1 and below the {source.times} frames of a trajectory of "
            f"{source.path}; use fewer, or make longer trajectories"
        )
    if not 0 <= held_out < source.trajectories:
        raise ConfigError(
            f"fields.held_out = {held_out} must be at least 0 and leave one of the {source.trajectories} of "
            f"{source.path} for training; hold out fewer, or make more"
        )


def _ranges(axis: Range | Ranges, length: int) -> Ranges:
    ranges = (axis,) if len(axis) == 2 and isinstance(axis[0], int) else axis
    if not all(0 <= start <= stop <= length for start, stop in ranges):
        raise ValueError(f"the part {ranges} must lie within the {length} rows or columns of the grid")
    return tuple(ranges)


def _opened(path: Path) -> tuple[Any, dict[str, Any]]:
    """Return the array and the attributes of a zarr group of this format."""
    try:
        group = _zarr().open_group(path, mode="r")
        attributes = dict(group.attrs)
        array = group.get(_NAME)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _foreign(path, f"no zarr group ({type(error).__name__})") from None
    if (version := attributes.get("format_version")) != FORMAT_VERSION:
        fault = "without a format version" if version is None else f"of format version {version}"
        raise _foreign(path, f"{fault}, and this program reads version {FORMAT_VERSION}")
    return array, attributes


def _placed_cells(part: Part, grid: tuple[int, ...]) -> Iterator[netcdf.Places]:
    """Yield rows and columns of each rectangle of a part: their places in the part, then in the grid."""
    rows, columns = (_ranges(axis, n) for axis, n in zip(part, grid, strict=True))
    for to_rows, from_rows in _placed(rows):
        for to_columns, from_columns in _placed(columns):
            yield to_rows, to_columns, from_rows, from_columns


def _placed(ranges: Ranges) -> Iterator[tuple[slice, slice]]:
    """Yield, for each range that is not empty, its place in the part and its place in the grid."""
    place = 0
    for start, stop in ranges:
        if stop > start:
            yield slice(place, place + stop - start), slice(start, stop)
        place += stop - start


def _foreign(path: Path, fault: str) -> ConfigError:
    return ConfigError(
        f"{path} is no file of fields of this program: {fault}; make one with `python -m examples.fields.make_fields`"
    )


def _zarr() -> ModuleType:
    try:
        import zarr
    except ImportError as error:
        raise missing_package(error) from None
    return zarr


def missing_package(error: ImportError) -> ConfigError:
    """Return the error that says what to install when a package for fields is missing.

    Args:
        error: The error of the import.
    """
    return ConfigError(
        f"fields need scipy, threadpoolctl and zarr 3 ({error}); on Python 3.11 or newer install them with "
        "pip install scipy threadpoolctl 'zarr>=3'"
    )
