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
from examples.fields.make_fields import main

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
