"""What all tests share: this tree for every process, the choice of device, and one pool of ranks."""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before anything of this project is imported. Hundreds of processes import the same modules, so their bytecode is kept,
# even where the shell says not to. They all import the modules of this clone, whatever is installed.
ROOT = Path(__file__).parent
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
if os.environ.get("PYTHONPATH", "").split(os.pathsep)[0] != str(ROOT):
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))

import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

import trainer  # noqa: E402
from tests.about import guards_of  # noqa: E402
from tests.distributed.pool import WorkerPool  # noqa: E402
from tests.wide import is_wide  # noqa: E402

settings.register_profile("quick", max_examples=60, deadline=None)
settings.register_profile("whole", max_examples=300, deadline=None)
REPOSITORY = ROOT / "tests" / "repository"


def pytest_report_header() -> str:
    """Name the tree that is tested."""
    if Path(trainer.__file__).parents[1] != ROOT:
        raise pytest.UsageError(f"{trainer.__file__} is not of {ROOT}: run the tests from there, with its own .venv")
    return f"tree: {ROOT}"


def pytest_pycollect_makeitem(obj: object) -> list[pytest.Item] | None:
    """Collect tests with the mark `gpu` only where there is a GPU."""
    needs_gpu = any(mark.name == "gpu" for mark in getattr(obj, "pytestmark", ()))
    return [] if needs_gpu and not torch.cuda.is_available() else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if REPOSITORY in item.path.parents:
            item.add_marker("check")
        if is_wide(item.nodeid):
            item.add_marker("wide")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="where ranks compute: gloo or NCCL; ranks as threads on one GPU",
    )
    parser.addoption(
        "--about",
        nargs="+",
        metavar="FILE",
        help="run what guards these files or folders, instead of the tests that are named (tests/about.py)",
    )
    parser.addoption("--cold", action="store_true", help="start every program of documented commands as a user does")
    parser.addoption("--record-support", action="store_true", help="make docs/support_matrix.md of what is tested now")


def pytest_configure(config: pytest.Config) -> None:
    if about := config.getoption("--about"):
        try:
            config.args[:] = guards_of(about)
        except ValueError as error:
            raise pytest.UsageError(str(error)) from error
    settings.load_profile("quick" if "not slow" in config.option.markexpr else "whole")
    # Token files are made in a cache of this session: ranks and commands inherit the variable.
    if not hasattr(config, "workerinput"):  # of pytest-xdist, whose workers share that of their parent
        os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="lct-cache-")
        config.add_cleanup(lambda: shutil.rmtree(os.environ["XDG_CACHE_HOME"], ignore_errors=True))


@pytest.fixture(scope="session")
def pool(request: pytest.FixtureRequest) -> Iterator[WorkerPool]:
    """Worker processes, started when a test first asks for them; idle ones take two hundredths of a core."""
    with WorkerPool(request.config.getoption("--device")) as workers:
        yield workers
