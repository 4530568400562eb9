"""Stochastic rounding to bfloat16: E[round(x)] = x, so that changes of less than a unit in the last place add up.

The random bits of an element are a hash of a key and of its index in the whole parameter. They do not depend on how
ranks shard the parameter, replicas round alike, and a resumed run has the bits of a run that was not interrupted.
"""

import math
from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from trainer.distributed.sharding.random_bits import parameter_seed, random_bits

_STEP = 0x2545F4914F6CDD1D  # odd, so that steps have different keys


def round_stochastically(x: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Return x in bfloat16: one of its two neighbours, the nearer one with the higher probability.

    x: (n,) float32 or float64; bits: (n,) int64, of which the lowest 16 are used. Values of bfloat16, infinities and
    NaN stay.
    """
    x = x.float()
    sums = (x.view(torch.int32) + (bits & 0xFFFF).int()).bitwise_and_(-0x10000).view(torch.float32)
    return torch.where(x.isnan(), x, sums).bfloat16()


def global_indices(parameter: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Return where elements of this rank's shard are in the whole parameter, flattened: (stop - start,) int64.

    start, stop: range of elements of the flattened shard.
    """
    if not isinstance(parameter, DTensor):
        return torch.arange(start, stop, device=parameter.device)
    local, shape = parameter.to_local(), parameter.shape
    (chunk,) = parameter.__create_chunk_list__()  # what checkpoints read: one block of the whole tensor
    position = torch.arange(start, stop, device=local.device)
    if local.shape[1:] == shape[1:]:  # whole rows
        return position.add_(chunk.offsets[0] * math.prod(shape[1:]) if shape else 0)
    indices, stride = torch.zeros_like(position), 1
    for size, whole, offset in zip(reversed(local.shape), reversed(shape), reversed(chunk.offsets), strict=True):
        indices.add_(position % size + offset, alpha=stride)
        position, stride = position // size, stride * whole
    return indices


class Rounding:
    """How an optimizer stores values in bfloat16.

    names: of the parameters in the model; stochastic: else values are rounded to nearest.
    """

    def __init__(self, names: Mapping[nn.Parameter, str], *, seed: int, stochastic: bool) -> None:
        self._keys = {p: parameter_seed(seed, f"{name}/rounding") for p, name in names.items()} if stochastic else {}

    def bits(self, parameter: nn.Parameter, step: torch.Tensor, start: int, stop: int) -> torch.Tensor | None:
        """Return the bits of elements of the flattened shard in a step: (stop - start,) int64; None: to nearest."""
        if parameter not in self._keys:
            return None
        return random_bits(global_indices(parameter, start, stop), self._keys[parameter] + step.long() * _STEP)


def store(stored: torch.Tensor, value: torch.Tensor, bits: torch.Tensor | None) -> None:
    """Round `value`, (n,), into `stored`, by `bits` if it is of bfloat16; None: to nearest."""
    if value is not stored:
        rounds = bits is not None and stored.dtype == torch.bfloat16
        stored.copy_(round_stochastically(value, bits) if rounds else value)
