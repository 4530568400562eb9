"""Law: a module with state that outlives a call says so in its docstring, after "State of the process:"."""

import ast
from collections.abc import Iterator

import pytest

from tests.program import files_of_program

MARK = "State of the process: "
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
        "activate_flash_attention_impl",
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


def test_each_module_with_state_says_so_and_no_other_does() -> None:
    for path in files_of_program():
        tree = ast.parse(path.read_text())
        is_told = MARK in (ast.get_docstring(tree) or "")
        assert is_told == bool([*state(tree)]), f"{path}: {[*state(tree)] or 'no state'}"


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
