"""The longest sequence that fits, and the settings that are fastest: many estimates of one job. Torch-free."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from trainer.config.errors import ConfigError
from trainer.planner.estimate import Estimate

Estimator = Callable[[Sequence[str]], Estimate]
"""Arguments of a command line -> estimate. Raises ConfigError for settings that do not go together."""
_NEAR = 0.02
"""Part of the length that the search does not resolve."""


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
        at(guess if guess not in tried else (fitting + failing) // 2 // unit * unit)
    fits = [found for found in tried.values() if found.fits]
    longest = max(fits, key=lambda found: found.job.positions, default=None)
    rest = [found for found in tried.values() if not found.fits]
    return longest, min(rest, key=lambda found: found.job.positions, default=at(2 * max(tried)))


@dataclass(frozen=True)
class Choice:
    """Settings, in words of the command line, and their estimate."""

    settings: tuple[str, ...]
    estimate: Estimate


def suggestions(estimate: Estimator, arguments: Sequence[str], ranks: int, host_memory: float) -> list[Choice]:
    """Return the choices that fit, by tokens a second, the fastest first; of equal ones the simplest.

    host_memory: bytes for each rank, which offloaded inputs may take.
    """
    found: list[Choice] = []
    for settings in candidates(ranks):
        try:
            answer = estimate([*arguments, *settings])
        except ConfigError:  # settings that do not go together
            continue
        if answer.fits and answer.profile.totals["host"] <= host_memory:
            found.append(Choice(settings, answer))
    return sorted(found, key=lambda choice: (-round(choice.estimate.tokens_per_second, -1), len(choice.settings)))


def candidates(ranks: int) -> Iterator[tuple[str, ...]]:
    """Yield settings: degrees of context and tensor parallelism, methods, and what the backward recomputes."""
    p, a = "--parallelism.", "--activation_checkpoint."
    recomputed = (
        (f"{a}mode=selective", f"{a}selective_ac_option=op"),
        (f"{a}mode=full",),
        (f"{a}mode=full", f"{a}offload=inputs", f"{a}mlp_chunk_tokens=8192", "--compile.components=loss"),
    )
    for cp in (2**i for i in range(int(math.log2(ranks)) + 1)):
        for tp in (1, 2, 4, 8):
            if ranks % (cp * tp):
                continue
            for method in ("all_to_all", "ring") if cp > 1 else ("",):
                degrees = [f"{p}context_parallel_degree={cp}", f"{p}tensor_parallel_degree={tp}"]
                degrees += [f"{p}context_parallel_method={method}"] if method else []
                for modes in recomputed:
                    yield (*degrees, *modes)
