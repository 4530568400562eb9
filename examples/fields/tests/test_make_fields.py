"""Law: `make_fields` makes the same fields for the same seed, and refuses wrong settings in one sentence."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

if sys.version_info < (3, 11):
    pytest.skip("fields need Python 3.11", allow_module_level=True)

import zarr

from examples.fields.file import FieldSource
from examples.fields.make_fields import main, random_points
from examples.fields.solver import ShallowWater, at_points, initial_state

ROOT = Path(__file__).resolve().parents[3]
TINY = ["--trajectories", "2", "--frames", "3", "--height", "16", "--width", "24"]


def test_the_command_makes_the_same_fields_for_the_same_seed(tmp_path: Path, capsys) -> None:
    files = [tmp_path / name for name in ("a.zarr", "b.zarr", "c.zarr")]
    for file, seed in zip(files, "001", strict=True):
        assert main(["--output", str(file), "--seed", seed, *TINY]) == 0
    shown = capsys.readouterr()
    assert "a.zarr: 2 trajectories of 3 frames of 16 x 24, 0.0 MiB, in " in shown.out
    assert "trajectory 2 of 2" in shown.err
    sources = [FieldSource.open(file) for file in files]
    whole = [source.array[:] for source in sources]
    assert (whole[0] == whole[1]).all()
    assert not np.isclose(whole[0], whole[2]).mean() > 0.1
    assert sources[0].channels == ("u", "v", "h")
    attributes = dict(zarr.open_group(files[0], mode="r").attrs)
    assert (attributes["interval"], attributes["spacing"], attributes["seed"]) == (0.05, 1 / 24, 0)
    assert attributes["parameters"]["coriolis"] == 10
    assert attributes["parameters"]["viscosity"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--frames", "1"], "--frames 1 must be at least 2"),
        (["--height", "7"], "--height 7 must be at least 8"),
        (["--interval", "nan"], "--interval nan must be a positive time"),
        (["--output", "."], ". exists already"),
        (["--output", "/dev/null/fields.zarr"], "/dev/null/fields.zarr cannot be written ("),
    ],
)
def test_the_command_refuses_in_one_sentence(tmp_path: Path, capsys, arguments, message) -> None:
    assert main(["--output", str(tmp_path / "fields.zarr"), *TINY, *arguments]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: ")
    assert message in shown
    assert len(shown.splitlines()) == 1


def test_points_have_the_fields_of_the_grid(tmp_path: Path) -> None:
    """Waves are exact at any point; places are channels, and points that follow one another are near."""
    for name in ("a.zarr", "b.zarr"):
        assert main(["--output", str(tmp_path / name), *TINY, "--points", "200"]) == 0
    source, again = (FieldSource.open(tmp_path / name) for name in ("a.zarr", "b.zarr"))
    assert (source.array[:] == again.array[:]).all()
    assert source.channels == ("u", "v", "h", "cos x", "sin x", "cos y", "sin y")
    assert source.array.shape == (2, 3, 7, 200, 1)
    assert "spacing" not in source.attributes
    equations = ShallowWater(16, 24)
    points = random_points(equations, 200, 0)
    assert (points.min(0) >= 0).all()
    assert (points.max(0) < [1, 16 / 24]).all()
    turns = np.exp(2j * np.pi * points / [1, 16 / 24])
    places = source.array[1, 2, 3:, :, 0]
    assert np.allclose(places, [turns[:, 0].real, turns[:, 0].imag, turns[:, 1].real, turns[:, 1].imag], atol=1e-6)
    assert np.median(np.linalg.norm(np.diff(points, axis=0), axis=1)) < 0.1
    states = initial_state(equations, 0, 0)
    cells = np.stack(np.meshgrid(np.arange(24) / 24, np.arange(16) / 24), -1).reshape(-1, 2)
    assert np.allclose(at_points(equations, states, cells), states.reshape(3, -1), atol=1e-12)
    shifted = np.fft.ifft2(np.fft.fft2(states) * np.exp(2j * np.pi * np.fft.fftfreq(24) * 0.25)).real
    assert np.allclose(
        at_points(equations, states, cells + np.array([0.25 / 24, 0])), shifted.reshape(3, -1), atol=1e-12
    )


@pytest.mark.parametrize("package", ["zarr", "scipy", "threadpoolctl"])
def test_a_missing_package_is_told_in_one_sentence_and_help_needs_none(tmp_path: Path, package: str) -> None:
    code = (
        f"import sys; sys.modules[{package!r}] = None; sys.path.insert(0, {str(ROOT)!r}); "
        "from examples.fields.make_fields import main; sys.exit(main())"
    )
    for arguments, expected, said in ((["--help"], 0, ""), (["--output", "x.zarr", *TINY], 2, "pip install scipy")):
        command = [sys.executable, "-c", code, *arguments]
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
        assert result.returncode == expected, result.stderr
        assert said in result.stderr
        assert len(result.stderr.splitlines()) == (1 if said else 0)
    assert list(tmp_path.iterdir()) == []


def test_files_and_solver_do_not_import_torch() -> None:
    code = "import sys, examples.fields.file, examples.fields.solver, examples.fields.make_fields;"
    subprocess.run([sys.executable, "-c", f"{code} assert 'torch' not in sys.modules"], check=True)
