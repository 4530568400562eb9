"""Law: the program replaces no name of its own. What the planner replaces of PyTorch stands in one list."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.program import files_of_program

pytestmark = pytest.mark.about("lct_planner")
ROOT = Path(__file__).resolve().parents[2]
OF_PYTORCH = {
    *("torch.Generator", "torch.Stream", "torch.Tensor.pin_memory", "torch.UntypedStorage.resize_"),
    *("torch.accelerator.current_stream", "torch.cuda.name", "torch.version.cuda"),
    "torch._subclasses.fake_tensor.init_gpu_context",
    "torch.distributed.pipelining.schedules._PipelineSchedule._warmup_p2p",
    "torch.distributed.tensor._sharding_prop.ShardingPropagator._propagate_tensor_meta_non_cached",
    *("torch.nn.functional.rms_norm", "torch.nn.functional.scaled_dot_product_attention"),
}


def imported(tree: ast.Module) -> dict[str, str]:
    """Names that a module imports, anywhere -> where they are from."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {
                a.asname or a.name.split(".")[0]: a.name if a.asname else a.name.split(".")[0] for a in node.names
            }
        elif isinstance(node, ast.ImportFrom):
            names |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return names


def replaced(text: str) -> Iterator[str]:
    """Yield names that a module replaces: by `mock`, by `setattr`, or as attributes of imports from this program."""
    tree = ast.parse(text)
    names = imported(tree)

    def whole(node: ast.expr) -> str:
        first, _, attribute = ast.unparse(node).partition(".")
        return f"{names.get(first, first)}.{attribute}".rstrip(".")

    for node in ast.walk(tree):
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
            replaced_names = [whole(target) for target in targets if isinstance(target, ast.Attribute)]
            yield from (name for name in replaced_names if name.startswith(("trainer.", "longshard.", "lct_planner.")))
        elif isinstance(node, ast.Call):
            called = whole(node.func)
            if called == "unittest.mock.patch.object" or (called == "setattr" and ast.unparse(node.args[0]) in names):
                owner, name, *_ = node.args
                yield f"{whole(owner)}.{name.value if isinstance(name, ast.Constant) else ast.unparse(name)}"
            elif called.startswith("unittest.mock"):
                yield ast.unparse(node)


def test_the_program_replaces_names_of_pytorch_alone() -> None:
    files = files_of_program()
    assert {name for path in files for name in replaced(path.read_text())} == OF_PYTORCH


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (
            "from unittest import mock\nimport trainer.trainer as loop\nmock.patch.object(loop, 'Stop', 1)",
            "trainer.trainer.Stop",
        ),
        ("from unittest import mock\nmock.patch('trainer.trainer.Stop')", "mock.patch('trainer.trainer.Stop')"),
        ("from unittest.mock import patch\npatch.object(A, 'b')", "A.b"),
        ("from trainer.runtime import stop\nstop.Stop = 1", "trainer.runtime.stop.Stop"),
        ("def f():\n    from trainer import trainer\n    setattr(trainer, 'a', 1)", "trainer.trainer.a"),
    ],
)
def test_the_test_sees_a_name_that_is_replaced(text: str, name: str) -> None:
    assert [*replaced(text)] == [name]
