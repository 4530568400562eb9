"""What tests of the repository share: a copy of it for each process, whose programs start warm."""

import os
import re
import sys
from collections.abc import Iterator
from unittest import mock

import pytest

from tests.repository.documented.clone import Clone
from tests.repository.documented.pages import group

_FILE = "tests/repository/test_{}.py"
LONGEST = (
    *("docs/long_context.md", "docs/planner.md", _FILE.format("proof"), "docs/performance.md", "docs/fine_tuning.md"),
    *("README.md", "train_configs", "examples", _FILE.format("gpu_check")),
)
"""Groups that start first, so that both cores are busy to the end."""


def group_of(case: str) -> str:
    """Return the group of a case. The cases of a group run one after another in one process.

    The group of a documented command is its page, with which the parameters of the case begin.

    Other cases are grouped by file.
    """
    match = re.search(r"\[([\w./-]+): ", case)
    return group(match[1]) if match else case.partition("::")[0]


@pytest.hookimpl(optionalhook=True)  # without pytest-xdist there is one process
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Deal groups to processes, under `--dist loadgroup`.

    pytest-xdist writes groups into the names of cases, and pytest 9.2 does not let it.
    """
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return Groups(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONGEST.index(group_of(item.nodeid)) if group_of(item.nodeid) in LONGEST else 99)


@pytest.fixture(scope="session")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clone]:
    """The copy of the repository in which this process runs commands."""
    with Clone(tmp_path_factory.mktemp("clone")) as made:
        yield made


@pytest.fixture(scope="module")
def warm_programs(clone: Clone) -> Iterator[None]:
    """Let `sys.executable -m trainer ...` run in a child of a process that has imported the program."""
    variables = clone.warm()
    with (
        mock.patch.dict(os.environ, variables),
        mock.patch.object(sys, "executable", str(clone.tree / ".venv" / "bin" / "python")),
    ):
        yield
