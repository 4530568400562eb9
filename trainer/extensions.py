"""How your own package extends the program: import it with `job.imports`, and call these functions in it.

    # my_package/__init__.py
    from trainer.extensions import register_model
    from my_package.args import FLAVORS

    register_model("mine", FLAVORS, spec="my_package.spec")

    # my_run.toml
    job.imports = ["my_package"]
    model.name = "mine"

Every command and every rank imports the package before it looks a name up. A name that exists already is refused
(ConfigError). Torch-free: objects that need PyTorch are named by their module, "package.module:name", and imported by
ranks. docs/your_own_model.md has a family from its first line to its tests.
"""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from longshard.context.planning.methods import METHODS, Method
from trainer.config.errors import ConfigError
from trainer.config.optimizer import OPTIMIZERS_HERE
from trainer.config.places import check_place
from trainer.config.registry import CHOICES, OPTIMIZERS, TABLES, TASK_OF_DATASET
from trainer.config.schema import JobConfig
from trainer.data.sources.registry import DATASETS, DataSettings, Source
from trainer.data.tokenizers.template_files import TEMPLATES
from trainer.families.args import ModelArgs
from trainer.families.registry import MODELS, Family
from trainer.hugging_face.config_json import HFConfig
from trainer.job.record import TaskSpec
from trainer.job.resolution import TASKS
from trainer.observer import OBSERVERS


def register_model(
    name: str,
    flavors: Mapping[str, ModelArgs],
    *,
    spec: str,
    hugging_face: HFConfig | None = None,
) -> None:
    """Add a model family, for `model.name`.

    Args:
        name: Name of the family.
        flavors: Sizes by name, for `model.flavor`.
        spec: Name of the module that defines `SPEC`, a `ModelSpec`. Ranks import it later.
        hugging_face: How the family reads and writes a `config.json`, if transformers has it.

    Raises:
        ConfigError: Another family has this name, or the module does not exist or does not define `SPEC`.
    """
    MODELS.add(name, Family(flavors, spec, hugging_face))
    check_place(f"register_model({name!r}): spec", f"{spec}:SPEC")


def register_dataset(name: str, source: Source) -> None:
    """Add a kind of data set that holds text, for `training.dataset`.

    Args:
        name: Name of the kind.
        source: How it is read.
    """
    DATASETS.add(name, source)


def register_iterable(name: str, place: str) -> None:
    """Add a data set of texts or token ids that are made while the job trains, for `training.dataset`.

    The function takes (`training.dataset_path`, number of the data stream, number of streams). It returns an iterable
    or a sequence with the documents of that stream, for example a `datasets` stream split by `split_dataset_by_node`.
    It is called again for each pass; a `set_epoch` of the iterable gets the pass' number.

    torchdata's `StatefulDataLoader` resumes it: by its `state_dict` and `load_state_dict` (of JSON types), or else by
    reading again up to the position. A run resumes exactly, on any number of ranks, if the same documents come again.
    `shuffle` of a `datasets` stream needs a seed. Only `shuffle(seed=1, buffer_size=1, max_buffer_input_shards=1)`,
    which shuffles the shards alone, resumes without reading again. Without `training.data_streams` there is one stream
    for each data-parallel rank of the first start.

    A document is a text, an object with the field `training.dataset_text_field`, a list of token ids, or an `Encoded`,
    which says which tokens are learned.

    Example, with `register_iterable("mine", "mine.data:documents")` in `mine/__init__.py`:

        def documents(path, stream, streams):
            rows = datasets.load_dataset(path, split="train", streaming=True)
            return split_dataset_by_node(rows, rank=stream, world_size=streams)

    Args:
        name: Name of the data set.
        place: The function, as "package.module:function".
    """
    check_place(f"register_iterable({name!r}): place", place)
    DATASETS.add(name, Source((), _no_files, _no_files, iterable=place))


def _no_files(settings: DataSettings, *_: object) -> Any:
    raise ConfigError(
        f"{settings.keys.dataset} = {settings.dataset!r} is an iterable, which training alone can read; give "
        "a data set of files"
    )


def register_chat_template(name: str, source: str) -> None:
    """Add a chat template, for `model.chat_template`.

    Args:
        name: Name of the template.
        source: Its Jinja text.
    """
    TEMPLATES.add(name, source)


def register_task(task: TaskSpec, *, datasets: tuple[str, ...]) -> None:
    """Add a task: training on something other than tokens.

    Args:
        task: The task.
        datasets: The values of `training.dataset` that select it.

    Raises:
        ConfigError: A name exists already, or there is no `task.module`.
    """
    check_place(f"register_task({task.name!r}): module", task.module)
    TASKS.add(task.name, task)
    for name in datasets:
        TASK_OF_DATASET.add(name, task.name)


def register_table(name: str, table: type[Any]) -> None:
    """Add a table [name] to the configuration: a frozen dataclass with a docstring below each field.

    Define it in the package. Its fields may use `trainer.config.keys.key`, with bounds, a unit, and when they have an
    effect.

    Args:
        name: Name of the table.
        table: The dataclass.

    Raises:
        ConfigError: The name exists already, or `table` is no dataclass.
    """
    if name in {table.name for table in fields(JobConfig)}:
        raise ConfigError(
            f"a table named {name!r} exists already; register yours under another name"
        )
    if not (isinstance(table, type) and is_dataclass(table)):
        raise ConfigError(
            f"register_table({name!r}) needs a frozen dataclass, and got {table!r}"
        )
    TABLES.add(name, table)


def register_optimizer(name: str, place: str) -> None:
    """Add an optimizer, for `optimizer.name`.

    The function takes (model parts of this rank, `JobConfig`) and returns a `torch.optim.Optimizer`;
    `trainer.components.optimizer.parameter_groups` says which parameters decay. The schedule sets `lr` of its groups.
    Its settings belong in a table of its own, see `register_table`.

    Args:
        name: Name of the optimizer.
        place: The function, as "package.module:function". It is imported when the optimizer is made.

    Raises:
        ConfigError: The name exists already, or there is no such module or function.
    """
    if name in OPTIMIZERS_HERE:
        raise ConfigError(
            f"an optimizer named {name!r} exists already; register yours under another name"
        )
    check_place(f"register_optimizer({name!r}): place", place)
    OPTIMIZERS.add(name, place)
    CHOICES.setdefault("optimizer.name", []).append(name)


def register_method(name: str, method: Method) -> None:
    """Add a method of context parallelism, for `parallelism.context_parallel_method`; `auto` considers it, too.

    Args:
        name: Name of the method.
        method: The method.

    Raises:
        ConfigError: The name exists already.
    """
    if METHODS.setdefault(name, method) is not method:
        raise ConfigError(
            f"a method named {name!r} exists already; register yours under another name"
        )
    CHOICES.setdefault("parallelism.context_parallel_method", []).append(name)


def register_observer(place: str) -> None:
    """Add an observer to every run.

    The function takes (`ResolvedJob`, `ParallelDims`, model parts of this rank) and returns a
    `trainer.observer.Observer`.

    Args:
        place: The function, as "package.module:name".
    """
    check_place("register_observer: place", place)
    if place not in OBSERVERS:
        OBSERVERS.append(place)
