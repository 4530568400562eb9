"""Public names of the packages: importable by themselves, in any order, and torch-free where their modules are."""

import importlib
import pkgutil
import subprocess
import sys

import pytest

pytestmark = pytest.mark.about("longshard/lazy.py")

PACKAGES = (
    "trainer.config",
    "trainer.data",
    "trainer.parallel",
    "longshard",
    "longshard.domain",
    "trainer.models",
)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_there_and_is_no_module(package: str) -> None:
    """If a module had the same name, the name would be the function or the module, depending on earlier imports."""
    module = importlib.import_module(package)
    modules = {info.name for info in pkgutil.iter_modules(module.__path__)}
    assert module.__all__
    assert not modules & set(module.__all__)
    assert set(module.__all__) <= set(dir(module))
    for name in module.__all__:
        assert not isinstance(getattr(module, name), type(sys)), name
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        module.nonsense  # noqa: B018


def test_torch_free_names_do_not_import_torch() -> None:
    code = (
        "import sys\n"
        "from trainer.config import JobConfig, parse_command_line\n"
        "from longshard import AxisLayout, head_tail\n"
        "from longshard import ContextParallelOptions, Mask, causal, documents, make_plan\n"
        "from trainer.families.registry import flavor_args\n"
        "assert 'torch' not in sys.modules\n"
        "from longshard import context_parallel, region\n"
        "assert callable(context_parallel) and callable(region)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
