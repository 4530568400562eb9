"""Halos that come with a norm: rows of other ranks, in the message of its statistics.

    norm -> functions by element -> convolution

The norm sends statistics, and the convolution rows at the ends of its shard. `parallelize` finds such chains in its
forward without data. From then on the norm sends rows of its input together with the statistics: who gets them
normalises them too, the functions by element are applied to them, and the convolution finds them. In the backward
their gradients travel with those of the statistics.

It concerns the first sharded dimension of the convolution. Who changes a shard in place loses its halo, and the
convolution fetches the rows as without it.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from trainer.distributed.domain_parallel.domain import Domain
from trainer.distributed.sharding.exchange import plan_movement, send_rows
from trainer.distributed.sharding.layout import AxisLayout
from trainer.distributed.sharding.ranges import Range, Ranges, difference, intersection, size
from trainer.distributed.sharding.rows import Axis, Wanted, plan_rows
from trainer.distributed.sharding.tensors import planned, version_of


class Reach(NamedTuple):
    """The rows of a dimension that a convolution reads, as `rows.fetch` takes them."""

    dim: int
    wanted: Wanted
    periodic: bool


Reaches = dict[tuple[int, AxisLayout], Reach]
"""What the convolution behind a norm reads, by dimension and layout of the norm's input."""


def one_after_another(ranges: Iterable[Range]) -> Iterator[Range]:
    """Yield where each range begins and ends when they are laid one after another."""
    return pairwise(accumulate((stop - start for start, stop in ranges), initial=0))


class HaloPlan(NamedTuple):
    """What one rank sends, and how it puts together what it gets.

    sent, received: for each rank places in the shard, and in the halo. arriving: for each rank the number of rows that
    come from it. order: the halo as parts (rank, first, last) of what came from the ranks.
    foreign: the rows that each rank wants of others, its halo.
    """

    sent: tuple[Ranges, ...]
    arriving: tuple[int, ...]
    order: tuple[tuple[int, int, int], ...]
    received: tuple[Ranges, ...]
    foreign: Wanted

    @property
    def reversed(self) -> "HaloPlan":
        """The plan by which gradients of the halo return, in the order in which the rows were sent."""
        order = tuple((r, *part) for r, places in enumerate(self.sent) for part in one_after_another(places))
        return HaloPlan(self.received, tuple(map(size, self.sent)), order, self.sent, ())


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
def plan_halo(owned: tuple[Ranges, ...], length: int, wanted: Wanted, periodic: bool, rank: int) -> HaloPlan:
    """Return the plan of a rank; the arguments are those of `rows.plan_rows`."""
    wanted, _ = plan_rows(owned, length, wanted, periodic)
    whole = ((0, length),)
    foreign = tuple(
        tuple(part for parts in ranges for part in difference(intersection((parts,), whole), owned[r]))
        for r, ranges in enumerate(wanted)
    )
    movement = plan_movement(owned, foreign, rank)
    order = [
        (place, r, *part)
        for r, places in enumerate(movement.received)
        for (place, _), part in zip(places, one_after_another(places), strict=True)
    ]
    arriving = tuple(map(size, movement.received))
    order = tuple(part[1:] for part in sorted(order))
    return HaloPlan(movement.sent, arriving, order, movement.received, foreign)


def send_with(
    statistics: torch.Tensor, x: torch.Tensor | None, plan: HaloPlan | None, axis: Axis, dim: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the statistics of all ranks of an axis, (ranks, *shape), and rows of their x; one all-to-all.

    statistics: of one shape on every rank. x: of the same type; its rows in `dim` are sent as the plan says. Without a
    plan there are no rows. Not differentiable.
    """
    number, flat = statistics.numel(), statistics.reshape(-1)
    message, sent, arriving = [flat] * axis.degree, [0] * axis.degree, [0] * axis.degree
    if plan is not None:
        width = math.prod((*x.shape[:dim], *x.shape[dim + 1 :]))
        rows = [[x.narrow(dim, start, stop - start).reshape(-1) for start, stop in ranges] for ranges in plan.sent]
        message = [part for mine in rows for part in (flat, *mine)]
        sent, arriving = ([n * width for n in each] for each in (map(size, plan.sent), plan.arriving))
    sizes = [[number + n for n in each] for each in (sent, arriving)]
    arrived = send_rows(torch.cat(message), *sizes, axis.group, kind="statistics").split(sizes[1])
    theirs = torch.stack([part[:number] for part in arrived]).view(axis.degree, *statistics.shape)
    if plan is None:
        return theirs, None
    shape, halo = [*x.shape], []
    for rank, first, last in plan.order:
        shape[dim] = last - first
        halo.append(arrived[rank][number + first * width : number + last * width].view(shape))
    return theirs, torch.cat(halo, dim) if halo else x.narrow(dim, 0, 0)
