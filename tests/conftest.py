"""What all tests share: the choice of device, and one pool of worker processes for everything distributed."""

import os
import shutil
import tempfile
from collections.abc import Iterator

import pytest

from tests.distributed.pool import WorkerPool


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="where ranks compute: gloo or NCCL; ranks as threads on one GPU",
    )
    parser.addoption("--record-support", action="store_true", help="make docs/support_matrix.md of what is tested now")


def pytest_configure(config: pytest.Config) -> None:
    """Make token files in a cache of this session: ranks and commands inherit the variable."""
    if not hasattr(config, "workerinput"):  # of pytest-xdist, whose workers share that of their parent
        os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="lct-cache-")
        config.add_cleanup(lambda: shutil.rmtree(os.environ["XDG_CACHE_HOME"], ignore_errors=True))


_POOL = pytest.StashKey[WorkerPool]()


@pytest.fixture(scope="session")
def pool(request: pytest.FixtureRequest) -> Iterator[WorkerPool]:
    """Worker processes, started when a test first asks for them."""
    with WorkerPool(request.config.getoption("--device")) as workers:
        request.config.stash[_POOL] = workers
        yield workers


@pytest.fixture(scope="module", autouse=True)
def idle_ranks_end(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each file: the threads of the last case's groups would take the cores from tests that use no ranks."""
    yield
    if _POOL in request.config.stash:
        request.config.stash[_POOL].stop()
