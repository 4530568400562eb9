"""A `BatchLoader` of a data set, with the settings of [training] that it reads given one by one."""

from typing import Any

from trainer.config.schema import Training
from trainer.data.loader import BatchLoader
from trainer.data.mixture import DataSet


def batch_loader(data: DataSet, *, dp_rank: int, dp_degree: int, plan: Any = None, **training: Any) -> BatchLoader:
    """Return the loader of one data-parallel rank. training: fields of `Training`."""
    return BatchLoader(data, Training(**training), dp_rank=dp_rank, dp_degree=dp_degree, plan=plan)
