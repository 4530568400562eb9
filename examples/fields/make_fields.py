"""Make fields to learn from: solve the rotating shallow-water equations, and write trajectories as a zarr group.

    python -m examples.fields.make_fields --output fields.zarr
    python -m examples.fields.make_fields --output large.zarr --height 256 --width 256 --trajectories 64
    python -m examples.fields.make_fields --output points.zarr --points 1024

Each trajectory begins with random vortices and gravity waves in a doubly periodic box. The same seed gives the same
fields. See file.py for the format. With --points, the file has the fields at random points, ordered so that points near
each other follow each other. Four more channels have the places of the points.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from examples.fields.file import missing_package, refuse_existing, write_fields
from trainer.config.errors import ConfigError
from trainer.config.writable import full_disk

if TYPE_CHECKING:
    from examples.fields.solver import ShallowWater

PLACES = ["cos x", "sin x", "cos y", "sin y"]
"""Channels with the places of points, as angles of a periodic box."""
_LEAST = {"trajectories": 1, "frames": 2, "height": 8, "width": 8, "points": 0, "seed": 0}


def make(args: argparse.Namespace) -> None:
    """Solve the equations and write the fields.

    Args:
        args: The command line.

    Raises:
        ConfigError: A setting is wrong, the output exists, or a package is missing.
    """
    for name, least in _LEAST.items():
        if (value := getattr(args, name)) < least:
            raise ConfigError(f"--{name} {value} must be at least {least}")
    if not 0 < args.interval < float("inf"):
        raise ConfigError(f"--interval {args.interval} must be a positive time, such as 0.05")
    refuse_existing(args.output)
    try:
        from examples.fields.solver import CHANNELS, ShallowWater
    except ImportError as error:
        raise missing_package(error) from None
    equations = ShallowWater(args.height, args.width)
    attributes: dict[str, Any] = {
        "equation": "rotating shallow water, doubly periodic",
        "parameters": asdict(equations) | {"viscosity": equations.nu},
        "channels": list(CHANNELS),
        "spacing": equations.spacing,
        "interval": args.interval,
        "seed": args.seed,
    }
    trajectories = _trajectories(equations, args)
    grid = (args.height, args.width)
    if args.points:
        points = random_points(equations, args.points, args.seed)
        trajectories = (_at_points(equations, frames, points) for frames in trajectories)
        grid = (args.points, 1)
        attributes["channels"] += PLACES
        del attributes["spacing"]
    shape = (args.trajectories, args.frames, len(attributes["channels"]), *grid)
    write_fields(args.output, trajectories, shape, attributes)


def random_points(equations: ShallowWater, number: int, seed: int) -> np.ndarray:
    """Return random points of the box, (number, 2) with x and y, in the order of Morton's curve.

    Args:
        equations: The equations and their box.
        number: Number of points.
        seed: Seed of the random numbers.
    """
    bits = np.random.Philox(np.random.SeedSequence(seed, spawn_key=(1 << 20,))).random_raw(2 * number)
    cells = (bits.reshape(number, 2) >> np.uint64(48)).astype(np.int64)
    order = sum(((cells[:, axis] >> bit) & 1) << (2 * bit + axis) for bit in range(16) for axis in range(2))
    box = np.array([equations.width, equations.height]) * equations.spacing
    return (cells[order.argsort(kind="stable")] + 0.5) / 2**16 * box


def _at_points(equations: ShallowWater, frames: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Return frames (frames, channels, height, width) at points, with their places: (frames, channels + 4, N, 1)."""
    from examples.fields.solver import at_points

    angles = 2 * np.pi * points / (np.array([equations.width, equations.height]) * equations.spacing)
    places = np.stack([function(angle) for angle in angles.T for function in (np.cos, np.sin)])
    places = np.broadcast_to(places, (len(frames), *places.shape))
    return np.concatenate([at_points(equations, frames, points), places], 1)[..., None].astype(np.float32)


def _trajectories(equations: ShallowWater, args: argparse.Namespace) -> Iterator[np.ndarray]:
    """Yield each trajectory (frames, channels, height, width) in float32, and show the progress in one line."""
    from examples.fields.solver import initial_state, solve

    times = np.arange(args.frames) * args.interval
    end = "\r" if sys.stderr.isatty() else "\n"
    for number in range(args.trajectories):
        yield solve(equations, initial_state(equations, args.seed, number), times).astype(np.float32)
        print(f"trajectory {number + 1} of {args.trajectories}", end=end, file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    """Make the fields and print their size.

    Args:
        argv: The command line. None: the process's own.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(prog="python -m examples.fields.make_fields", description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="zarr group to write, such as fields.zarr")
    parser.add_argument("--trajectories", type=int, default=16, help="solutions from different initial states")
    parser.add_argument("--frames", type=int, default=40, help="times of each trajectory")
    parser.add_argument("--height", type=int, default=64, help="cells of the grid along y")
    parser.add_argument("--width", type=int, default=64, help="cells of the grid along x; the box has width 1")
    parser.add_argument("--points", type=int, default=0, help="random points in place of the grid (default: the grid)")
    parser.add_argument("--interval", type=float, default=0.05, help="time between frames; a gravity wave has speed 1")
    parser.add_argument("--seed", type=int, default=0, help="seed of the initial states")
    args = parser.parse_args(argv)
    start = time.monotonic()
    try:
        make(args)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        reason = full_disk(error, args.output.parent) or error
        print(f"error: {args.output} cannot be written ({reason}); give another --output", file=sys.stderr)
        return 2
    size = sum(file.stat().st_size for file in args.output.rglob("*") if file.is_file())
    grid = f"{args.points} points" if args.points else f"{args.height} x {args.width}"
    print(
        f"{args.output}: {args.trajectories} trajectories of {args.frames} frames of {grid}, "
        f"{size / 2**20:.1f} MiB, in {time.monotonic() - start:.0f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
