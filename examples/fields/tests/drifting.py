"""Small files of fields for tests."""

from pathlib import Path

import numpy as np
import pytest


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
