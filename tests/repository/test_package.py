"""The built wheel in an empty environment, from another folder: its commands train, check and generate."""

import json
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

import trainer
from tests.repository.documented.clone import installed_packages
from trainer.commands.main import COMMANDS
from trainer.config.toml import tomllib

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    ignored = shutil.ignore_patterns(".git", ".venv", "outputs", "build", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, source, ignore=ignored)
    build = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), "."]
    subprocess.run([sys.executable, *build], cwd=source, check=True, timeout=120)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def lct(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command in an environment with this wheel alone, and with the dependencies of the tests' environment."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    packages = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    target = ["--prefix", str(folder), "--no-deps", "--quiet", "--no-warn-script-location", "--ignore-installed"]
    subprocess.run([sys.executable, "-m", "pip", "install", *target, str(wheel)], check=True, timeout=120)
    script = folder / "bin" / "lct"
    script.write_text(re.sub(r"\A#!.*", f"#!{python}", script.read_text()))
    Path(packages, "dependencies.pth").write_text("\n".join(installed_packages()) + "\n")
    return script


def run(lct: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess:
    known = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "PYTHONPATH", "NGPU", "CONFIG_FILE", "LOG_RANK")
    variables = {key: value for key, value in os.environ.items() if key not in known} | {"CUDA_VISIBLE_DEVICES": ""}
    command = [str(lct), *arguments]
    return subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, check=False, timeout=180)


def test_the_wheel_has_the_package_the_presets_and_the_licence(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    version = f"long_context_trainer-{trainer.__version__}.dist-info"
    assert f"{version}/licenses/LICENSE" in names
    assert {f"train_configs/{path.name}" for path in (ROOT / "train_configs").glob("*.toml")} <= {*names}
    assert "trainer/assets/python_4k.tiktoken" in names
    tops = {name.split("/")[0] for name in names}
    assert tops == {"lct_inference", "lct_planner", "lct_tools", "longshard", "trainer", "train_configs", version}
    pinned = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert pinned["scripts"] == {"lct": "trainer.commands.main:main"}


def test_the_library_of_the_wheel_runs_alone(wheel: Path, tmp_path: Path) -> None:
    """The program of docs/library.md on two ranks, where nothing of the wheel but `longshard` can be imported."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path, [name for name in archive.namelist() if name.startswith("longshard/")])
    alone = "import sys\nsys.modules['trainer'] = None  # an import of it fails\n"
    checked = "\nimport longshard\nassert longshard.__file__.startswith(sys.path[0])\n"
    (tmp_path / "my_model.py").write_text(alone + (ROOT / "examples" / "own_module.py").read_text() + checked)
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "my_model.py"]
    ended = subprocess.run(
        [sys.executable, *command], cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "gradients over 2 ranks equal the gradients of one process\n"


def test_it_trains_and_writes_from_another_folder(lct: Path, tmp_path: Path) -> None:
    """Where the user stands, a folder `trainer` of another program is in the way."""
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "__init__.py").write_text("raise SystemExit('another program')")
    (tmp_path / "mine.toml").write_text(
        'base = "debug_model.toml"\n[training]\nsteps = 2\nseq_len = 64\nglobal_batch_size = 4\n'
        "[checkpoint]\nenable = true\n"
    )
    trained = run(lct, "train", "mine.toml", "--ngpu", "2", "--job.dump_folder", "out", cwd=tmp_path)
    assert trained.returncode == 0, (trained.stdout, trained.stderr)
    steps = [json.loads(line)["step"] for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2]
    assert f"next         {lct} generate out --prompt" in trained.stdout
    written = run(lct, "generate", "out", "--prompt", "def f(", "--tokens", "5", "--temperature", "0", cwd=tmp_path)
    assert written.returncode == 0, written.stderr
    assert written.stdout.startswith("def f(")
    assert len(written.stdout) > len("def f(\n")


def test_it_answers_without_work(lct: Path, tmp_path: Path) -> None:
    assert run(lct, "--version", cwd=tmp_path).stdout == f"lct {trainer.__version__}\n"
    usage = run(lct, cwd=tmp_path)
    assert usage.returncode == 0
    assert all(f"  {name} " in usage.stdout for name in COMMANDS)
    wrong = run(lct, "trian", cwd=tmp_path)
    assert (wrong.returncode, wrong.stderr) == (2, "error: 'trian' is not a command of lct; did you mean 'train'?\n")
    checked = run(lct, "check", "--world-size", "4", "--job.dump_folder", "out", cwd=tmp_path)
    assert checked.returncode == 0, checked.stderr
    assert "the settings are valid" in checked.stdout
    nothing = run(lct, "generate", "nowhere", cwd=tmp_path)
    assert (nothing.returncode, len(nothing.stderr.splitlines())) == (2, 1)
    assert nothing.stderr.startswith("error: nowhere holds no run")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(lct: Path, tmp_path: Path, name: str) -> None:
    shown = run(lct, name, "--help", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert len(shown.stdout.splitlines()) > 5
