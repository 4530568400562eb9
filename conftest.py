"""What all tests share: the choice of device, and one pool of worker processes for everything distributed."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.about import guards_of
from tests.distributed.pool import WorkerPool
from tests.wide import is_wide

settings.register_profile("quick", max_examples=60, deadline=None)
settings.register_profile("whole", max_examples=300, deadline=None)
REPOSITORY = Path(__file__).parent / "tests" / "repository"


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
