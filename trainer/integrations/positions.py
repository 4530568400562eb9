"""Positions that a model was given or made up, against where this rank's tokens stand."""

import numpy as np
import torch

from trainer.distributed.context_parallel.live import LivePlan

_RESTARTED, _NOT_GLOBAL, _NOT_BY_DOCUMENT = 1, 2, 4


class Positions:
    """The positions that a rank's part of the model works with, as far as it was seen.

    A model that is given none counts its part of the sequence from 0. This is right where the part begins a sequence,
    or is one document of which the positions begin anew, and only if the other ranks count alike. `flags` is what the
    ranks compare; `are_wrong` decides on those of all ranks.
    """

    def __init__(self, live: LivePlan) -> None:
        tokens = live.layout.indices(live.mesh.get_local_rank())
        self._global = torch.from_numpy(tokens)
        starts = [tokens] if live.mask is None else list(_places_in_documents(live, tokens))
        self._by_document = [torch.from_numpy(x) for x in starts]
        self.flags = 0

    def see(self, positions: object) -> None:
        """Look at what may be positions: an integer tensor (..., tokens of this rank), else nothing."""
        if not isinstance(positions, torch.Tensor) or positions.dtype not in (torch.int64, torch.int32):
            return
        if positions.ndim == 0 or positions.shape[-1] != len(self._global):
            return
        x = positions.detach().reshape(-1, positions.shape[-1]).to("cpu", torch.int64)
        is_global = bool(_agree(x, self._global).all())
        is_by_document = bool(torch.stack([_agree(x, places) for places in self._by_document]).any(0).all())
        restarted = not is_global and bool(_agree(x, torch.arange(x.shape[1])).all())
        if is_global or is_by_document or restarted:
            self.flags |= _RESTARTED * restarted | _NOT_GLOBAL * (not is_global)
            self.flags |= _NOT_BY_DOCUMENT * (not is_by_document)

    @staticmethod
    def were_counted_here(flags: int) -> bool:
        """Return whether a rank with these flags counted from the start of its part."""
        return bool(flags & _RESTARTED)

    @staticmethod
    def are_wrong(flags: list[int]) -> bool:
        """Return whether a rank counted its part from 0, and all together neither the row nor its documents."""
        everything = 0
        for each in flags:
            everything |= each
        return everything == _RESTARTED | _NOT_GLOBAL | _NOT_BY_DOCUMENT


def _agree(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return for each row of x (rows, n) whether it is `places` (n,) plus an offset, as tables of positions have."""
    offset = x - places
    return (offset == offset[:, :1]).all(1) & (offset[:, 0] >= 0)


def _places_in_documents(live: LivePlan, tokens: np.ndarray) -> list[np.ndarray]:
    """For each row of the mask, the places of tokens counted from the first key that each one may see."""
    places = []
    for row in range(live.mask.sequences):
        bands = live.mask.sequence(row).bands
        starts = np.array([band.q_start for band in bands], dtype=np.int64)
        band = np.searchsorted(starts, tokens, side="right") - 1
        firsts = np.array([band.kv_start for band in bands], dtype=np.int64)
        places.append(np.where(band >= 0, tokens - firsts[np.maximum(band, 0)], tokens) if len(bands) else tokens)
    return places
