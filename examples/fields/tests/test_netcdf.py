"""Laws of NetCDF files of fields: each rank reads its part of what xarray writes, and writes its part of one file."""

import sys
from pathlib import Path

import numpy as np
import pytest

if sys.version_info < (3, 11):
    pytest.skip("fields need Python 3.11", allow_module_level=True)

import xarray

from examples.fields import netcdf
from examples.fields.file import FieldSource, create, write_part
from examples.fields.tests.test_data import ATTRIBUTES, FRAMES, MEAN, NORMAL, PARTS, SHAPE, STD, cells
from trainer.config.errors import ConfigError

DIMS = ("member", "time", "lat", "lon")


def written(path: Path, *, trajectories: slice | int = slice(None), packed: bool = False, **attributes: object) -> Path:
    """Write a file as other programs do: two variables of fields, coordinates, and bounds of times."""
    variables = {}
    for channel, name in enumerate(ATTRIBUTES["channels"]):
        frames = FRAMES[trajectories, :, channel]
        variables[name] = (
            DIMS[4 - frames.ndim :],
            frames,
            {key: values[channel] for key, values in attributes.items()},
        )
    data = xarray.Dataset(variables | {"time_bounds": (("time", "edge"), np.zeros((SHAPE[1], 2)))})
    data = data.assign_coords(
        lat=np.linspace(90, -90, SHAPE[3]), time=("time", range(SHAPE[1]), {"units": "hours since 2000-01-01"})
    )
    packing = {"dtype": "int16", "scale_factor": 1e-3, "add_offset": 3.0, "_FillValue": -32768}
    data.to_netcdf(path, engine="h5netcdf", encoding=dict.fromkeys(ATTRIBUTES["channels"], packing) if packed else {})
    return path


@pytest.mark.parametrize("part", PARTS)
def test_a_part_is_read(tmp_path: Path, part) -> None:
    source = FieldSource.open(written(tmp_path / "x.nc", mean=MEAN, std=STD))
    assert (source.trajectories, source.times, source.channels, source.grid) == (5, 9, ("a", "b"), (40, 70))
    got, wanted = source.read(1, slice(2, 5, 2), part), cells(part)[1, 2:5:2]
    assert got.shape == wanted.shape
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, wanted, atol=1e-6)


def test_one_run_without_trajectories_is_one_trajectory(tmp_path: Path) -> None:
    source = FieldSource.open(written(tmp_path / "x.nc", trajectories=3, mean=MEAN, std=STD))
    assert source.trajectories == 1
    np.testing.assert_allclose(source.read(0, slice(4)), NORMAL[3, :4], atol=1e-6)


def test_packed_numbers_are_unpacked(tmp_path: Path) -> None:
    source = FieldSource.open(written(tmp_path / "x.nc", packed=True, mean=MEAN, std=STD))
    np.testing.assert_allclose(source.read(2, slice(None)), NORMAL[2], atol=1e-3)


def test_statistics_are_added(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = written(tmp_path / "x.nc", packed=True)
    with pytest.raises(ConfigError, match=r"a, b of .* need the attributes mean and std.*add them with `python"):
        FieldSource.open(path)
    assert netcdf.main([str(path)]) == 0
    assert "a has mean" in capsys.readouterr().out
    source = FieldSource.open(path)
    np.testing.assert_allclose(source.mean[:, 0, 0], MEAN, rtol=1e-4)
    np.testing.assert_allclose(source.std[:, 0, 0], STD, rtol=1e-4)
    np.testing.assert_allclose(source.read(2, slice(None)), NORMAL[2], atol=1e-3)


def test_statistics_keep_a_small_spread_around_a_large_mean() -> None:
    numbers = 1e9 + np.random.default_rng(0).normal(0, 1, (2, 4, 1000))
    moments = netcdf.Moments(2)
    for part in numbers.swapaxes(0, 1):
        moments.add(part)
    np.testing.assert_allclose(moments.mean, numbers.mean((1, 2)), rtol=1e-15)
    np.testing.assert_allclose(moments.std, numbers.std((1, 2)), rtol=1e-6)


def test_parts_of_ranks_are_one_file_that_xarray_reads(tmp_path: Path) -> None:
    path = tmp_path / "x.nc"
    create(path, SHAPE, ATTRIBUTES | {"mean": MEAN, "std": STD, "parameters": {"not": "kept"}})
    quarters = [(((0, 13),), ((0, 70),)), (((13, 20), (39, 40)), ((0, 70),)), (((20, 39),), ((0, 8), (9, 70)))]
    for part in quarters:
        rows, columns = ([i for start, stop in axis for i in range(start, stop)] for axis in part)
        write_part(path, FRAMES[:, :, :, rows][..., columns], part)
    data = xarray.open_dataset(path, engine="h5netcdf")
    assert data.attrs == {"seed": 0}
    missing = np.zeros(SHAPE[3:], bool)
    missing[20:39, 8] = True
    for channel, name in enumerate(ATTRIBUTES["channels"]):
        assert data[name].dims == ("trajectory", "time", "height", "width")
        np.testing.assert_array_equal(data[name].to_numpy()[..., ~missing], FRAMES[:, :, channel][..., ~missing])
    with pytest.raises(ConfigError, match="has numbers that are not finite"):
        FieldSource.open(path).read(0, slice(None))


def test_what_is_no_file_of_fields_is_refused(tmp_path: Path) -> None:
    (text := tmp_path / "text.nc").write_text("no NetCDF")
    several = tmp_path / "several.nc"
    xarray.Dataset({"a": (("t", "y", "x"), FRAMES[0, :, 0]), "b": (("t", "x", "y"), FRAMES[0, :, 0].mT)}).to_netcdf(
        several, engine="h5netcdf"
    )
    for path, message in (
        (text, "is no NetCDF file that can be read"),
        (several, "must have variables with the same dim"),
    ):
        with pytest.raises(ConfigError, match=message):
            FieldSource.open(path)
    assert netcdf.main([]) == netcdf.main([str(text)]) == 2


@pytest.mark.parametrize(
    ("dims", "right"),
    [
        (("time", "level", "lat", "lon"), False),
        (("lat", "lon", "time"), False),
        (("valid_time", "member", "y", "x"), False),
        (("level", "lat", "lon"), False),
        (("time", "step", "lat", "lon"), True),  # forecasts: each start is a trajectory
        (("member", "T", "y", "x"), True),
        (("a", "b", "c", "d"), True),
    ],
)
def test_times_are_the_third_dimension_from_the_last(tmp_path: Path, dims: tuple[str, ...], right: bool) -> None:
    path = tmp_path / "x.nc"
    variable = dims, FRAMES[0, :4, :, :8, :6][(0,) * (4 - len(dims))], {"mean": 0.0, "std": 1.0}
    xarray.Dataset({"v": variable}).to_netcdf(path, engine="h5netcdf")
    if right:
        assert FieldSource.open(path).grid == (8, 6)
        return
    with pytest.raises(
        ConfigError, match=rf"dimensions \({', '.join(dims)}\), and {dims[-3]} would be read as the times"
    ):
        FieldSource.open(path)


def test_cells_without_data_are_one_sentence(tmp_path: Path) -> None:
    land = FRAMES[0, :, 0].copy()
    land[:, 3] = np.nan
    for name, mean in (("bare", {}), ("nan", {"mean": np.nan, "std": 1.0}), ("inf", {"mean": 0.0, "std": np.inf})):
        path = tmp_path / f"{name}.nc"
        xarray.Dataset({"sst": (("time", "y", "x"), land, mean)}).to_netcdf(path, engine="h5netcdf")
        with pytest.raises(ConfigError, match=r"cells without data, such as land .* fill them with xarray"):
            FieldSource.open(path) if mean else netcdf.add_statistics(path)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = written(tmp_path / "x.nc", mean=MEAN, std=STD)
    monkeypatch.setitem(sys.modules, "xarray", None)
    with pytest.raises(ConfigError, match="NetCDF files need xarray and h5netcdf"):
        FieldSource.open(path)
