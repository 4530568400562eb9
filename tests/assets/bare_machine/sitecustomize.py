"""Hide every installed package that PyTorch, NumPy and Triton do not need, as on a machine that has nothing else.

Python imports this module at its start where this folder is on PYTHONPATH, also in the processes that it starts.
"""

import re
import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import PackageNotFoundError, packages_distributions, requires


def _needed(*roots: str) -> set[str]:
    """Return the names of packages and of all that they need, without extras."""
    required: set[str] = set()
    names = [*roots]
    while names:
        name = re.sub(r"[-_.]+", "-", names.pop()).lower()
        if name not in required:
            try:
                needs = requires(name) or []
            except PackageNotFoundError:
                continue
            required.add(name)
            names += [re.match(r"[\w.-]+", need)[0] for need in needs if "extra ==" not in need]
    return required


_KEPT = _needed("torch", "numpy", "triton")
_HIDDEN = {
    module
    for module, packages in packages_distributions().items()
    if not {re.sub(r"[-_.]+", "-", package).lower() for package in packages} & _KEPT
}


class _Bare(PathFinder):
    @classmethod
    def find_spec(cls, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        spec = super().find_spec(name, path, target)
        installed = spec is not None and "site-packages" in str(spec.origin or spec.submodule_search_locations)
        return None if installed and name.partition(".")[0] in _HIDDEN else spec


sys.meta_path[:] = [_Bare if finder is PathFinder else finder for finder in sys.meta_path]
