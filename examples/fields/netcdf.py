"""Fields in NetCDF files; each rank reads and writes its own part. Torch-free.

    python -m examples.fields.netcdf weather.nc       adds the attributes mean and std to each variable of the file

Channels are the variables with the dimensions (time, y, x) or (trajectory, time, y, x); other variables, such as
coordinates, do not change. xarray reads the requested part, and applies scales and offsets of packed numbers. HDF5
allows one writer at a time, so ranks write their parts of a forecast in turn.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainer.config.errors import ConfigError

Places = tuple[slice, slice, slice, slice]
"""Rows and columns in the part, then rows and columns in the grid."""

ENDING = ".nc"
_DIMS = ("trajectory", "time", "height", "width")
_TIMES = {"time", "times", "t", "valid_time", "date", "datetime"}
_LEADS = {"step", "lead_time", "prediction_timedelta", "forecast_period"}  # times of a forecast; `time` is its start
_LEVELS = {"level", "lev", "plev", "pressure", "pressure_level", "isobaricinhpa", "depth"}
_STATISTICS = "python -m examples.fields.netcdf"


@dataclass(frozen=True)
class Variables:
    """Variables as one array (trajectories, times, channels, height, width) in float32; see `file.FieldSource`.

    Attributes:
        variables: Variables of xarray, one for each channel.
    """

    variables: Sequence[Any]

    dtype = np.dtype("float32")

    @property
    def shape(self) -> tuple[int, ...]:
        *trajectories_and_times, height, width = self.variables[0].shape
        before = (1, *trajectories_and_times)[-2:]
        return *before, len(self.variables), height, width

    def __getitem__(self, index: tuple[int, slice, slice, slice, slice]) -> np.ndarray:
        """Return frames of a trajectory, (times, channels, rows, columns), with all channels.

        Args:
            index: Trajectory, times, channels (ignored), rows and columns.
        """
        trajectory, times, _, rows, columns = index
        before = (trajectory,) if self.variables[0].ndim == 4 else ()
        where = (*before, times, rows, columns)
        return np.stack([variable[where].to_numpy() for variable in self.variables], 1).astype(np.float32)


class Moments:
    """Mean and standard deviation of numbers that come in parts (Chan, Golub and LeVeque, 1983).

    Args:
        channels: Number of channels.

    Attributes:
        mean: Mean of each channel, (channels,) float64.
    """

    def __init__(self, channels: int) -> None:
        self.mean = np.zeros(channels)
        self._squares = np.zeros(channels)
        self._count = 0

    def add(self, part: np.ndarray) -> None:
        """Add numbers.

        Args:
            part: (channels, n).
        """
        before = self._count
        here = part.shape[1]
        mean = part.mean(1, dtype=np.float64)
        difference = mean - self.mean
        self._count = before + here
        self._squares += np.square(part - mean[:, None]).sum(1) + difference**2 * before * here / self._count
        self.mean += difference * here / self._count

    @property
    def std(self) -> np.ndarray:
        """The standard deviation of each channel, (channels,) float64."""
        return np.sqrt(self._squares / self._count)


def opened(path: Path) -> tuple[Variables, dict[str, Any]]:
    """Open a file of fields.

    Args:
        path: The NetCDF file.

    Returns:
        The variables, and the attributes with names, means and standard deviations of the channels.

    Raises:
        ConfigError: The file is no NetCDF file, its fields have different dimensions or no statistics, or xarray is
            missing.
    """
    try:
        data, fields = _open(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no NetCDF file that can be read ({type(error).__name__}: {error})") from None
    dims = {x.dims for x in fields.values()}
    if len(dims) != 1:
        dimensions = "; ".join(f"{name} {x.dims}" for name, x in fields.items()) or "none"
        raise ConfigError(
            f"{path} must have variables with the same dimensions, (time, y, x) or (trajectory, time, y, x); its "
            f"variables of numbers with 3 or 4 dimensions are: {dimensions}"
        )
    _check_times(path, next(iter(dims)))
    attributes = {**data.attrs, "channels": [*fields]}
    for name in ("mean", "std"):
        statistics = [x.attrs.get(name) for x in fields.values()]
        if None in statistics:
            raise ConfigError(
                f"the variables {', '.join(fields)} of {path} need the attributes mean and std, by which they are "
                f"normalised; add them with `{_STATISTICS} {path}`"
            )
        attributes[name] = [float(x) for x in statistics]
        if not np.isfinite(attributes[name]).all():
            raise _without_data(path, [*fields][int(np.argmin(np.isfinite(attributes[name])))], f"{name} = nan or inf")
    return Variables([*fields.values()]), attributes


def create(path: Path, shape: tuple[int, ...], attributes: Mapping[str, Any]) -> None:
    """Create a file for fields with missing values.

    Args:
        path: The new file.
        shape: (trajectories, times, channels, height, width).
        attributes: `channels`, `mean` and `std` go to the variables. Other attributes are kept if they are texts or
            numbers.
    """
    trajectories, times, _, height, width = shape
    sizes = dict(zip(_DIMS, (trajectories, times, height, width), strict=True))
    with _packages()[1].File(path, "w") as file:
        file.dimensions = sizes
        file.attrs.update({name: x for name, x in attributes.items() if isinstance(x, str | int | float)})
        for name, *statistics in zip(*(attributes[key] for key in ("channels", "mean", "std")), strict=True):
            variable = file.create_variable(name, _DIMS, "float32", fillvalue=np.nan)
            variable.attrs.update(zip(("mean", "std"), map(float, statistics), strict=True))


def write_part(path: Path, frames: np.ndarray, places: Callable[[tuple[int, int]], Iterable[Places]]) -> None:
    """Write a part of the grid for all trajectories and times. One process at a time may write.

    Args:
        path: A file that `create` made.
        frames: (trajectories, times, channels, rows, columns).
        places: Returns the places of the part's rectangles for the sizes of the grid.

    Raises:
        ConfigError: The part cannot be written.
    """
    try:
        with _packages()[1].File(path, "a") as file:
            for channel, variable in enumerate(file.variables.values()):
                for to_rows, to_columns, from_rows, from_columns in places(variable.shape[2:]):
                    variable[:, :, from_rows, from_columns] = frames[:, :, channel, to_rows, to_columns]
    except OSError as error:
        raise ConfigError(f"a part of {path} cannot be written ({error}); all ranks must see this file") from None


def add_statistics(path: Path) -> dict[str, tuple[float, float]]:
    """Add the attributes mean and std to the variables that are fields. One time after another is read.

    Args:
        path: The NetCDF file.

    Returns:
        Mean and standard deviation by the name of the variable.

    Raises:
        ConfigError: A cell is not finite.
    """
    data, fields = _open(path)
    statistics_by_name = {}
    for name, x in fields.items():
        moments = Moments(1)
        for place in np.ndindex(x.shape[:-2]):
            frame = np.asarray(x[place], np.float64)
            if not np.isfinite(frame).all():
                raise _without_data(path, name, f"cells that are not finite at {place}")
            moments.add(frame.reshape(1, -1))
        statistics_by_name[name] = float(moments.mean[0]), float(moments.std[0])
    data.close()
    with _packages()[1].File(path, "a") as file:
        for name, statistics in statistics_by_name.items():
            file.variables[name].attrs.update(zip(("mean", "std"), statistics, strict=True))
    return statistics_by_name


def _check_times(path: Path, dims: tuple[str, ...]) -> None:
    """Check by their names that the third dimension from the last has the times."""
    third = str(dims[-3]).lower()
    others = {str(name).lower() for name in dims[:-3] + dims[-2:]}
    if third in _LEVELS or (others & _TIMES and third not in _TIMES | _LEADS):
        raise ConfigError(
            f"{path} has variables with the dimensions ({', '.join(map(str, dims))}), and {dims[-3]} would be read as "
            "the times of a trajectory; write them as (time, y, x) or (trajectory, time, y, x) with xarray: a variable "
            "for each level (data.sel(level=...)), or data.transpose(..., 'time', 'lat', 'lon')"
        )


def _without_data(path: Path, name: str, fault: str) -> ConfigError:
    return ConfigError(
        f"the variable {name} of {path} has {fault}: cells without data, such as land for a variable of the ocean, "
        f"must have a number; fill them with xarray (data.fillna(0)), then run `{_STATISTICS} {path}`"
    )


def _packages() -> tuple[Any, Any]:
    """Return xarray and h5netcdf."""
    try:
        import h5netcdf
        import xarray
    except ImportError as error:
        raise ConfigError(
            f"NetCDF files need xarray and h5netcdf ({error}); pip install xarray h5netcdf h5py"
        ) from None
    return xarray, h5netcdf


def _open(path: Path) -> tuple[Any, dict[str, Any]]:
    """Open a file; return it and the variables that can be fields. Only attributes are read."""
    xarray, _ = _packages()
    data = xarray.open_dataset(path, engine="h5netcdf", decode_times=False, cache=False)
    return data, {str(name): x for name, x in data.data_vars.items() if x.ndim in (3, 4) and x.dtype.kind in "iuf"}


def main(argv: list[str] | None = None) -> int:
    """Add statistics to the named files, and print them.

    Args:
        argv: Paths of the files. None: the command line.

    Returns:
        The exit code.
    """
    paths = sys.argv[1:] if argv is None else argv
    if not paths or paths[0].startswith("-"):
        print(__doc__, end="")
        return 0 if paths else 2
    try:
        for path in paths:
            for name, (mean, std) in add_statistics(Path(path)).items():
                print(f"{path}: {name} has mean {mean:.6g} and standard deviation {std:.6g}")
    except (ConfigError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
