"""The real program on fields: every division of a field prints the losses of one rank, resumes, and learns."""

import contextlib
import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import train
from examples.fields.file import FieldSource
from examples.fields.forecast import main as predict
from examples.fields.tests.drifting import write_drifting_fields, write_drifting_points
from tests.distributed.pool import WorkerPool
from trainer.runtime.process_group import Process

DOMAIN, ROWS = "--parallelism.domain_parallel_degrees", "--fields.rows"
STEPS = 4
FOLDER = Path(__file__).resolve().parents[1]
LAYOUTS = {
    "2": (2, [DOMAIN, "2"]),
    "2 uneven": (2, [DOMAIN, "2", ROWS, "13,19"]),
    "4, one empty": (4, [DOMAIN, "4", ROWS, "9,0,11,12"]),
    "2 x 2": (4, [DOMAIN, "2", "2", ROWS, "31,1", "8,16"]),
    "fsdp and 2": (4, [DOMAIN, "2", "--parallelism.data_parallel_shard_degree=2", ROWS, "5,27"]),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_drifting_fields(tmp_path_factory.mktemp("fields") / "fields.zarr", height=32, width=24)


def run_main(folder: str, path: str, arguments: list[str]) -> list[dict]:
    """On each rank: the program's own main; the logged steps from rank 0's file."""
    settings = [f"--training.dataset_path={path}", f"--job.dump_folder={folder}", "--training.data_streams=4"]
    settings += ["--metrics.log_freq=1", f"--training.steps={STEPS}", "--lr_scheduler.total_steps=60"]
    code = train.main([*settings, "--checkpoint.interval=2", *arguments])
    assert code == 0, code
    if Process.from_environment().rank:
        return []
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module", params=["unet", pytest.param("nat", marks=pytest.mark.slow)])
def preset(request: pytest.FixtureRequest) -> list[str]:
    return ["--job.config_file", str(FOLDER / f"{request.param}.toml")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, preset: list[str]) -> Path:
    """Folder of the run of one rank with this preset."""
    return tmp_path_factory.mktemp("one")


@pytest.fixture(scope="module")
def one_rank(pool: WorkerPool, path: str, preset: list[str], folder: Path) -> list[dict]:
    return pool.run(1, run_main, str(folder), path, preset)[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_losses_are_those_of_one_rank(
    pool: WorkerPool, path: str, preset: list[str], one_rank: list[dict], tmp_path: Path, name: str
) -> None:
    ranks, arguments = LAYOUTS[name]
    got = pool.run(ranks, run_main, str(tmp_path), path, [*preset, *arguments])[0]
    assert len(got) == len(one_rank) == STEPS
    for row, reference in zip(got, one_rank, strict=True):
        for key in ("loss", "loss_max", "grad_norm"):
            assert row[key] == pytest.approx(reference[key], rel=1e-5), (row["step"], key)
        assert row["tokens_seen"] == reference["tokens_seen"] == row["step"] * 8 * 32 * 24


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("2 uneven", "2"),
        ("4, one empty", "2 x 2"),
        ("2 x 2", "fsdp and 2"),
        ("fsdp and 2", "4, one empty"),
    ],
)
def test_a_checkpoint_of_one_division_is_loaded_by_another(
    pool: WorkerPool, path: str, preset: list[str], one_rank: list[dict], tmp_path: Path, first: str, then: str
) -> None:
    for layout, last in ((first, 2), (then, STEPS)):
        ranks, arguments = LAYOUTS[layout]
        got = pool.run(ranks, run_main, str(tmp_path), path, [*preset, *arguments, f"--training.steps={last}"])[0]
    assert [step["step"] for step in got] == [1, 2, 3, 4]
    for row, reference in zip(got, one_rank, strict=True):
        assert row["loss"] == pytest.approx(reference["loss"], rel=1e-5), row["step"]


def forecast(folder: Path) -> list[list[str]]:
    """The table of four steps, one row each, after a look at the picture."""
    picture = folder / "forecast.png"
    command = [sys.executable, "-m", "examples.fields.forecast", str(folder), "--steps", "4", "--picture", str(picture)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert picture.read_bytes().startswith(b"\x89PNG")
    rows = [line.split() for line in result.stdout.splitlines()[1:5]]
    assert [int(row[0]) for row in rows] == [1, 2, 3, 4]
    return rows


@pytest.mark.usefixtures("one_rank")
def test_a_run_forecasts(folder: Path) -> None:
    assert float(forecast(folder)[0][3]) > 0.5, "after four steps it knows little"


def on_ranks(folder: str, output: str, degrees: list[str]) -> tuple[int, str, str]:
    """Predict on this rank; return the exit code, the output and the error output."""
    printed, said = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(said):
        code = predict([folder, "--steps", "4", "--output", output, *degrees])
    return code, printed.getvalue(), said.getvalue()


@pytest.mark.usefixtures("one_rank")
def test_ranks_forecast_as_one_process_and_each_writes_its_part(folder: Path, pool: WorkerPool, tmp_path: Path) -> None:
    outputs = {}
    squares = ["--degrees", "2", "2"]
    for ranks, ending, degrees in ((1, "zarr", []), (2, "zarr", []), (4, "zarr", squares), (4, "nc", squares)):
        file = tmp_path / f"{ranks}.{ending}"
        (code, printed, _), *others = pool.run(ranks, on_ranks, str(folder), str(file), degrees)
        assert code == 0
        assert all(other == (0, "", "") for other in others)
        assert printed.splitlines()[-1] == str(file)
        source = FieldSource.open(file)
        outputs[ranks, ending] = printed.splitlines()[:-1], source.read(source.trajectories - 1, slice(None))
    table, fields = outputs[1, "zarr"]
    assert len(table) == 5
    assert fields.shape[0] == 5
    for lines, other in outputs.values():
        assert lines == table
        np.testing.assert_allclose(other, fields, rtol=1e-4, atol=1e-5)
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["1.zarr", "2.zarr", "4.nc", "4.zarr"]
    for code, _, said in pool.run(2, on_ranks, str(folder), str(tmp_path / "2.zarr"), []):
        assert code == 2
        assert said.count("\n") <= 1


def test_points_are_forecast_on_ranks_and_drawn(pool: WorkerPool, tmp_path: Path) -> None:
    path = write_drifting_points(tmp_path / "points.zarr", points=60, trajectories=16)
    run, preset = tmp_path / "run", ["--job.config_file", str(FOLDER / "points.toml")]
    steps = pool.run(2, run_main, str(run), path, [*preset, DOMAIN, "2", ROWS, "47,13"])[0]
    assert steps[-1]["tokens_seen"] == STEPS * 8 * 60
    table = [row[1:3] for row in forecast(run)]  # with a picture
    (code, printed, _), _ = pool.run(2, on_ranks, str(run), str(tmp_path / "predicted.zarr"), [])
    assert code == 0
    assert [line.split()[1:3] for line in printed.splitlines()[1:5]] == table
    predicted, true = (FieldSource.open(tmp_path / name) for name in ("predicted.zarr", "points.zarr"))
    assert predicted.array.shape == (2, 5, 7, 60, 1)
    np.testing.assert_allclose(predicted.array[:, :, 3:], true.array[-2:, :5, 3:], atol=1e-6)  # places stay


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "code", "message"), [("1", 0, "most of it"), ("2", 2, "depends on values, which")])
def test_an_estimate_of_points_is_of_one_rank(tmp_path: Path, ranks: str, code: int, message: str) -> None:
    path = write_drifting_points(tmp_path / "points.zarr", trajectories=16)
    command = [sys.executable, "-m", "trainer", "estimate", str(FOLDER / "points.toml"), "--world-size", ranks]
    command += [f"--training.dataset_path={path}", DOMAIN, ranks]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == code
    assert message in result.stdout + result.stderr


@pytest.mark.slow
def test_it_learns_and_forecasts(pool: WorkerPool, path: str, tmp_path: Path) -> None:
    arguments = ["--job.config_file", str(FOLDER / "unet.toml"), "--training.steps=60", "--model.flavor=debugmodel"]
    steps = pool.run(2, run_main, str(tmp_path), path, [*arguments, *LAYOUTS["2 uneven"][1]])[0]
    assert steps[-1]["loss"] < steps[0]["loss"] / 4
    assert float(forecast(tmp_path)[0][3]) < 0.5, "the model is better than persistence on fields that it has not seen"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps 0 must be at least 1"),
        (["--degrees", "1", "2"], "--degrees 1 2: their product must be the number of ranks, 1"),
        (["--picture", "a.pdf"], "must end in .png or .svg"),
        ([], "holds no run"),
    ],
)
def test_a_wrong_forecast_is_refused_in_one_sentence(arguments: list[str], message: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "examples.fields.forecast", str(tmp_path), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_text_command_refuses_a_run_on_fields(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('job.imports = ["examples.fields"]\ntraining.dataset = "fields"\n')
    command = [sys.executable, "-m", "trainer", "generate", str(tmp_path), "--allow-imports"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert (
        "learned from fields, and `lct generate` is not for them; use `python -m examples.fields.forecast"
        in result.stderr
    )
