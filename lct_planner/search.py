"""Searches the longest sequence that fits, by many estimates of one job. Torch-free."""

from collections.abc import Callable, Mapping, Sequence

from lct_planner.estimate import Estimate

Estimator = Callable[[Sequence[str]], Estimate]
"""Arguments of a command line -> estimate. Raises ConfigError for settings that do not go together."""
_NEAR = 0.02
"""Part of the length that the search does not resolve."""


def longest_sequence(
    estimate: Estimator, arguments: Sequence[str], begin: int, unit: int, most: int = 1 << 27
) -> tuple[Estimate | None, Estimate]:
    """Return the estimate of the longest sequence that fits, None if none does, and of a sequence that does not fit.

    The search ends within 2 % or one unit, or 12 tries after the first two. If all sequences up to `most` fit, the
    second estimate is of a longer one, which may fit, too. Memory is nearly a straight line over the length. So the
    next try is where the line through the last two tries reaches the device's memory.

    Args:
        estimate: Makes estimates.
        arguments: Command line of the job.
        begin: The first length to try.
        unit: Lengths are multiples of this number.
        most: Largest length.
    """
    tried: dict[int, Estimate] = {}

    def at(length: int) -> Estimate:
        if length not in tried:
            tried[length] = estimate([*arguments, f"--training.seq_len={length}"])
        return tried[length]

    length = max(begin // unit, 1) * unit
    at(length)
    at(2 * length)
    for _ in range(12):
        fitting = max((n for n, trial in tried.items() if trial.fits), default=0)
        failing = min((n for n, trial in tried.items() if not trial.fits), default=most)
        if (
            failing - fitting <= max(unit, _NEAR * fitting)
            or fitting >= most
            or failing <= unit
        ):
            break
        guess = _next_length(tried, fitting, failing, unit, most)
        at(guess)
    fits = [trial for trial in tried.values() if trial.fits]
    longest = max(fits, key=lambda trial: trial.job.positions, default=None)
    if tried[max(tried)].fits:
        at(2 * max(tried))
    at_least = 0 if longest is None else longest.job.positions
    beyond = (trial for trial in tried.values() if trial.job.positions > at_least)
    return longest, min(beyond, key=lambda trial: trial.job.positions)


def _next_length(
    tried: Mapping[int, Estimate], fitting: int, failing: int, unit: int, most: int
) -> int:
    """Return the length to try next.

    fitting: the longest length that fits, 0 for none; failing: the shortest length that does not, `most` for none.
    """
    (n, one), (m, other) = (
        sorted(tried.items())[-2:]
        if not fitting or failing == most
        else (
            (fitting, tried[fitting]),
            min((k, v) for k, v in tried.items() if k > fitting),
        )
    )
    slope = (other.total - one.total) / (m - n)
    wanted = n + (one.device.memory - one.total) / slope if slope > 0 else 2 * m
    wanted = min(
        max(wanted, fitting + _NEAR / 2 * fitting), failing - _NEAR / 2 * fitting, 8 * m
    )
    guess = min(max(int(wanted) // unit, 1) * unit, most)
    if guess in tried:
        return (fitting + (min(failing, 2 * fitting) or failing)) // 2 // unit * unit
    return guess
