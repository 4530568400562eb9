"""Look up places of a package's code, "package.module:name", without importing them. Torch-free.

A package names code that needs PyTorch by its place, and ranks import it. A wrong name is found before ranks start.
"""

import sys
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from symtable import symtable

from trainer.config.errors import ConfigError, did_you_mean


def check_place(argument: str, place: str) -> None:
    """Check that a place names a module that exists, and a name that the module defines.

    The name is not checked if only an import of the module can tell.

    Args:
        argument: The argument with the place, for the message.
        place: "package.module:name".

    Raises:
        ConfigError: The form is wrong, or there is no such module or name.
    """
    module, _, name = place.partition(":")
    if not (is_module_name(module) and name):
        raise ConfigError(f"{argument} = {place!r} must have the form 'package.module:name'")
    if module in sys.modules and not _source_of(sys.modules[module].__spec__):
        return
    spec = _spec_of(module)
    if spec is None:
        raise ConfigError(
            f"{argument} = {place!r}: there is no module {module!r}; name one that is installed, or lies below the "
            "folder where the command runs"
        )
    names = _names_of(spec)
    first = name.partition(".")[0]
    if names is not None and first not in names:
        raise ConfigError(
            f"{argument} = {place!r}: module {module!r} has no {first!r}{did_you_mean(first, names)}"
        )


def is_module_name(text: str) -> bool:
    """Return whether a text has the form of a module's name, such as "package.module".

    Args:
        text: The text.
    """
    return all(part.isidentifier() for part in text.split("."))


def _spec_of(module: str) -> ModuleSpec | None:
    """Return the spec of a module without importing its packages; None if there is no such module."""
    full_name, *parts = module.split(".")
    spec = find_spec(full_name)
    for part in parts:
        if spec is None:
            return None
        full_name = f"{full_name}.{part}"
        spec = PathFinder.find_spec(full_name, spec.submodule_search_locations or [])
    return spec


def _source_of(spec: ModuleSpec | None) -> str | None:
    is_source = spec is not None and isinstance(spec.loader, SourceFileLoader)
    return spec.origin if is_source else None


def _names_of(spec: ModuleSpec) -> set[str] | None:
    """Return the names that a module defines or imports at its top; None if only an import can tell."""
    source = _source_of(spec)
    if source is None:
        return None
    try:
        text = Path(source).read_bytes()
        symbols = symtable(text, source, "exec").get_symbols()
    except (OSError, SyntaxError, ValueError):  # the import says it better
        return None
    names = {x.get_name() for x in symbols if x.is_assigned() or x.is_imported()}
    return None if "__getattr__" in names or b"import *" in text else names
