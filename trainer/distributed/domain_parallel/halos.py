"""Halos that come with a norm: rows of other ranks, in the message of its statistics.

    norm -> functions by element -> convolution

The norm sends statistics, and the convolution rows at the ends of its shard. `parallelize` finds such chains in its
forward without data. From then on the norm sends rows of its input together with the statistics: who gets them
normalises them too, the functions by element are applied to them, and the convolution finds them. In the backward
their gradients travel with those of the statistics.

It concerns the first sharded dimension of the convolution. Who changes a shard in place loses its halo, and the
convolution fetches the rows as without it.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from trainer.distributed.domain_parallel.domain import Domain
from trainer.distributed.sharding.exchange import Movement, send_rows
from trainer.distributed.sharding.layout import AxisLayout
from trainer.distributed.sharding.ranges import Ranges, difference, intersection, size
from trainer.distributed.sharding.rows import Axis, Wanted, plan_rows
from trainer.distributed.sharding.tensors import planned, version_of, with_adjoint


class Reach(NamedTuple):
    """The rows of a dimension that a convolution reads, as `rows.fetch` takes them."""

    dim: int
    wanted: Wanted
    periodic: bool


Reaches = dict[tuple[int, AxisLayout], Reach]
"""What the convolution behind a norm reads, by dimension and layout of the norm's input."""


@dataclass
class Use:
    """Whether a convolution took a halo, and whether none may; of all halos that come from one norm."""

    is_taken: bool = False
    is_given_up: bool = False


class Halo(NamedTuple):
    """Rows of other ranks for a reach, and the version of the shard that they belong to."""

    rows: torch.Tensor
    reach: Reach
    version: int
    use: Use

    def after(self, rows: torch.Tensor, shard: torch.Tensor) -> "Halo":
        """Return the halo of a shard to which, as to the rows, a function by element was applied."""
        return Halo(rows, self.reach, version_of(shard), self.use)

    def give_up(self) -> None:
        """Let convolutions fetch the rows, so that the gradients of these come back through the shard.

        Raises:
            RuntimeError: one has taken the halo.
        """
        if self.use.is_taken:
            raise RuntimeError(
                "the gradient of this tensor is not whole: a convolution has read rows of it that came with a norm, "
                "whose gradients return there; register a hook on the tensor before the convolution is called"
            )
        self.use.is_given_up = True


def current(halo: Halo | None, shard: torch.Tensor) -> Halo | None:
    """Return the halo if the shard has not changed since, and nobody asked for its gradient."""
    if halo is None or halo.use.is_given_up or halo.version != version_of(shard):
        return None
    return halo


def reach_of(asked: Reaches | None, domain: Domain) -> Reach | None:
    """Return what is known to be asked of a tensor of a domain; nothing in inference mode, which counts no changes."""
    if not asked or torch.is_inference_mode_enabled():
        return None
    found = (asked.get((dim, axis.layout)) for dim, axis in domain.axes.items())
    return next((reach for reach in found if reach is not None), None)


@planned
def foreign_rows(owned: tuple[Ranges, ...], length: int, wanted: Wanted, periodic: bool) -> Wanted:
    """Return the rows that each rank wants of others, its halo; the arguments are those of `rows.plan_rows`."""
    wanted, _ = plan_rows(owned, length, wanted, periodic)
    return tuple(
        tuple(part for parts in ranges for part in difference(intersection((parts,), ((0, length),)), own))
        for ranges, own in zip(wanted, owned, strict=True)
    )


def send_with(
    statistics: torch.Tensor, x: torch.Tensor, movement: Movement, axis: Axis, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the statistics of all ranks of an axis, (ranks, *shape), and the rows of a halo; one all-to-all.

    statistics: of one shape on every rank. x: of the same type, whose dimension `dim` the movement is of. The gradients
    of both return in one all-to-all too.
    """
    rows, number = x.movedim(dim, 0), statistics.numel()
    shape, width = rows.shape[1:], rows.shape[1:].numel()
    sent = [[statistics, *(rows[slice(*place)] for place in places)] for places in movement.sent]
    message = torch.cat([part.reshape(-1) for mine in sent for part in mine])
    sizes = [[number + size(places) * width for places in each] for each in (movement.sent, movement.received)]
    send = partial(send_rows, group=axis.group, kind="statistics")
    ways = (partial(send, sent=a, arriving=b) for a, b in (sizes, sizes[::-1]))
    arrived = with_adjoint(message, *ways).split(sizes[1])
    parts = [(0, rows[:0])]  # with their places
    for piece, places in zip(arrived, movement.received, strict=True):
        lengths = [stop - start for start, stop in places]
        each = piece[number:].view(sum(lengths), *shape).split(lengths) if lengths else ()
        parts += [(start, part) for (start, _), part in zip(places, each, strict=True)]
    theirs = torch.stack([piece[:number] for piece in arrived]).view(axis.degree, *statistics.shape)
    return theirs, torch.cat([part for _, part in sorted(parts, key=lambda part: part[0])]).movedim(0, dim)
