"""One sharded axis: the ranks that share it, and the rows of each."""

from dataclasses import dataclass

import torch.distributed as dist

from trainer.distributed.sharding.layout import AxisLayout


@dataclass(frozen=True)
class Axis:
    """A sharded axis: the ranks of `group` own its rows as `layout` says."""

    layout: AxisLayout
    group: dist.ProcessGroup

    def __post_init__(self) -> None:
        if self.layout.degree != self.group.size():
            raise ValueError(
                f"a layout for {self.layout.degree} ranks does not fit a group of {self.group.size()}; give one size "
                "for each rank of the group, 0 if it has no rows"
            )

    @property
    def degree(self) -> int:
        """The number of ranks."""
        return self.layout.degree

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return self.group.rank()

    @property
    def rows(self) -> int:
        """The number of rows of this rank."""
        return self.layout.local_length(self.rank)
