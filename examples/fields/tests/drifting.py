"""Small files of fields for tests."""

from pathlib import Path

import numpy as np
import pytest

from examples.fields.make_fields import PLACES


def write_drifting_fields(path: Path, *, height: int = 16, width: int = 12, trajectories: int = 6) -> str:
    """Random smooth fields of 3 channels that drift by a point a frame, 10 frames; return the path."""
    zarr = pytest.importorskip("zarr", reason="fields need Python 3.11")
    shape = (trajectories, 1, 3, height, width)
    waves = np.fft.rfft2(np.random.default_rng(0).standard_normal(shape))
    heights, widths = np.fft.fftfreq(height)[:, None] * height, np.fft.rfftfreq(width) * width
    start = np.fft.irfft2(waves * np.exp(-(heights**2 + widths**2) / 8), s=shape[-2:])
    x = np.concatenate([np.roll(start, t, axis=-1) for t in range(10)], 1).astype(np.float32)
    group = zarr.open_group(path, mode="w")
    group.create_array("fields", shape=x.shape, chunks=(1, 1, 3, 8, 6), dtype="float32")[:] = x
    mean, std = x.mean((0, 1, 3, 4)).tolist(), x.std((0, 1, 3, 4)).tolist()
    group.attrs.update({"format_version": 1, "channels": ["a", "b", "c"], "mean": mean, "std": std})
    return str(path)


def write_drifting_points(path: Path, *, points: int = 32, trajectories: int = 6) -> str:
    """The same kind of fields at random points, with the four channels of their places; return the path."""
    zarr = pytest.importorskip("zarr", reason="fields need Python 3.11")
    rng = np.random.default_rng(0)
    angles = 2 * np.pi * rng.random((2, points))
    waves, phases = rng.integers(-3, 4, (trajectories, 3, 4, 2)), rng.random((trajectories, 3, 4)) * 2 * np.pi
    times = np.arange(10)[:, None, None, None]
    phases = np.einsum("rckd,dp->rckp", waves, angles) + phases[..., None]
    x = np.cos(phases[:, None] + 0.3 * times).sum(3)
    places = np.stack([function(angle) for angle in angles for function in (np.cos, np.sin)])
    x = np.concatenate([x, np.broadcast_to(places, (*x.shape[:2], 4, points))], 2)[..., None].astype(np.float32)
    group = zarr.open_group(path, mode="w")
    group.create_array("fields", shape=x.shape, chunks=(1, 1, 7, 8, 1), dtype="float32")[:] = x
    mean, std = x.mean((0, 1, 3, 4)).tolist(), x.std((0, 1, 3, 4)).tolist()
    group.attrs.update({"format_version": 1, "channels": [*"abc", *PLACES], "mean": mean, "std": std})
    return str(path)
