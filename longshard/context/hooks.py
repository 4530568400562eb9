"""What a process adds to each call of attention in a context: a function that takes scores, and its GPU kernels."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from longshard.context.execution.kernels.choose import GPU_KERNELS, GpuKernels

ScoreFunction = Callable[[int, Tensor], None]
"""Takes the layer (-1 if none is named) and the log-sum-exp of the scores of one call, (B, H, S), -inf in padding."""


@dataclass(frozen=True)
class Scores:
    """A function that takes the scores of each call of attention inside a context.

    Attributes:
        take: The function.
        padding: (B, S) bool of the whole sequences, true in padding; None if absent.
    """

    take: ScoreFunction
    padding: Tensor | None = None


@dataclass(frozen=True)
class AttentionHooks:
    """What a process adds to each call of attention in a context.

    Attributes:
        scores: Takes the scores; None if absent.
        gpu: The GPU kernels of this process.
    """

    scores: Scores | None = None
    gpu: GpuKernels = GPU_KERNELS


NO_HOOKS = AttentionHooks()
