"""Check the bounds of keys, and that keys which are set have an effect.

A key that is set (differs from its default) without effect gives one line in the log: its feature may be off for one
run. It is refused if the run would not do what the key asks for.
"""

from operator import attrgetter

from trainer.config.errors import ConfigError, Problems
from trainer.config.keys import Condition, keys_of
from trainer.config.schema import JobConfig
from trainer.config.values import shown
from trainer.job.degrees import Degrees


def check_bounds(config: JobConfig, problems: Problems) -> None:
    """Check every key against its bounds; `problems` takes an error for each value out of bounds."""
    for name, key in keys_of(type(config)).items():
        value = attrgetter(name)(config)
        with problems.collected():
            if key.bounds is not None and value is not None and not key.bounds.test(value):
                raise ConfigError(f"{name} = {value!r} must be {key.bounds.words}, such as {key.works!r}")


def check_effects(config: JobConfig, degrees: Degrees) -> tuple[str, ...]:
    """Return one line for each reason why some keys that are set have no effect.

    Raises:
        ConfigError: a key that has no effect although the run needs it, with what would work.
    """
    notes = []
    found: dict[Condition, list[str]] = {}  # the first condition of a key that does not hold -> the keys
    for name, key in keys_of(type(config)).items():
        missing = next((condition for condition in key.when if not condition.holds(config, degrees)), None)
        if missing is not None and attrgetter(name)(config) != key.default:
            found.setdefault(missing, []).append(name)
    for missing, names in found.items():
        if missing.remedy:
            raise ConfigError(f"{_told(missing, names[:1], config)}; {missing.remedy}")
        notes.append(_told(missing, names, config))
    return tuple(notes)


def _told(missing: Condition, names: list[str], config: JobConfig) -> str:
    listed = ", ".join(f"{name} = {shown(attrgetter(name)(config))}" for name in names)
    return f"{listed} {'has' if len(names) == 1 else 'have'} no effect {missing.otherwise.format(config)}"
