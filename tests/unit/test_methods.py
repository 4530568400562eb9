"""Laws of the records of context-parallel methods: nothing else branches on a method's name."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from longshard.context.planning.methods import METHODS
from tests.program import files_of_program

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = [str(path.relative_to(ROOT)) for path in files_of_program()]
# Settings may say of themselves which value of another setting they need.
KNOW_NAMES = ("longshard/context/planning/methods.py", "trainer/config/")


def branches(tree: ast.AST) -> Iterator[ast.AST]:
    """Comparisons with a method's name, matches on it, and tables by it."""
    for node in ast.walk(tree):
        parts: list[ast.AST | None] = []
        if isinstance(node, ast.Compare):
            parts = [node.left, *node.comparators]
        elif isinstance(node, ast.Dict):
            parts = [*node.keys]
        elif isinstance(node, ast.MatchValue):
            parts = [node.value]
        names = {x.value for part in parts if part for x in ast.walk(part) if isinstance(x, ast.Constant)}
        if names & METHODS.keys():
            yield node


def test_nothing_branches_on_the_name_of_a_method() -> None:
    places = [
        f"{path}:{node.lineno}"
        for path in PROGRAM
        if not path.startswith(KNOW_NAMES)
        for node in branches(ast.parse((ROOT / path).read_text()))
    ]
    assert places == []


@pytest.mark.parametrize(
    "text",
    [
        'x = method == "ring"',
        'x = method in ("all_to_all", "hybrid")',
        'x = {"all_gather": 1}[method]',
        'match method:\n    case "ring":\n        pass',
    ],
)
def test_the_test_sees_a_branch(text: str) -> None:
    assert [*branches(ast.parse(text))]


@pytest.mark.parametrize("degree", [1, 2, 4, 6])
def test_a_method_divides_heads_among_as_many_ranks_as_it_says(degree: int) -> None:
    for method in METHODS.values():
        for hybrid in method.ways(degree, heads=12):
            heads = method.head_degree(degree, hybrid)
            assert degree % heads == 12 % heads == 0
            assert (hybrid is not None) == method.two_level
            assert (heads > 1) == (method.divides_heads and degree > 1)
