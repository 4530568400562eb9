"""The tasks by name, and the model of a job, which its task completes. Torch-free."""

from trainer.config.errors import ConfigError
from trainer.config.registry import Registry
from trainer.config.schema import JobConfig
from trainer.families.args import ModelArgs
from trainer.families.registry import MODELS, flavor_args
from trainer.job.language import Language
from trainer.job.preferences import Preferences
from trainer.job.record import TaskSpec

TASKS: Registry[TaskSpec] = Registry("task", {Language.name: Language()})
_OF_TOKENS: dict[str, TaskSpec] = {"preferences": Preferences()}
"""Data sets of tokens that are for a task of their own."""


def task_of(config: JobConfig) -> TaskSpec:
    """Return the task of a configuration."""
    return _OF_TOKENS.get(config.training.dataset) or TASKS[config.task]


def resolve_model(config: JobConfig, missing: list[str] | None = None) -> ModelArgs:
    """Return the arguments of the model that the configuration names, for its data. missing: see `resolve`.

    ConfigError if there is no such model, flavor or data, or the model is of another kind of data.
    """
    flavor, task = flavor_args(config.model), task_of(config)
    if flavor.task != task.name:
        other, name = TASKS[flavor.task], f"model.name = {config.model.name!r}"
        models = [
            repr(name) for name, family in MODELS.items() if next(iter(family.flavors.values())).task == task.name
        ]
        raise ConfigError(
            f"{name} is a model of {other.data}, and training.dataset = {config.training.dataset!r} is {task.data}; "
            f"use model.name = {' or '.join(models[:2])}, or other data"
        )
    return task.model(config, flavor, missing)
