"""Which quick tests guard a file: what `make test-of FILE=...` and `pytest --about FILE ...` run.

A test is about a file of the program when one of these holds:

* its module imports the file, by name;
* `tests/mutants` plants a mistake in the file, which the test must see;
* its module says so, where the test reaches the file through ranks, a command or another file:
  `pytestmark = pytest.mark.about("lct_inference/chat.py", "lct_planner")`, with paths of files and folders.

A test module guards itself, `scripts/NAME.py` is guarded by a `test_NAME.py`, and a module that tests share by the
tests that import it. Of many modules those are chosen that are about the fewest other files.
"""

import ast
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from tests.mutants import MUTANTS

ROOT = Path(__file__).resolve().parents[1]
_FOLDERS = ("longshard", "trainer", "lct_inference", "lct_planner", "lct_tools", "tests", "examples", "scripts")
_MOST_MODULES = 6
_ORDER = ("tests/unit/", "examples/", "tests/distributed/", "tests/integration/", "tests/repository/")


def guards_of(paths: Iterable[str]) -> list[str]:
    """Return the tests that guard some files: unit tests first, then tests on ranks.

    Args:
        paths: files and folders, relative to the repository.

    Raises:
        ValueError: a path does not exist, or no test guards it.
    """
    chosen: set[str] = set()
    for path in paths:
        files = files_of(path)
        tests = {test for file in files for test in _guards_of_file(file)}
        if not tests:
            raise ValueError(
                f"No test is about {path}. Name it in pytest.mark.about of a test module (tests/about.py)."
            )
        chosen |= tests
    modules = {test for test in chosen if "::" not in test}
    single = {test for test in chosen - modules if test.partition("::")[0] not in modules}
    return sorted(modules | single, key=_place)


def files_of(path: str) -> list[str]:
    """Return the path of a file, or the paths of all Python files in a folder.

    Raises:
        ValueError: the path does not exist.
    """
    whole = ROOT / path
    if whole.is_dir():
        return sorted(str(file.relative_to(ROOT)) for file in whole.rglob("*.py"))
    if not whole.exists():
        raise ValueError(f"{path} does not exist. Name a file or a folder relative to {ROOT}.")
    return [str(whole.resolve().relative_to(ROOT))]


@cache
def subjects() -> dict[str, frozenset[str]]:
    """Return the files that each test module is about: its imports, the files in its markers, and itself."""
    modules = {_module(file): file for folder in _FOLDERS for file in files_of(folder)}
    scripts = {f"test_{Path(file).name}": file for file in modules.values() if file.startswith("scripts/")}
    files_of_tests = {}
    for test in modules.values():
        name = Path(test).name
        if not name.startswith("test_"):
            continue
        tree = ast.parse((ROOT / test).read_text(encoding="utf-8"))
        imported = {modules[module] for module in _imports(tree, modules) if module in modules}
        package_files = {file for file in imported if file.endswith("__init__.py")}
        marked = {file for path in marked_paths(tree) for file in files_of(path)}
        files_of_tests[test] = frozenset({test, scripts.get(name, test)} | (imported - package_files) | marked)
    return files_of_tests


def marked_paths(tree: ast.AST) -> list[str]:
    """Return the paths in the `about` markers of a test module."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    return [ast.literal_eval(path) for call in calls if call.func.attr == "about" for path in call.args]


def _guards_of_file(file: str) -> list[str]:
    planted = {test for mutant in MUTANTS if mutant.file == file for test in mutant.tests.split()}
    single = [test for test in planted if "::" in test]
    modules = {test for test in planted if "::" not in test}
    modules |= {test for test, about in subjects().items() if file in about}
    if file in modules:
        return [file]
    name = Path(file).stem
    other_name = {test: name not in Path(test).stem for test in modules}
    first = sorted(modules, key=lambda test: (other_name[test], len(subjects()[test]), test))
    return [*single, *first[:_MOST_MODULES]]


def _imports(tree: ast.AST, modules: Mapping[str, str]) -> set[str]:
    targets = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            targets |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            wholes = {f"{node.module}.{alias.name}" for alias in node.names}
            targets |= {whole if whole in modules else node.module for whole in wholes}
    return targets


def _module(file: str) -> str:
    return ".".join(Path(file).with_suffix("").parts).removesuffix(".__init__")


def _place(test: str) -> tuple[int, str]:
    return next((n for n, folder in enumerate(_ORDER) if test.startswith(folder)), len(_ORDER)), test
