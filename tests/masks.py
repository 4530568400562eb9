"""Masks by their definition, for short sequences."""

import numpy as np

from longshard.context.planning.mask import Mask


def dense(mask: Mask) -> np.ndarray:
    """Return the visible pairs: (sequences, q_len, kv_len) bool."""
    visible = np.zeros((mask.sequences, mask.q_len, mask.kv_len), dtype=bool)
    for band in mask.bands:
        for query in range(band.q_start, band.q_stop):
            number, i = divmod(query, mask.q_len)
            start, stop = (key - number * mask.kv_len for key in band.hull(query, query + 1))
            visible[number, i, start:stop] = True
    return visible
