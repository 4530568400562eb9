"""How far numbers of two runs are apart."""

from collections.abc import Sequence


def largest_difference(values: Sequence[float], others: Sequence[float]) -> float:
    """Return the largest relative difference of two sequences of the same length.

    Args:
        values: The values.
        others: The values to compare with; the differences are relative to these.
    """
    return max(abs(a - b) / abs(b) for a, b in zip(values, others, strict=True))
