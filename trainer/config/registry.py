"""Choices by name, to which a package of the user's own can add (`trainer/extensions.py`). Torch-free.

State of the process: The values of keys that packages of `job.imports` registered. They are found by name; for ever.
"""

from collections.abc import Iterable, Mapping
from dataclasses import field, make_dataclass
from functools import cache
from typing import TypeVar

from trainer.config.errors import ConfigError, did_you_mean

T = TypeVar("T")


class Registry(dict[str, T]):
    """Choices of one kind, by name.

    Args:
        kind: The kind in words, such as 'data set'.
        known: The first choices.
    """

    def __init__(self, kind: str, known: Mapping[str, T] | None = None) -> None:
        super().__init__(known or {})
        self._kind = kind

    def add(self, name: str, choice: T) -> None:
        """Add a choice.

        Args:
            name: Its name.
            choice: The choice.

        Raises:
            ConfigError: Another choice has this name.
        """
        if self.setdefault(name, choice) is not choice:
            raise ConfigError(
                f"a {self._kind} named {name!r} exists already; register yours under another name"
            )

    def find(self, key: str, name: str) -> T:
        """Return the choice with a name.

        Args:
            key: The key of the configuration, for the message.
            name: The value of the key.

        Raises:
            ConfigError: There is none.
        """
        if name not in self:
            raise ConfigError(
                f"{key} = {name!r} is not a known {self._kind}{did_you_mean(name, self)}"
            )
        return self[name]


OPTIMIZERS: Registry[str] = Registry("optimizer")
"""Optimizers that packages add, by the place of the function that builds them; see `register_optimizer`."""
TABLES: Registry[type] = Registry("table")
"""Tables of the configuration that packages add, as dataclasses like the tables of `schema.py`."""
CHOICES: dict[str, list[str]] = {}
"""Values that packages have added to a key, such as other optimizers of "optimizer.name"."""
TASK_OF_DATASET: Registry[str] = Registry("data set")
"""The task of each data set that holds no tokens, by the value of training.dataset."""


def with_tables(schema: type, imports: Iterable[str]) -> type:
    """Return the schema with the tables that the packages in `imports` have added.

    Args:
        schema: The class of the configuration.
        imports: Names of imported packages.
    """
    packages = {name.partition(".")[0] for name in imports}
    added = {
        name: kind
        for name, kind in TABLES.items()
        if kind.__module__.partition(".")[0] in packages
    }
    return _extended(schema, tuple(added.items()))


@cache
def _extended(schema: type, tables: tuple[tuple[str, type], ...]) -> type:
    if not tables:
        return schema
    fields = [(name, kind, field(default_factory=kind)) for name, kind in tables]
    return make_dataclass(
        schema.__name__,
        fields,
        bases=(schema,),
        frozen=True,
        namespace={"__doc__": schema.__doc__},
    )
