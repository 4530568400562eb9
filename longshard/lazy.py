"""Public names of a package, imported at their first use, so that importing the package stays torch-free."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_exports(
    package: str, modules: Mapping[str, str]
) -> tuple[Callable, Callable, list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` for a package (PEP 562).

    Args:
        package: The full name of the package.
        modules: Name of each module in the package, without a leading dot -> its public names, separated by spaces.
    """
    module_of = {name: module for module, names in modules.items() for name in names.split()}

    def get(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{module_of[name]}"), name)

    return get, lambda: sorted(module_of), list(module_of)
