"""Compare the positions that a model uses on a rank with the positions of its tokens in the sequence or documents."""

import weakref
from functools import reduce
from operator import or_

import numpy as np
import torch
from torch import Tensor

from longshard.context.live import LivePlan
from longshard.sharding.tensors import version_of

_RESTARTED, _NOT_GLOBAL, _NOT_BY_DOCUMENT = 1, 2, 4


class Positions:
    """The positions that a model was seen to use on this rank.

    A model without positions counts a rank's part of the sequence from 0. This is right if the part begins a sequence
    or a document, and only if the other ranks count in the same way. So the ranks compare their `flags`.

    Args:
        live: The plan of the context.
    """

    def __init__(self, live: LivePlan) -> None:
        tokens = live.layout.indices(live.rank)
        self._global = torch.from_numpy(tokens)
        starts = [tokens] if live.mask is None else list(_places_in_documents(live, tokens))
        self._by_document = [torch.from_numpy(x) for x in starts]
        self._last = None
        self.flags = 0

    def see(self, positions: object) -> bool:
        """Compare a value that may be positions with the rank's tokens, and note differences in `flags`.

        Positions are an integer tensor, (..., tokens of this rank).

        Args:
            positions: The value.

        Returns:
            Whether it may be positions, and was not checked just before. No shape decides this, so that ranks agree.
        """
        if not isinstance(positions, Tensor) or positions.dtype not in (
            torch.int64,
            torch.int32,
        ):
            return False
        version = version_of(positions)
        if self._last is not None and self._last[0]() is positions and self._last[1] == version:
            return False
        self._last = weakref.ref(positions), version
        self._compare(positions)
        return True

    def _compare(self, positions: Tensor) -> None:
        if positions.ndim == 0 or positions.shape[-1] != len(self._global):
            return
        x = positions.detach().reshape(-1, positions.shape[-1]).to("cpu", torch.int64)
        is_global = bool(_agree(x, self._global).all())
        is_by_document = bool(
            torch.stack([_agree(x, places) for places in self._by_document]).any(0).all()
        )
        restarted = not is_global and bool(_agree(x, torch.arange(x.shape[1])).all())
        if is_global or is_by_document or restarted:
            self.flags |= _RESTARTED * restarted | _NOT_GLOBAL * (not is_global)
            self.flags |= _NOT_BY_DOCUMENT * (not is_by_document)

    def refusal_of_ranks(self, flags: list[int]) -> str | None:
        """Return why positions are wrong, or None. Reset this rank's flags.

        Positions are right if all ranks count the sequence, or all count the documents. They also pass if no rank
        counts from 0 where its tokens are not the sequence's first.

        Args:
            flags: The flags of each rank.
        """
        self.flags = 0
        if reduce(or_, flags) != _RESTARTED | _NOT_GLOBAL | _NOT_BY_DOCUMENT:
            return None
        return (
            f"the model counts positions from 0 on rank(s) {[rank for rank, x in enumerate(flags) if x & _RESTARTED]} "
            "of the group, where its tokens are not the sequence's first. Give it global `position_ids`, cut as a "
            "buffer of `context_parallel`, or positions in documents together with their mask"
        )


def _agree(x: Tensor, places: Tensor) -> Tensor:
    """Return for each row of x, (rows, n), whether it is `places`, (n,), plus an offset, which some tables have."""
    offset = x - places
    return (offset == offset[:, :1]).all(1) & (offset[:, 0] >= 0)


def _places_in_documents(live: LivePlan, tokens: np.ndarray) -> list[np.ndarray]:
    """Return, for each sequence of the mask, the positions of tokens counted from the first key that each may see."""
    places = []
    for number in range(live.mask.sequences):
        bands = live.mask.sequence(number).bands
        starts = np.array([band.q_start for band in bands], dtype=np.int64)
        band = np.searchsorted(starts, tokens, side="right") - 1
        firsts = np.array([band.kv_start for band in bands], dtype=np.int64)
        places.append(
            np.where(band >= 0, tokens - firsts[np.maximum(band, 0)], tokens)
            if len(bands)
            else tokens
        )
    return places
