"""The longest sequence that fits, and the settings that are fastest: many estimates of one job. Torch-free."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainer.config.errors import ConfigError
from trainer.distributed.context_parallel.planning.methods import METHODS
from trainer.planner.estimate import Estimate

Estimator = Callable[[Sequence[str]], Estimate]
"""Arguments of a command line -> estimate. Raises ConfigError for settings that do not go together."""
_NEAR = 0.02
"""Part of the length that the search does not resolve."""
_METHODS = sorted(
    (name for name, method in METHODS.items() if method.divides_heads != method.overlaps and not method.two_level),
    key=lambda name: METHODS[name].overlaps,
)
"""Methods to try, those with fewer kernels first."""
_NEAR_SPEED = 0.05
"""Part of the speed that the model of time does not resolve."""


def longest_sequence(
    estimate: Estimator, arguments: Sequence[str], begin: int, unit: int, most: int = 1 << 27
) -> tuple[Estimate | None, Estimate]:
    """Return the estimate of the longest sequence that fits, None if none does, and of one that does not.

    begin: where to look first; unit: lengths are multiples of it. Memory is nearly a straight line over the length, so
    each try is where the line of the last two meets the device's memory.
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
        fitting = max((n for n, found in tried.items() if found.fits), default=0)
        failing = min((n for n, found in tried.items() if not found.fits), default=most)
        if failing - fitting <= max(unit, _NEAR * fitting) or fitting >= most or failing <= unit:
            break
        (n, one), (m, other) = (
            sorted(tried.items())[-2:]
            if not fitting or failing == most
            else ((fitting, tried[fitting]), min((k, v) for k, v in tried.items() if k > fitting))
        )
        slope = (other.total - one.total) / (m - n)
        wanted = n + (one.device.memory - one.total) / slope if slope > 0 else 2 * m
        wanted = min(max(wanted, fitting + _NEAR / 2 * fitting), failing - _NEAR / 2 * fitting, 8 * m)
        guess = min(max(int(wanted) // unit, 1) * unit, most)
        if guess in tried:
            guess = (fitting + (min(failing, 2 * fitting) or failing)) // 2 // unit * unit
        at(guess)
    fits = [found for found in tried.values() if found.fits]
    longest = max(fits, key=lambda found: found.job.positions, default=None)
    if all(found.fits for found in tried.values()):
        at(2 * max(tried))
    at_least = 0 if longest is None else longest.job.positions
    beyond = (found for found in tried.values() if found.job.positions > at_least)
    return longest, min(beyond, key=lambda found: found.job.positions)


@dataclass(frozen=True)
class Choice:
    """Settings, in words of the command line, and their estimate."""

    settings: tuple[str, ...]
    estimate: Estimate
    order: tuple[int, int, int]
    """Of choices that are as fast: the least first."""


def suggestions(estimate: Estimator, arguments: Sequence[str], ranks: int, host_memory: float) -> list[Choice]:
    """Return the choices that fit, by tokens a second, the fastest first.

    Of speeds that differ by less than the model of time can tell, the choice with fewer ranks for a sequence, and with
    fewer kernels, comes first. host_memory: bytes for each rank, which offloaded inputs may take.
    """
    found: list[Choice] = []
    for tp in (n for n in (1, 2, 4, 8) if ranks % n == 0):
        for place, method in enumerate(_METHODS):
            least = 1 if place == 0 else 2
            for cp in (n for n in range(ranks // tp, least - 1, -1) if ranks // tp % n == 0):
                try:
                    choice = _first_that_fits(estimate, arguments, (cp, tp, method), host_memory)
                except ConfigError:  # degrees that do not go together with the job
                    continue
                if choice is None:
                    break  # fewer ranks for a sequence take more memory
                found.append(choice)
    found.sort(key=lambda choice: -choice.estimate.tokens_per_second)
    ranked: list[Choice] = []
    while found:
        least = found[0].estimate.tokens_per_second * (1 - _NEAR_SPEED)
        equal = [choice for choice in found if choice.estimate.tokens_per_second >= least]
        ranked += sorted(equal, key=lambda choice: choice.order)
        found = found[len(equal) :]
    return ranked


def _first_that_fits(
    estimate: Estimator, arguments: Sequence[str], degrees: tuple[int, int, str], host_memory: float
) -> Choice | None:
    """Return the choice of these degrees that recomputes least, None if none fits.

    Raises:
        ConfigError: these degrees do not go together with the job.
    """
    cp, tp, method = degrees
    p, a = "--parallelism.", "--activation_checkpoint."
    settings = [f"{p}context_parallel_degree={cp}", f"{p}tensor_parallel_degree={tp}"]
    settings += [f"{p}context_parallel_method={method}"] if cp > 1 else []
    recomputed = (
        (f"{a}mode=selective", f"{a}selective_ac_option=op"),
        (f"{a}mode=full",),
        (f"{a}mode=full", f"{a}offload=inputs", f"{a}mlp_chunk_tokens=8192", "--compile.components=loss"),
    )
    for modes in recomputed:
        answer = estimate([*arguments, *settings, *modes])
        if answer.fits and answer.profile.totals["host"] <= host_memory:
            return Choice((*settings, *modes), answer, (cp * tp, tp, _METHODS.index(method)))
    return None
