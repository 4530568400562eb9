"""Neighbourhood attention over sharded axes, as NATTEN defines it, in one to three spatial dimensions.

Queries stay on their rank. Keys and values are sent together, one exchange for each sharded axis. Only the rows are
sent that the receiving rank's queries see. Then each rank attends in tiles: a tile of queries, and the box of keys that
it sees. Tiles that see their keys in the same way are one call of scaled_dot_product_attention.

The windows are NATTEN's. Rows with the same remainder modulo the dilation are a class, and queries see keys of their
class only. Places count the rows of a class. Without causality a window has exactly `kernel` keys, centred on the query
where the axis has room, and shifted inwards at its ends:

    kernel 5, 9 rows as 4 + 5:   query 0 1 2 3 | 4 5 6 7 8     rank 0 wants [0, 6), rank 1 wants [2, 9)
                          first key  0 0 0 1 | 2 3 4 4 4

With causality a window ends at its query, and is shorter at the start. Queries of a group of `stride` places share the
window of their leader. The leader is the query in the middle (the right one of two); with causality it is the last one,
and each query still sees no later key.

Reference: generalized neighbourhood attention, https://arxiv.org/abs/2504.16922, and NATTEN's reference kernel,
csrc/include/natten/cuda/reference/mask.hpp (`get_win_start`, `get_win_end`, `qkv_fix_dilation`).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from longshard.domain.dispatch import DomainTensor
from longshard.domain.domain import Domain
from longshard.domain.elementwise import common_domain, own_part
from longshard.domain.neighborhood_tiles import (
    Hood,
    Tiles,
    rows_of_tiles,
    tiles_of,
    wanted_rows,
)
from longshard.domain.windows import per_axis
from longshard.sharding.ranges import Ranges
from longshard.sharding.rows import connected, fetch
from longshard.sharding.tensors import joined, to_device

_MASK_ELEMENTS = 1 << 20
# Kernels launch a block for each tile, in a dimension of at most 65,535 blocks.
_TILES_OF_A_CALL = 1 << 14


# ---- Attention


def neighborhood_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    kernel_size: int | Sequence[int],
    dilation: int | Sequence[int] = 1,
    stride: int | Sequence[int] = 1,
    is_causal: bool | Sequence[bool] = False,
    scale: float | None = None,
) -> Any:
    """Return the attention of each query to its neighbourhood, (B, *spatial, H, D of v), in the tensors' domain.

    A collective: one exchange for each sharded spatial dimension.

    Args:
        q: (B, *spatial, H, D), sharded or whole; head h reads key/value head h // (H / K).
        k: (B, *spatial, K, D), sharded or whole; K divides H.
        v: (B, *spatial, K, D), sharded or whole.
        kernel_size: Number of keys of a window, for all axes or for each axis.
        dilation: Distance of two keys of a window, for all axes or for each axis.
        stride: Number of queries that share a window, for all axes or for each axis.
        is_causal: Whether later keys are hidden, for all axes or for each axis.
        scale: Factor of the scores; None means 1 / sqrt(D).

    Raises:
        ValueError: Tensors do not fit, heads are sharded, or a window does not fit the axis or the stride.
    """
    tensors = [x for x in (q, k, v) if isinstance(x, DomainTensor)]
    shape = q.shape
    domain = _checked_domain(q, k, v)
    dims = range(1, q.ndim - 2)
    options = (per_axis(option, dims) for option in (kernel_size, dilation, stride, is_causal))
    hoods = {dim: tuple(option) for dim, *option in zip(dims, *options, strict=True)}
    for dim, hood in hoods.items():
        _check_fit(hood, shape[dim], dim)
    q, k, v = (own_part(x, domain, x.shape) for x in (q, k, v))
    k, v, keys = _with_neighbors(k, v, domain, hoods, shape)
    result = (*q.shape[:-1], v.shape[-1])
    if q.is_meta:
        out = q.new_empty(result)
    elif 0 in result:
        out = connected(q.new_zeros(result), q, k, v)
    else:
        queries = [domain.ranges(dim, shape[dim]) for dim in dims]
        axes = [*zip(queries, keys.values(), shape[1:-2], hoods.values(), strict=True)]
        out = _attend_axes(q, k, v, axes, scale)
    return DomainTensor(out, domain) if tensors else out


def _with_neighbors(
    k: Tensor,
    v: Tensor,
    domain: Domain,
    hoods: Mapping[int, Hood],
    shape: Sequence[int],
) -> tuple[Tensor, Tensor, dict[int, Ranges]]:
    """Return the keys and values that this rank's queries see, and for each dimension their rows in the whole tensor.

    One exchange for each sharded dimension of `hoods`. shape: of the whole queries.
    """
    keys = {dim: ((0, shape[dim]),) for dim in hoods}
    sharded = [dim for dim in hoods if dim in domain.axes]
    if not sharded:
        return k, v, keys
    both = torch.cat([k, v], -1)
    for dim in sharded:
        axis = domain.axes[dim]
        wanted = wanted_rows(axis.layout.ranges, shape[dim], hoods[dim])
        both = fetch(both, axis, wanted, dim)
        keys[dim] = wanted[axis.rank]
    k, v = both.split([k.shape[-1], v.shape[-1]], -1)
    return k, v, keys


def _attend_axes(q: Tensor, k: Tensor, v: Tensor, axes: list, scale: float | None) -> Tensor:
    """Attend in tiles. axes: for each axis the rows of q, the rows of k and v, its length, and its neighbourhood."""
    hoods = tuple([hood for *_, hood in axes])
    most = _MASK_ELEMENTS * k.shape[-2] // q.shape[-2]
    rows, cuts_again = rows_of_tiles(hoods, tuple(q.shape[1:-2]), most)
    cuts = enumerate(zip(axes, rows, strict=True))
    tiles = [tiles_of(*axis, tile, cuts_again and not number) for number, (axis, tile) in cuts]
    parts = [_parts(axis_tiles, q.device) for axis_tiles in tiles]

    attend = partial(_attend_tiles, scale=scale)
    attend_again = partial(checkpoint, attend, use_reentrant=False, preserve_rng_state=False)
    out = _attend((q, k, v), parts, (), attend_again if cuts_again else attend)
    for dim, axis_tiles in enumerate(tiles, 1):
        place = torch.tensor(
            [row for each in axis_tiles for tile in each.queries for row in tile]
        )
        out = out.index_select(dim, to_device(place.argsort(), out.device))
    return out


# ---- Checks


def _checked_domain(q: Any, k: Any, v: Any) -> Domain:
    """Return the domain of the result: each dimension has the layout of the first of q, k, v that is sharded there.

    Raises:
        ValueError: The shapes do not fit, or the heads or their elements are sharded.
    """
    fits = (
        q.ndim == k.ndim == v.ndim in (4, 5, 6)
        and q.shape[:-2] == k.shape[:-2]
        and k.shape[:-1] == v.shape[:-1]
    )
    if not fits or q.shape[-1] != k.shape[-1] or not k.shape[-2] or q.shape[-2] % k.shape[-2]:
        raise ValueError(
            f"q, k and v of shapes {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)} do not fit; they must be "
            "(batch, *spatial, heads, head dim) with one to three spatial dimensions. q and k must have the same head "
            "dim, and the number of heads of k and v must divide q's"
        )
    domain = common_domain((q, k, v), q.shape)
    if any(dim > q.ndim - 3 for dim in domain.axes):
        raise ValueError(
            f"dimensions {[*domain.axes]} of q are sharded, and the last two are heads and head dim, "
            "which every rank must have whole; shard batch or spatial dimensions"
        )
    return domain


def _check_fit(hood: Hood, length: int, dim: int) -> None:
    kernel, dilation, stride, _ = hood
    if min(hood[:3]) < 1 or stride > kernel:
        raise ValueError(
            f"kernel_size {kernel}, dilation {dilation} and stride {stride} of dimension {dim} must be at least 1, and "
            "the stride at most the kernel size"
        )
    if kernel * dilation > length:
        raise ValueError(
            f"kernel_size {kernel} times dilation {dilation} is more than the {length} rows of dimension {dim}; use a "
            f"kernel of at most {length // dilation} or a smaller dilation"
        )


# ---- Tiles


class _Part(NamedTuple):
    """Tiles of an axis, with their queries (tiles, rows) and keys (tiles, keys) as indices on the device."""

    tiles: Tiles
    queries: Tensor
    keys: Tensor


def _parts(axis_tiles: Sequence[Tiles], device: torch.device) -> list[_Part]:
    """Return the tiles of an axis with their indices, which are copied to the device in one copy."""
    indices = []
    for tables in ([each.queries for each in axis_tiles], [each.keys for each in axis_tiles]):
        together = to_device(
            torch.tensor([*chain.from_iterable(chain.from_iterable(tables))]), device
        )
        sizes = [(len(table), len(table[0])) for table in tables]
        parts = together.split([math.prod(size) for size in sizes])
        indices.append([part.view(size) for part, size in zip(parts, sizes, strict=True)])
    return [_Part(*part) for part in zip(axis_tiles, *indices, strict=True)]


def _attend(
    qkv: tuple[Tensor, ...],
    axes: list,
    chosen: tuple[_Part, ...],
    attend: Callable,
) -> Tensor:
    """Attend for each combination of tiles of the axes, and put the results together."""
    if not axes:
        return attend(*qkv, chosen)
    results = [_attend(qkv, axes[1:], (*chosen, part), attend) for part in axes[0]]
    return joined(results, len(chosen) + 1)


def _attend_tiles(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    parts: tuple[_Part, ...],
    scale: float | None,
) -> Tensor:
    """Attend in tiles of each axis. Query heads that read the same keys are queries of one head."""
    tiles, queries, keys = zip(*parts, strict=True)
    heads = k.shape[-2]
    groups = q.shape[-2] // heads
    q = _cut(q.unflatten(-2, (heads, groups)), queries)  # (B, tiles, K, groups, rows, D)
    k, v = (_cut(x.unsqueeze(-2), keys).flatten(3, 4) for x in (k, v))  # (B, tiles, K, keys, D)
    mask = _mask(tiles, groups, q.device)
    calls = zip(
        *(x.flatten(0, 1).split(_TILES_OF_A_CALL) for x in (q.flatten(3, 4), k, v)), strict=True
    )
    out = joined(
        [F.scaled_dot_product_attention(*call, attn_mask=mask, scale=scale) for call in calls]
    )
    counts, rows = zip(*(each.shape for each in queries), strict=True)
    # (B, tiles of each axis, K, groups, rows of each axis, D) -> (B, rows of all tiles of each axis, H, D)
    out = out.reshape(q.shape[0], *counts, heads, groups, *rows, -1)
    axes = len(tiles)
    pairs = chain(*((1 + axis, 3 + axes + axis) for axis in range(axes)))
    out = out.permute(0, *pairs, 1 + axes, 2 + axes, -1)
    return out.reshape(
        out.shape[0],
        *(c * r for c, r in zip(counts, rows, strict=True)),
        heads * groups,
        v.shape[-1],
    )


def _cut(x: Tensor, places: Sequence[Tensor]) -> Tensor:
    """Return tiles of x: (B, *spatial, K, groups, D) -> (B, tiles of all axes, K, groups, rows of all axes, D)."""
    axes = len(places)
    for axis, chosen in enumerate(places):
        x = x.index_select(2 * axis + 1, chosen.flatten()).unflatten(2 * axis + 1, chosen.shape)
    x = x.permute(
        0, *range(1, 2 * axes, 2), 2 * axes + 1, 2 * axes + 2, *range(2, 2 * axes + 1, 2), -1
    )
    return x.flatten(axes + 3, -2).flatten(1, axes)


def _mask(tiles: tuple[Tiles, ...], groups: int, device: torch.device) -> Tensor | None:
    """Return which query of a tile sees which key, (groups * queries, keys), True if it does; None if each sees all."""
    if all(window == (0, len(each.keys[0])) for each in tiles for window in each.windows):
        return None
    mask = torch.ones(1, 1, dtype=torch.bool, device=device)
    for each in tiles:
        first, stop = to_device(torch.tensor(each.windows), device).T[:, :, None]
        place = torch.arange(len(each.keys[0]), device=device)
        seen = (place >= first) & (place < stop)  # (rows, keys)
        mask = (mask[:, None, :, None] & seen[:, None]).flatten(2).flatten(0, 1)
    return mask.repeat(groups, 1)
