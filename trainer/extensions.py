"""How a package of your own adds to the program: import it with `job.imports`, and call these functions in it.

    # my_package/__init__.py
    from trainer.extensions import register_model
    from my_package.args import FLAVORS

    register_model("mine", FLAVORS, spec="my_package.spec")

    # my_run.toml
    job.imports = ["my_package"]
    model.name = "mine"

Every command and every rank imports the package before it looks a name up. A name that exists already is refused
(ConfigError). Torch-free: what needs PyTorch is named by its module, "package.module:name", and imported by ranks.
docs/your_own_model.md has a family from its first line to its tests.
"""

from collections.abc import Mapping
from typing import Any

from trainer.config.registry import TABLES, TASK_OF_DATASET
from trainer.data.datasets import DATASETS, Source
from trainer.hugging_face.config_json import HFConfig
from trainer.job.record import TaskSpec
from trainer.job.tasks import TASKS
from trainer.models.args import ModelArgs
from trainer.models.registry import HF_CONFIGS, MODELS
from trainer.observer import OBSERVERS


def register_model(
    name: str, flavors: Mapping[str, ModelArgs], *, spec: str, hugging_face: HFConfig | None = None
) -> None:
    """Add a model family, for `model.name`.

    flavors: sizes by name, for `model.flavor`; spec: the module that holds `SPEC`, a `ModelSpec`; hugging_face: how the
    family reads and writes a `config.json`, if transformers has it.
    """
    MODELS.add(name, (flavors, spec))
    if hugging_face is not None:
        HF_CONFIGS.add(name, hugging_face)


def register_dataset(name: str, source: Source) -> None:
    """Add a kind of data set that holds text, for `training.dataset`."""
    DATASETS.add(name, source)


def register_task(task: TaskSpec, *, datasets: tuple[str, ...]) -> None:
    """Add a task: training on something else than tokens. datasets: the values of `training.dataset` that mean it."""
    TASKS.add(task.name, task)
    for name in datasets:
        TASK_OF_DATASET.add(name, task.name)


def register_table(name: str, table: type[Any]) -> None:
    """Add a table [name] to the configuration: a frozen dataclass with a docstring below each field.

    It is defined in the package. Its fields may be those of `trainer.config.keys.key`, with bounds, a unit, and when
    they have an effect.
    """
    TABLES.add(name, table)


def register_observer(place: str) -> None:
    """Add an observer to every run.

    place: "package.module:name" of a function of (`ResolvedJob`, `ParallelDims`, model parts of this rank) that returns
    a `trainer.observer.Observer`.
    """
    if place not in OBSERVERS:
        OBSERVERS.append(place)
