"""Law: state that outlives a call stands in one table of docs/architecture.md, module by module."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.program import files_of_program

ROOT = Path(__file__).resolve().parents[2]
_MAKERS = {"WeakKeyDictionary", "WeakSet", "WeakValueDictionary", "Counter", "defaultdict", "count", "ContextVar"}
_MAKERS |= {"Library", "Lock", "local"}
# Calls that change the process, and names whose attributes are the process's when they are set.
_CHANGES = {
    *("signal.signal", "setLevel", "filterwarnings", "simplefilter", "gc.disable", "manual_seed", "set_device"),
    *(
        "use_deterministic_algorithms",
        "faulthandler.register",
        "faulthandler.enable",
        "putenv",
        "setrlimit",
        "activate",
    ),
}
_SETTINGS = (
    "os.environ",
    "torch.backends",
    "torch.compiler.config",
    "settings.cache_key_tag",
    "sys.excepthook",
    "sys.stdout",
)


def state(tree: ast.Module) -> Iterator[str]:
    """Yield the state of a module that outlives a call: mutable values at its top, and changes of the process."""
    for node in tree.body:
        value = getattr(node, "value", None) if isinstance(node, ast.Assign | ast.AnnAssign) else None
        empty = isinstance(value, ast.Dict | ast.List) and not (
            getattr(value, "keys", None) or getattr(value, "elts", None)
        )
        if empty or (isinstance(value, ast.Call) and ast.unparse(value.func).split(".")[-1] in _MAKERS | {"set"}):
            yield ast.unparse(node)
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield ast.unparse(node)
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            seeded = called.endswith("manual_seed") and called != "torch.manual_seed"  # a generator's own
            if not seeded and (called in _CHANGES or called.split(".")[-1] in _CHANGES):
                yield ast.unparse(node)
        elif isinstance(node, ast.Assign | ast.AugAssign):
            for target in getattr(node, "targets", None) or [node.target]:
                if ast.unparse(target).startswith(_SETTINGS):
                    yield ast.unparse(node)


def documented() -> set[str]:
    """The modules of the table."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    table = text.split("## State of a process")[1].split("\n## ")[0]
    return {
        module for row in table.splitlines() if row.startswith("| `") for module in re.findall(r"`([\w/]+\.py)`", row)
    }


def test_the_table_of_state_is_true() -> None:
    state_of_files = {}
    for path in files_of_program():
        if kept := [*state(ast.parse(path.read_text()))]:
            state_of_files[str(path.relative_to(ROOT)).removeprefix("trainer/")] = kept
    assert state_of_files.keys() == documented(), state_of_files


@pytest.mark.parametrize(
    "text",
    [
        *("x = {}", "x: dict[int, int] = {}", "x = WeakSet()", "def f():\n    global x", "os.environ['A'] = 'b'"),
        *("torch.backends.cudnn.benchmark = True", "signal.signal(1, f)", "torch.manual_seed(1)"),
    ],
)
def test_the_scan_sees_state(text: str) -> None:
    assert [*state(ast.parse(text))]


def test_the_scan_leaves_constants_alone() -> None:
    assert not [*state(ast.parse("A = {1: 2}\nB = (1, 2)\nC = frozenset({1})\ng = torch.Generator().manual_seed(1)"))]
