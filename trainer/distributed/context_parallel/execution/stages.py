"""The parts of every execution: the calls of a stage, forward and backward, and the sums of their results."""

from collections.abc import Iterator, Sequence

import torch

from trainer.distributed.context_parallel.execution.kernels.base import BackwardInputs, Kernel
from trainer.distributed.context_parallel.execution.merging import merge
from trainer.distributed.context_parallel.planning.lowering import Call, launches
from trainer.distributed.context_parallel.planning.plan import RankPlan
from trainer.distributed.sharding.ranges import Range, Ranges, size


def query_heads(kv_heads: slice, q: torch.Tensor, k: torch.Tensor) -> slice:
    """Return the query heads that share these key/value heads; q: (B, H, S, D), k: (B, K, T, D)."""
    group = q.shape[1] // k.shape[1]
    return slice(kv_heads.start * group, kv_heads.stop * group)


class Merged:
    """The running output (B, H, S, D) and log-sum-exp (B, H, S) of queries over the keys so far, in float32 at least.

    Queries that see no key have output 0 and log-sum-exp -inf. While there is the result of one call only, of all
    queries, that is kept as the kernel returned it: nothing is filled, copied or cast.
    """

    def __init__(self, q: torch.Tensor) -> None:
        self._q = q
        self._lone: tuple[torch.Tensor, torch.Tensor] | None = None
        self._sums: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (out, log-sum-exp), with the memory order of sums: copied only if a kernel has another order."""
        if self._lone is None:
            return self._accumulated()
        out, lse = self._lone
        return out.transpose(1, 2).contiguous().transpose(1, 2), lse.contiguous()

    def _accumulated(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._sums is None:
            b, h, s, d = self._q.shape
            dtype = torch.promote_types(self._q.dtype, torch.float32)
            # (B, S, H, D) in memory, as the output projection reads it
            out = self._q.new_zeros(b, s, h, d, dtype=dtype).transpose(1, 2)
            self._sums = out, self._q.new_full((b, h, s), -torch.inf, dtype=dtype)
            if self._lone is not None:
                for total, part in zip(self._sums, self._lone, strict=True):
                    total.copy_(part)
                self._lone = None
        return self._sums

    def add(self, heads: slice, rows: slice, out: torch.Tensor, lse: torch.Tensor, *, fresh: bool) -> None:
        """Merge results of some heads and queries. fresh: these queries saw no key before."""
        if fresh and out.shape[:3] == self._q.shape[:3]:
            self._lone = out, lse
            return
        total_out, total_lse = (total[:, heads, rows] for total in self._accumulated())
        if fresh:
            total_out.copy_(out)
            total_lse.copy_(lse)
        else:
            merge(total_out, total_lse, out, lse)


def attend(
    total: Merged,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    heads: slice,
    calls: tuple[Call, ...],
    kernel: Kernel,
    scale: float,
) -> None:
    """Compute a stage's calls and merge their results; q, k, v: all rows of these query heads and their K/V heads."""
    for together, out, lse in _results(q, k, v, calls, kernel, scale):
        for rows, places, fresh in _runs([call.q for call in together], [call.fresh for call in together]):
            total.add(heads, rows, out[:, :, places], lse[:, :, places], fresh=fresh)


def _results(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, calls: tuple[Call, ...], kernel: Kernel, scale: float
) -> Iterator[tuple[tuple[Call, ...], torch.Tensor, torch.Tensor]]:
    if kernel.capabilities.many:
        yield from kernel.forward_many(q, k, v, calls, scale=scale)
        return
    for call in calls:
        rows, columns = slice(*call.q), slice(*call.kv)
        keys = k[:, :, columns], v[:, :, columns]
        yield (call,), *kernel.forward(q[:, :, rows], *keys, relation=call.relation, scale=scale)


def add_gradients(
    totals: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    given: BackwardInputs,
    calls: tuple[Call, ...],
    kernel: Kernel,
    scale: float,
) -> None:
    """Add the gradients of a stage's calls to the totals: dq (B, H, S, D), dk, dv (B, K, T, D)."""
    for together, *parts in _gradients(given, calls, kernel, scale):
        for total, part, spans in zip(totals, parts, _spans(together), strict=True):
            for rows, places, _ in _runs(spans):
                total[:, :, rows] += part[:, :, places]


def lone_gradients(
    given: BackwardInputs, calls: tuple[Call, ...], kernel: Kernel, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Return dq, dk and dv as the kernel makes them if one launch has all rows in their order, else None."""
    parts = launches(calls) if kernel.capabilities.many else [(call,) for call in calls]
    everything = [[(0, x.shape[2])] for x in (given.q, given.k, given.v)]
    if len(parts) != 1 or [[(r.start, r.stop) for r, *_ in _runs(s)] for s in _spans(parts[0])] != everything:
        return None
    ((_, *gradients),) = _gradients(given, calls, kernel, scale)
    return tuple(gradients)


def _gradients(
    given: BackwardInputs, calls: tuple[Call, ...], kernel: Kernel, scale: float
) -> Iterator[tuple[tuple[Call, ...], torch.Tensor, torch.Tensor, torch.Tensor]]:
    if kernel.capabilities.many:
        yield from kernel.backward_many(given, calls, scale=scale)
        return
    for call in calls:
        yield (call,), *kernel.backward(*_of_call(given, call), relation=call.relation, scale=scale)


def _of_call(given: BackwardInputs, call: Call) -> BackwardInputs:
    rows, columns = slice(*call.q), slice(*call.kv)
    places = (rows, rows, columns, columns, rows, rows)
    return BackwardInputs(*(x[:, :, place] for x, place in zip(given, places, strict=True)))


def _spans(calls: tuple[Call, ...]) -> tuple[list[Range], list[Range], list[Range]]:
    """Return the rows of dq, dk and dv of each call."""
    queries, keys = [call.q for call in calls], [call.kv for call in calls]
    return queries, keys, keys


def _runs(spans: list[Range], kinds: list[bool] | None = None) -> Iterator[tuple[slice, slice, bool]]:
    """Yield (rows, places, kind) of each longest run of adjacent spans of one kind.

    rows: of the run; places: of these rows among the rows of all spans, one after another.
    """
    kinds = kinds or [False] * len(spans)
    first = place = 0
    for number, ((_, stop), kind) in enumerate(zip(spans, kinds, strict=True), 1):
        last = number == len(spans)
        if last or spans[number][0] != stop or kinds[number] != kind:
            length = stop - spans[first][0]
            yield slice(spans[first][0], stop), slice(place, place + length), kind
            first, place = number, place + length


def fold_batch(x: torch.Tensor, plan: RankPlan) -> torch.Tensor:
    """Return (B, H, S, ...) as (1, H, B * S, ...) if sequences have masks of their own, else as it is."""
    if plan.sequences == 1:
        return x
    b, h, s, *rest = x.shape
    return x.transpose(1, 2).reshape(1, b * s, h, *rest).transpose(1, 2)


def unfold_batch(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Undo `fold_batch`, for the shape (B, H, S) of `like`; (B, H, S, D) has the memory order (B, S, H, D)."""
    b, h, s = like.shape[:3]
    rest = x.shape[3:]
    if not rest:
        return x if x.shape == (b, h, s) else x.view(h, b, s).transpose(0, 1).contiguous()
    return x.transpose(1, 2).reshape(b, s, h, *rest).transpose(1, 2)


def as_before(x: torch.Tensor, like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Undo `fold_batch`, and return the shape and strides of `like`, (B, H, S, D), and by default its dtype.

    `x` is returned itself if it has them already and shares its memory with no other tensor, else copied.
    """
    x, result = unfold_batch(x, like), torch.empty_like(like, dtype=dtype)
    # For an empty tensor, 0 == 0 bytes does not exclude sharing, and operators must not return views of one storage.
    owns_memory = x.numel() > 0 and x.untyped_storage().nbytes() == x.nbytes
    if owns_memory and (x.dtype, x.stride()) == (result.dtype, result.stride()):
        return x
    return result.copy_(x)


def pack(k: torch.Tensor, v: torch.Tensor, places: Ranges, into: torch.Tensor | None = None) -> torch.Tensor:
    """Return rows of K and V (B, K, T, D) as (rows, 2, B, K, D), contiguous, or as the first rows of `into`."""
    b, heads, _, d = k.shape
    rows = k.new_empty(size(places), 2, b, heads, d) if into is None else into
    offset = 0
    for start, stop in places:
        target = rows[offset : offset + stop - start]
        for part, source in zip(unpack(target), (k, v), strict=True):
            part.copy_(source[:, :, start:stop])
        offset += stop - start
    return rows


def unpack(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V of (T, 2, B, K, D) as views (B, K, T, D)."""
    k, v = rows.permute(1, 2, 3, 0, 4)
    return k, v


def with_next(items: Sequence) -> Iterator[tuple]:
    """Yield each item with the next one, the last with None."""
    return zip(items, (*items[1:], None), strict=True)
