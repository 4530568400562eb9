"""Laws of tests/about.py: a quick test guards each file of the program, and a file gets the tests that are about it."""

import pytest

from tests.about import ROOT, guards_of, subjects
from tests.program import files_of_program

PROGRAM = [str(file.relative_to(ROOT)) for file in files_of_program() if file.name not in ("__init__.py", "train.py")]
NOT_QUICK = ("tests/repository/", "tests/fake_cuda/")


@pytest.mark.parametrize("file", PROGRAM)
def test_a_quick_test_guards_each_file(file: str) -> None:
    assert [test for test in guards_of([file]) if not test.startswith(NOT_QUICK)]


def test_tests_of_a_file_are_those_that_import_it_name_it_or_see_its_mistakes() -> None:
    chat_tests = ["tests/unit/test_chat_command.py", "tests/unit/test_conversation.py"]
    assert guards_of(["lct_inference/chat.py"]) == chat_tests  # one is named by its marker
    assert "tests/unit/test_merging.py" in guards_of(["longshard/context/execution/merging.py"])
    window_tests = guards_of(["longshard/domain/windows.py"])
    assert window_tests == [test for test in window_tests if test.startswith("tests/distributed/test_domain")]
    family = "tests/distributed/test_domain_tensor.py::test_functions_equal_those_of_a_whole_tensor[space-3-1]"
    assert family in window_tests  # a mutant names it


def test_unit_tests_are_first_and_a_module_is_not_named_twice() -> None:
    tests = guards_of(["trainer/models/moe.py", "trainer/parallel"])
    kinds = [test.split("/")[1] for test in tests if test.startswith("tests/")]
    changes = [kind for kind, before in zip(kinds, ["", *kinds], strict=False) if kind != before]
    assert changes[:2] == ["unit", "distributed"]
    assert len(changes) == len(set(changes))
    whole = {test for test in tests if "::" not in test}
    assert whole.isdisjoint(test.partition("::")[0] for test in tests if "::" in test)


def test_a_test_file_guards_itself_and_a_shared_one_is_guarded_by_those_that_import_it() -> None:
    assert guards_of(["tests/unit/test_about.py"]) == ["tests/unit/test_about.py"]
    assert guards_of(["tests/about.py"]) == ["tests/unit/test_about.py"]
    assert guards_of(["scripts/warm_pytest.py"]) == ["tests/repository/test_warm_pytest.py"]
    assert "tests/repository/test_mutants.py" in guards_of(["scripts/mutants.py"])


@pytest.mark.parametrize("path", ["trainer/no_file.py", "trainer/families/sizes.toml"])
def test_a_path_without_tests_is_one_sentence(path: str) -> None:
    with pytest.raises(ValueError, match=path) as error:
        guards_of([path])
    assert "\n" not in str(error.value)


def test_a_name_in_a_marker_that_does_not_exist_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.about.marked_paths", lambda _tree: ["trainer/no_file.py"])
    with pytest.raises(ValueError, match=r"trainer/no_file\.py does not exist"):
        subjects.__wrapped__()


def test_a_test_file_has_at_most_400_lines_or_is_a_table() -> None:
    long = {}
    for path in (ROOT / "tests").rglob("*.py"):
        lines = path.read_text(encoding="utf-8").splitlines()
        if len(lines) > 400 and "table" not in lines[0].lower():
            long[str(path.relative_to(ROOT))] = len(lines)
    assert long == {}
