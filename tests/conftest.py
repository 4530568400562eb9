"""What all tests share: the choice of device, and one pool of worker processes for everything distributed."""

from collections.abc import Iterator

import pytest

from tests.distributed.pool import WorkerPool


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device", choices=("cpu", "cuda"), default="cpu", help="where distributed tests run: gloo or NCCL"
    )


@pytest.fixture(scope="session")
def pool(request: pytest.FixtureRequest) -> Iterator[WorkerPool]:
    """Worker processes, started when a test first asks for them."""
    with WorkerPool(request.config.getoption("--device")) as workers:
        yield workers
