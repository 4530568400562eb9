"""Neighbours in point clouds whose points are sharded in any way: the k nearest, and all within a radius.

    distances, numbers = nearest(queries, points, 8)             # (M, 8) of (M, D) queries
    numbers, exist = within(queries, points, 0.1, at_most=32)    # (M, 32)
    features[numbers]                                            # (M, 8, C), from their owners, with gradients

Each rank gets the points of other ranks that lie in the box around its queries. The box is widened by the radius, or by
the largest distance of the k nearest among its own points. So the division of space by the ranks decides how much is
sent: little if each rank has a region, everything if each rank has points of all regions. Equal distances are ordered
by the numbers of the points, so every division finds the same. These distances have no gradients;
`queries[:, None] - points[numbers]` has.
"""

import torch
from torch import Tensor

from longshard.domain.dispatch import DomainTensor, wrapped
from longshard.domain.domain import Axis, shares_ranks
from longshard.sharding.exchange import all_gather, exchange_counts, send_rows
from longshard.sharding.placement import rows_on
from longshard.sharding.rows import layout_of

_BLOCK = 2**24
"""Number of distances that are computed at once."""


def nearest(
    queries: DomainTensor, points: DomainTensor, k: int
) -> tuple[DomainTensor, DomainTensor]:
    """Return distances and global numbers of the k nearest points of each query, nearest first: both (M, k).

    The results are sharded as the queries, and have no gradients. Of equal distances, the point with the lower number
    is first. A collective if the points are sharded.

    Args:
        queries: (M, D), sharded in its first dimension, or whole.
        points: (N, D), sharded in its first dimension over the same ranks, or whole.
        k: Number of neighbours, at most N.

    Raises:
        ValueError: The shapes or ranks are wrong, or there are fewer points than k.
    """
    q, p, numbers, axis = _own(queries, points)
    if not 0 < k <= points.shape[0]:
        raise ValueError(
            f"k = {k} must be from 1 to the {points.shape[0]} points; ask for fewer neighbours"
        )
    if not q.is_meta:
        reach = q.new_full((), torch.inf)
        if len(p) >= k and len(q):
            reach = _search(q, p, numbers, k)[0].max()
        p, numbers = _with_halo(q, p, numbers, reach, axis)
    return wrapped(_search(q, p, numbers, k), queries.domain)


def within(
    queries: DomainTensor, points: DomainTensor, radius: float, *, at_most: int
) -> tuple[DomainTensor, DomainTensor]:
    """Return global numbers of the points within a radius of each query, nearest first, and which of them exist.

    Both are (M, at_most), sharded as the queries. If there are more points, the nearest are taken. If there are fewer,
    the other numbers are 0. A collective if the points are sharded.

    Args:
        queries: (M, D), as for `nearest`.
        points: (N, D), as for `nearest`.
        radius: The radius, above 0 and finite.
        at_most: Number of neighbours, above 0.

    Raises:
        ValueError: The shapes or ranks are wrong, or the radius or number is not positive or not finite.
    """
    q, p, numbers, axis = _own(queries, points)
    if not (0 < radius < torch.inf and at_most > 0):
        raise ValueError(
            f"radius = {radius} and at_most = {at_most} must be positive, and finite"
        )
    if not q.is_meta:
        reach = q.new_full((), float(radius))
        p, numbers = _with_halo(q, p, numbers, reach, axis)
    distances, nearest_numbers = _search(q, p, numbers, at_most)
    exist = distances <= radius
    return wrapped((nearest_numbers * exist, exist), queries.domain)


def _own(
    queries: DomainTensor, points: DomainTensor
) -> tuple[Tensor, Tensor, Tensor, Axis | None]:
    """Return this rank's queries and points, the points' numbers, and their axis; None if every rank has all points.

    Raises:
        ValueError: The shapes do not fit, or points are sharded otherwise than queries.
    """
    if (
        queries.ndim != 2
        or points.ndim != 2
        or queries.shape[1] != points.shape[1]
        or any(1 in x.domain.axes for x in (queries, points))
    ):
        raise ValueError(
            f"queries of shape {tuple(queries.shape)} and points of shape {tuple(points.shape)} must "
            "be (M, D) and (N, D), with whole coordinates"
        )
    axis = points.domain.axes.get(0)
    if axis is not None and not shares_ranks(axis, queries.domain.axes.values()):
        raise ValueError(
            "points are sharded, and queries are not, or over other ranks; shard both over the same ranks"
        )
    q = queries.local.detach()
    p = points.local.detach()
    layout, rank = layout_of(axis, len(p))
    return q, p, rows_on(layout, rank, p.device), axis


def _with_halo(
    q: Tensor,
    p: Tensor,
    numbers: Tensor,
    reach: Tensor,
    axis: Axis | None,
) -> tuple[Tensor, Tensor]:
    """Return the points within reach of this rank's queries, and their numbers, ascending; a collective.

    Points of this rank are all returned. There may be points that are out of reach.
    """
    if axis is None:
        return p, numbers
    if len(q):
        low = q.amin(0)
        high = q.amax(0)
        # widen the box by the error of rounding
        reach = reach + 8 * torch.finfo(q.dtype).eps * (
            reach + torch.maximum(low.abs(), high.abs())
        )
        box = torch.stack([low - reach, high + reach])
    else:
        box = q.new_tensor([[torch.inf], [-torch.inf]]).expand(2, q.shape[1])
    low, high = all_gather(box, axis.group).unbind(1)  # (ranks, D)
    inside = ((p >= low[:, None]) & (p <= high[:, None])).all(-1)  # (ranks, points)
    inside[axis.rank] = False
    ranks, chosen = inside.nonzero(as_tuple=True)
    counts = exchange_counts(ranks.bincount(minlength=axis.degree), axis.group, kind="points")
    halo, names = (
        send_rows(x[chosen], *counts, axis.group, kind="points") for x in (p, numbers)
    )
    numbers, order = torch.cat([numbers, names]).sort()
    return torch.cat([p, halo])[order], numbers


def _search(q: Tensor, p: Tensor, numbers: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return distances and numbers of the k nearest points, (M, k); infinity and 0 if there are fewer."""
    if q.is_meta or not len(q):
        return q.new_empty(len(q), k), numbers.new_empty(len(q), k)
    distances = q.new_full((len(q), k), torch.inf)
    nearest_numbers = numbers.new_zeros(len(q), k)
    number = min(k, len(p))
    block = max(_BLOCK // max(len(p), 1), 1)
    blocks = (x.split(block) for x in (q, distances, nearest_numbers))
    for some, some_distances, some_numbers in zip(*blocks, strict=True):
        each = torch.cdist(some, p, compute_mode="donot_use_mm_for_euclid_dist")
        ordered, places = each.sort(dim=1, stable=True)
        some_distances[:, :number] = ordered[:, :number]
        some_numbers[:, :number] = numbers[places[:, :number]]
    return distances, nearest_numbers
