"""Properties of a key, which its field in the schema has: bounds, unit, and when the key has an effect.

The checks, `--help` and docs/configuration.md are made from them. A new key needs only its field and its use.
"""

import dataclasses
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Any, Literal, get_args, get_type_hints

from trainer.config.registry import CHOICES


@dataclass(frozen=True)
class Bounds:
    """The values that a number may have, as a test and in words."""

    test: Callable[[float], bool]
    words: str


POSITIVE = Bounds(lambda x: 0 < x < math.inf, "above 0")
NOT_NEGATIVE = Bounds(lambda x: 0 <= x < math.inf, "at least 0")
AT_LEAST_ONE = Bounds(lambda x: 1 <= x < math.inf, "at least 1")
STEPS = Bounds(lambda x: 1 <= x <= 10**12, "in [1, 1000000000000]")
SHARE = Bounds(lambda x: 0 <= x <= 1, "in [0, 1]")
DECAY = Bounds(lambda x: 0 <= x < 1, "in [0, 1)")
POSITIVE_OR_OFF = Bounds(lambda x: x > 0, "above 0 (inf: off)")
SECONDS = Bounds(lambda x: 1 <= x <= 10**8, "in [1, 100000000]")


@dataclass(frozen=True)
class Condition:
    """A condition under which a key has an effect.

    A key without effect is refused if the condition has a remedy. Otherwise a line of the log notes it.

    Attributes:
        holds: Whether it holds, from the configuration and the `trainer.job.Degrees`.
        otherwise: The words after "has no effect", with `{0.table.key}` for values of the configuration.
        remedy: What to do instead.
        general: The words for any configuration; by default `otherwise` without values.
    """

    holds: Callable[[Any, Any], bool]
    otherwise: str
    remedy: str = ""
    general: str = ""

    def words(self) -> str:
        """Return when a key has no effect, for any configuration."""
        return self.general or re.sub(r" = \{[^}]*\}", "", self.otherwise)


# Conditions are cached, so that equal ones are one object and keys with the same condition share one line of the log.


@cache
def needs(*switches: str, remedy: str = "") -> Condition:
    """Return the condition that one of these keys is on or has a value.

    Args:
        *switches: Keys.
        remedy: What to do instead.
    """
    otherwise = f"without {' or '.join(switches)}"
    return Condition(
        lambda config, _: any(attrgetter(key)(config) for key in switches), otherwise, remedy
    )


@cache
def needs_value(key: str, *values: object, why: str = "", remedy: str = "") -> Condition:
    """Return the condition that another key has one of these values.

    Args:
        key: The other key.
        *values: Its values.
        why: Words after the value, for the message.
        remedy: What to do instead.
    """
    otherwise = f"with {key} = {{0.{key}!r}}{why}"
    general = f"unless {key} = {' or '.join(map(repr, values))}"
    return Condition(
        lambda config, _: attrgetter(key)(config) in values, otherwise, remedy, general
    )


@cache
def unless(key: str, value: object, why: str = "", remedy: str = "") -> Condition:
    """Return the condition that another key does not have this value.

    Args:
        key: The other key.
        value: Its value.
        why: Words after the value, for the message.
        remedy: What to do instead.
    """
    return Condition(
        lambda config, _: attrgetter(key)(config) != value,
        f"with {key} = {value!r}{why}",
        remedy,
    )


TOKENS = Condition(
    lambda config, _: config.task == "tokens",
    "with training.dataset = {0.training.dataset!r}, which has no tokens",
    general="with data that are no tokens",
)


@dataclass(frozen=True)
class Key:
    """Everything about a key except its text, which is the docstring below its field.

    Attributes:
        declared: The type of its field.
        default: The default value.
        bounds: The values that a number may have.
        unit: The unit, in words.
        example: A valid value, if the default is None.
        when: Conditions that must all hold.
        named: Whether it is a list of name=value, which a file may write as a table.
        name: "table.key", by which packages add values.
    """

    declared: Any
    default: object
    bounds: Bounds | None = None
    unit: str = ""
    example: object = None
    when: tuple[Condition, ...] = ()
    named: bool = False
    name: str = ""

    @property
    def kind(self) -> Any:
        """The type of its values, with those that packages have added."""
        added = CHOICES.get(self.name)
        return Literal[(*get_args(self.declared), *added)] if added else self.declared

    @property
    def works(self) -> object:
        """A value that works, for messages: the default, or the example if the default is None."""
        return self.example if self.default is None else self.default

    @property
    def may_be_infinite(self) -> bool:
        """Whether a float of this key may be `inf`, by its bounds."""
        return self.bounds is not None and self.bounds.test(math.inf)


def key(
    default: Any,
    bounds: Bounds | None = None,
    unit: str = "",
    *,
    example: object = None,
    when: Condition | tuple[Condition, ...] = (),
    named: bool = False,
) -> Any:
    """Return a field with the properties of `Key`. A key that has only a type and a default needs no call.

    Args:
        default: The default value.
        bounds: The values that a number may have.
        unit: The unit, in words.
        example: A valid value, if the default is None.
        when: The condition, or conditions, under which the key has an effect.
        named: Whether it is a list of name=value.
    """
    when = when if isinstance(when, tuple) else (when,)
    return dataclasses.field(
        default=default,
        metadata={
            "bounds": bounds,
            "unit": unit,
            "example": example,
            "when": when,
            "named": named,
        },
    )


@cache
def keys_of(schema: type) -> dict[str, Key]:
    """Return every key of a schema, by its name "table.key".

    Args:
        schema: The class of the configuration.
    """
    return {
        f"{table}.{field.name}": Key(
            get_type_hints(kind)[field.name],
            field.default,
            **field.metadata,
            name=f"{table}.{field.name}",
        )
        for table, kind in get_type_hints(schema).items()
        for field in dataclasses.fields(kind)
    }
