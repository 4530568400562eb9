"""Choices by name, to which a package of the user's own can add (`trainer/extensions.py`). Torch-free."""

from collections.abc import Iterable, Mapping
from dataclasses import field, make_dataclass
from functools import cache
from typing import TypeVar

from trainer.config.errors import ConfigError, did_you_mean

T = TypeVar("T")


class Registry(dict[str, T]):
    """Choices of one kind, such as 'data set', by name."""

    def __init__(self, kind: str, known: Mapping[str, T] | None = None) -> None:
        super().__init__(known or {})
        self._kind = kind

    def add(self, name: str, choice: T) -> None:
        """Add a choice; ConfigError if another one has this name."""
        if self.setdefault(name, choice) is not choice:
            raise ConfigError(
                f"a {self._kind} named {name!r} exists already; register yours under another name"
            )

    def find(self, key: str, name: str) -> T:
        """Return the choice that the value `name` of a key stands for; ConfigError if there is none."""
        if name not in self:
            raise ConfigError(
                f"{key} = {name!r} is not a known {self._kind}{did_you_mean(name, self)}"
            )
        return self[name]


OPTIMIZERS: Registry[str] = Registry("optimizer")
"""Optimizers that packages add, by the place of the function that builds them; see `register_optimizer`."""
TABLES: Registry[type] = Registry("table")
"""Tables of the configuration that packages add, as dataclasses like those of `schema.py`."""
CHOICES: dict[str, list[str]] = {}
"""Key -> the values that packages have added to those of its type, such as other optimizers of "optimizer.name"."""
TASK_OF_DATASET: Registry[str] = Registry("data set")
"""training.dataset -> the task that it is for, of data sets that hold no tokens."""


def with_tables(schema: type, imports: Iterable[str]) -> type:
    """Return the schema with the tables that these packages have added."""
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
