"""Sparse attention over latents in plain PyTorch: the choice of keys, attention to chosen keys, and its backward.

An indexer scores each pair of a query t and a key s, and a query attends to the `per_query` keys with the highest
scores (DeepSeek-V3.2-Exp, 2025):

    I(t, s) = sum over index heads j of w_j(t) relu(q_j(t) . k(s))

Scores are computed in tiles, and the best keys so far are kept: no matrix of all pairs exists. All tiles of a sequence
have one size, so that a score has the same bits in each tile and on each rank. Of equal scores the earlier key counts.
Attention reads latents as they are (`latent.absorbed`). All numbers are float32 at least, in plain PyTorch.

The indexer has its own loss. It compares softmax(I) with the attention weights, which are averaged over the heads, and
sums their divergence over the chosen keys. In the paper's dense warm-up all visible keys are chosen.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from longshard.context.execution.latent import absorbed
from longshard.sharding.tensors import wide, wide_type

KEYS = 32768
"""The most keys of a tile of index scores."""
TILE_BYTES = 1 << 30
"""The most bytes of a tile for one sequence of the batch, with the scores of all index heads. At least 16 queries."""


class Index(NamedTuple):
    """What an indexer computes from the tokens of one rank."""

    queries: Tensor
    """(B, S, J, D)."""
    keys: Tensor
    """(B, S, D)."""
    weights: Tensor
    """(B, S, J)."""


def choose(index: Index, keys: Tensor, visible: Tensor, per_query: int, length: int) -> Tensor:
    """Return the positions of the keys that each query attends to, ascending: (B, S, per_query) int32.

    If a query sees fewer keys, -1 fills its last places. If one of its scores is not a number, it has no keys.

    Args:
        index: The index of this rank's queries; its keys are not used.
        keys: Index keys of the sequence up to the last visible one, or more, (B, T, D).
        visible: First visible key of each query, and the end of its keys, on the host: (B, S, 2), or (1, S, 2).
        per_query: Number of keys of a query.
        length: Number of tokens of the whole sequence, by which all ranks choose one size of tiles.
    """
    batch, rows, heads = index.weights.shape
    device = keys.device
    dtype = wide_type(keys.dtype)
    chosen = keys.new_full((batch, rows, per_query), -1, dtype=torch.int32)
    whole = -(-length // 16) * 16
    width = min(whole, KEYS)
    step = min(whole, max(TILE_BYTES // (heads * width * dtype.itemsize), 16))
    for start in range(0, rows, step):
        part = slice(start, start + step)
        limits = visible[:, part]
        bounds = limits.to(device, non_blocking=True)
        queries = _filled(index.queries[:, part], step)
        weights = _filled(index.weights[:, part], step)
        number = limits.shape[1]
        best = queries.new_empty(batch, number, 0, dtype=dtype)
        best_places = best.long()
        broken = keys.new_zeros(batch, number, 1, dtype=torch.bool)
        first = int(limits[..., 0].min()) // width * width
        last = int(limits[..., 1].max())
        for tile in range(first, last, width):
            tile_keys = _filled(keys[:, tile : tile + width], width)
            places = torch.arange(tile, tile + width, device=device)
            scores = index_scores(queries, tile_keys, weights)[:, :number]
            scores = scores.clamp(min=torch.finfo(scores.dtype).min)
            scores = scores.masked_fill(~_is_visible(places, bounds), -torch.inf)
            broken |= scores.isnan().any(-1, keepdim=True)
            best = torch.cat((best, scores), -1)
            best_places = torch.cat((best_places, places.expand_as(scores)), -1)
            best, best_places = highest(best, best_places, per_query)
        best_places = best_places.masked_fill((best == -torch.inf) | broken, -1)
        without_key = (best_places < 0).int()
        order = without_key.argsort(dim=-1, stable=True)
        chosen[:, part, : best.shape[2]] = best_places.gather(-1, order).int()
    return chosen


def index_scores(queries: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """Return the score of each pair: (B, S, T).

    Args:
        queries: (B, S, J, D).
        keys: (B, T, D).
        weights: (B, S, J).
    """
    products = wide(queries).flatten(1, 2) @ wide(keys).mT
    by_head = products.relu_().unflatten(1, queries.shape[1:3])
    return (wide(weights).unsqueeze(2) @ by_head).squeeze(2)


def _filled(x: Tensor, rows: int) -> Tensor:
    """Return x, (B, rows or fewer, ...), with zeros up to this number of rows."""
    filled = x.new_zeros(x.shape[0], rows, *x.shape[2:])
    filled[:, : x.shape[1]] = x
    return filled


def highest(scores: Tensor, places: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Return the highest scores and their places, in their present order. Of equal scores the first ones count.

    Args:
        scores: (..., T).
        places: (..., T).
        number: Number of scores; if T is smaller, all are returned.
    """
    if scores.shape[-1] <= number:
        return scores, places
    least = scores.topk(number, sorted=True).values[..., -1:]
    above = scores > least
    equal = scores == least
    left = number - above.sum(-1, keepdim=True)
    kept = above | (equal & (equal.cumsum(-1) <= left))
    # the column after the last one takes all scores that are left out
    target = torch.where(kept, kept.cumsum(-1) - 1, number)
    shape = *scores.shape[:-1], number + 1
    best = scores.new_full(shape, -torch.inf).scatter_(-1, target, scores)
    best_places = places.new_full(shape, -1).scatter_(-1, target, places)
    return best[..., :-1], best_places[..., :-1]


class Rows(NamedTuple):
    """Keys that some queries attend to: rows of their own for each query, or the same rows for all of them."""

    rows: Tensor
    """(B, s, k, W + D), or (B, k, W + D) if all queries have the same rows: latents and index keys."""
    seen: Tensor
    """(B, s, k), or (1, s, k): which of the rows a query sees."""

    @property
    def axes(self) -> str:
        """The axes of the rows, without their channels, in the words of `einsum`."""
        return "bk" if self.rows.ndim == 3 else "bsk"


class Attended(NamedTuple):
    """Attention of some queries."""

    queries: Tensor
    """Queries of latents, (B, H, s, W)."""
    weights: Tensor
    """(B, H, s, k), attention weights; 0 for a query that sees nothing."""
    latents: Tensor
    """(B, H, s, R), weighted sums of latents."""
    value_projection: Tensor
    """(H, R, V)."""
    lse: Tensor
    """(B, H, s), log-sum-exp of the scores."""

    @property
    def output(self) -> Tensor:
        """(B, H, s, V)."""
        return self.latents @ self.value_projection


def attend(q: Tensor, keys: Rows, width: int, up: Tensor, scale: float) -> Attended:
    """Return attention of some queries.

    Args:
        q: (B, H, s, N + P).
        keys: The rows.
        width: W = R + P, the channels of a latent.
        up: (H, N + V, R).
        scale: Factor of the scores.
    """
    latents = keys.rows[..., :width]
    rank = up.shape[2]
    # `absorbed` reads the last dimension of latents alone
    queries, value_projection = absorbed(q, latents.flatten(1, -2).unsqueeze(1), up)
    scores = torch.einsum(f"bhsw,{keys.axes}w->bhsk", queries, latents) * scale
    scores = scores.masked_fill(~keys.seen.unsqueeze(1), -torch.inf)
    lse = scores.logsumexp(-1)
    finite = lse.masked_fill(lse == -torch.inf, 0)
    weights = (scores - finite.unsqueeze(-1)).exp()
    sums = torch.einsum(f"bhsk,{keys.axes}r->bhsr", weights, latents[..., :rank])
    return Attended(queries, weights, sums, value_projection, lse)


def attention_gradients(
    dout: Tensor,
    q: Tensor,
    keys: Rows,
    attended: Attended,
    up: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, of latents, (B, s, k, W) or (B, k, W), and of `up`.

    Args:
        dout: (B, H, s, V), the gradient of the output.
        q: (B, H, s, N + P).
        keys: The rows.
        attended: The result of `attend`.
        up: (H, N + V, R).
        scale: Factor of the scores.
    """
    rank = up.shape[2]
    width = attended.queries.shape[-1]
    axes = keys.axes
    latents = keys.rows[..., :width]
    dsums = dout @ attended.value_projection.mT
    dweights = torch.einsum(f"bhsr,{axes}r->bhsk", dsums, latents[..., :rank])
    mean = (dsums * attended.latents).sum(-1, keepdim=True)
    dscores = attended.weights * (dweights - mean) * scale
    dqueries = torch.einsum(f"bhsk,{axes}w->bhsw", dscores, latents)
    drows = torch.einsum(f"bhsk,bhsw->{axes}w", dscores, attended.queries)
    drows[..., :rank] += torch.einsum(f"bhsk,bhsr->{axes}r", attended.weights, dsums)
    kept = q.shape[-1] - (width - rank)
    dlatents = dqueries[..., :rank]
    dq = torch.cat((dlatents @ up[:, :kept].mT, dqueries[..., rank:]), -1)
    dkeys = torch.einsum("bhsn,bhsr->hnr", q[..., :kept], dlatents)
    dvalues = torch.einsum("bhsv,bhsr->hvr", dout, attended.latents)
    return dq, drows, torch.cat((dkeys, dvalues), 1)


class Divergence:
    """The loss of an indexer for some queries.

    Args:
        index: The index of a rank; its keys are not used.
        part: The queries.
        keys: The rows, with index keys in the channels after the latents.
        attended: The attention of the same queries.
    """

    def __init__(self, index: Index, part: slice, keys: Rows, attended: Attended) -> None:
        self._queries, self._weights = (
            wide(index.queries[:, part]),
            wide(index.weights[:, part]),
        )
        self._axes = keys.axes
        self._rows = keys.rows[..., attended.queries.shape[-1] :]
        products = torch.einsum(f"bsjd,{self._axes}d->bsjk", self._queries, self._rows)
        self._products = products.relu()
        scores = (self._weights.unsqueeze(2) @ self._products).squeeze(2)
        scores = scores.masked_fill(~keys.seen, -torch.inf)
        self._log_shares = scores.log_softmax(-1).masked_fill(~keys.seen, 0)
        self._seen = keys.seen
        self._target = attended.weights.mean(1)

    @property
    def loss(self) -> Tensor:
        """(B, s), the divergence of each query; 0 for a query that sees nothing."""
        target = self._target
        return (target.xlogy(target) - target * self._log_shares).sum(-1)

    def gradients(self, dloss: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of queries, of index keys, (B, s, k, D) or (B, k, D), and of weights.

        Args:
            dloss: (B, s), the gradient of the loss.
        """
        shares = self._log_shares.exp().masked_fill(~self._seen, 0)
        dscores = (shares - self._target) * dloss.unsqueeze(-1)
        dweights = (self._products @ dscores.unsqueeze(-1)).squeeze(-1)
        dproducts = dscores.unsqueeze(2) * self._weights.unsqueeze(-1)
        dproducts.masked_fill_(self._products <= 0, 0)
        dqueries = torch.einsum(f"bsjk,{self._axes}d->bsjd", dproducts, self._rows)
        drows = torch.einsum(f"bsjk,bsjd->{self._axes}d", dproducts, self._queries)
        return dqueries, drows, dweights


def chosen_rows(rows: Tensor, chosen: Tensor) -> Rows:
    """Return the rows that queries have chosen, in float32 at least.

    Args:
        rows: The rows of the whole sequence, (B, T, W + D).
        chosen: Their positions for each query, (B, s, k). For -1 it is the first row, marked as not seen.
    """
    seen = chosen >= 0
    places = chosen.clamp(min=0).long().flatten(1).unsqueeze(-1)
    own = rows.gather(1, places.expand(-1, -1, rows.shape[2]))
    return Rows(wide(own).unflatten(1, chosen.shape[1:]), seen)


def visible_rows(rows: Tensor, visible: Tensor) -> Rows:
    """Return the rows up to the last one that some of the queries see, in float32 at least.

    Args:
        rows: The rows of the whole sequence, (B, T, W + D).
        visible: First visible key of each query, and the end of its keys, on the host: (B or 1, s, 2).
    """
    last = int(visible[..., 1].max())
    places = torch.arange(last, device=rows.device)
    bounds = visible.to(rows.device, non_blocking=True)
    return Rows(wide(rows[:, :last]), _is_visible(places, bounds))


def _is_visible(places: Tensor, bounds: Tensor) -> Tensor:
    """Return which keys queries see, (B or 1, s, T). places: (T,) positions of the keys; bounds: (B or 1, s, 2)."""
    start, stop = bounds.split(1, -1)
    return (places >= start) & (places < stop)


def add_rows(total: Tensor, gradient: Tensor, chosen: Tensor) -> None:
    """Add the gradients of rows to the gradients of the whole sequence.

    Args:
        total: (B, T, W + D), which is changed.
        gradient: (B, s, k, W + D); or (B, k, W + D) of the first rows of the sequence.
        chosen: (B, s, k), as in `chosen_rows`. Where it is -1, the gradient must be 0. Not used for the first rows.
    """
    if gradient.ndim == total.ndim:
        total[:, : gradient.shape[1]] += gradient
        return
    offsets = torch.arange(total.shape[0], device=total.device) * total.shape[1]
    places = chosen.clamp(min=0).long() + offsets.view(-1, 1, 1)
    rows = total.flatten(0, 1)
    rows.index_add_(0, places.flatten(), gradient.flatten(0, 2))
