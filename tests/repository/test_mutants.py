"""The table of planted mistakes fits the code: each is one that can be made, and names tests that are there."""

import ast
from pathlib import Path

import pytest

from tests.mutants import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]


def test_there_are_enough_and_names_are_unique() -> None:
    assert len(MUTANTS) >= 60
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("mutant", [pytest.param(mutant, id=mutant.name) for mutant in MUTANTS])
def test_a_mutant_can_be_planted_and_is_python(mutant: Mutant) -> None:
    text = (ROOT / mutant.file).read_text(encoding="utf-8")
    changed = mutant.planted_in(text)
    assert changed != text
    ast.parse(changed)
    for test in mutant.tests.split():
        path, _, name = test.partition("::")
        assert (ROOT / path).exists(), path
        assert not name or f"def {name.partition('[')[0]}(" in (ROOT / path).read_text(encoding="utf-8"), test


def test_line_breaks_and_trailing_commas_are_free_and_words_are_not() -> None:
    mutant = Mutant("a", "a.py", "f(a, [b, c])", "f(b)", "")
    assert mutant.planted_in("x = f(\n    a,\n    [b, c],\n)\n") == "x = f(b)\n"
    for text in ("f(a, [b, d])", "f(a, [b, c]) + f(a, [b, c])", "f(a, b, [c])"):
        with pytest.raises(ValueError, match=r"stands [02] times"):
            mutant.planted_in(text)
