"""Stochastic rounding to bfloat16: E[round(x)] = x, so that changes of less than a unit in the last place add up.

The random bits of an element are a hash of a key and of its index in the whole parameter. They do not depend on how
ranks shard the parameter, replicas round alike, and a resumed run has the bits of a run that was not interrupted.

`RoundedAdam` is Adam and AdamW for weights or moments whose stored dtype differs from the dtype of the update. The
update runs in float32 (float64 for float64 weights), by PyTorch's kernels, over a piece of elements at a time:

    weights, moments (n,) bfloat16 -> float32 -> adam -> float32 -> rounded -> (n,) bfloat16

Values of other stored dtypes are updated in place, or rounded to nearest.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adam import adam

from longshard.sharding.random_bits import parameter_seed, random_bits
from longshard.sharding.tensors import local_part, wide_type

Group = dict[str, Any]
"""A group of parameters with their settings, as PyTorch's optimizers have it."""
_STEP = 0x2545F4914F6CDD1D  # odd, so that steps have different keys
PIECE = 2**22
PIECE_ON_CPU = 2**18  # the caches of a CPU hold this many
"""Elements that are copied at once; copies and random bits take at most 60 bytes each."""


def round_stochastically(x: Tensor, bits: Tensor) -> Tensor:
    """Return x in bfloat16: one of its two neighbours, the nearer one with the higher probability.

    Values of bfloat16, infinities and NaN stay.

    Args:
        x: (n,), float32 or float64.
        bits: (n,), int64; the lowest 16 bits are used.
    """
    x = x.float()
    sums = (
        (x.view(torch.int32) + (bits & 0xFFFF).int()).bitwise_and_(-0x10000).view(torch.float32)
    )
    return torch.where(x.isnan(), x, sums).bfloat16()


def global_indices(parameter: Tensor, start: int, stop: int) -> Tensor:
    """Return the indices of elements of this rank's shard in the whole flattened parameter: (stop - start,), int64.

    Args:
        parameter: Any shape, a DTensor if it is sharded.
        start: First element of the flattened shard.
        stop: End of the range of elements.
    """
    if not isinstance(parameter, DTensor):
        return torch.arange(start, stop, device=parameter.device)
    local = parameter.to_local()
    shape = parameter.shape
    # the block of the whole tensor that checkpoints read
    (chunk,) = parameter.__create_chunk_list__()
    position = torch.arange(start, stop, device=local.device)
    if local.shape[1:] == shape[1:]:  # whole rows
        return position.add_(chunk.offsets[0] * math.prod(shape[1:]) if shape else 0)
    indices = torch.zeros_like(position)
    stride = 1
    for size, whole, offset in zip(
        reversed(local.shape), reversed(shape), reversed(chunk.offsets), strict=True
    ):
        indices.add_(position % size + offset, alpha=stride)
        position //= size
        stride *= whole
    return indices


class Rounding:
    """How an optimizer stores values in bfloat16.

    Args:
        names: Names of the parameters in the model.
        seed: Seed of the job.
        stochastic: Round stochastically, otherwise to nearest.
    """

    def __init__(
        self, names: Mapping[nn.Parameter, str], *, seed: int, stochastic: bool
    ) -> None:
        self._keys = {
            p: parameter_seed(seed, f"{name}/rounding")
            for p, name in names.items()
            if stochastic
        }

    def bits(
        self, parameter: nn.Parameter, step: Tensor, start: int, stop: int
    ) -> Tensor | None:
        """Return the bits of elements of the flattened shard in a step, (stop - start,), int64. None: round to nearest.

        Args:
            parameter: The parameter.
            step: Number of the step, a scalar.
            start: First element of the flattened shard.
            stop: End of the range of elements.
        """
        if parameter not in self._keys:
            return None
        return random_bits(
            global_indices(parameter, start, stop), self._keys[parameter] + step.long() * _STEP
        )


def store(stored: Tensor, value: Tensor, bits: Tensor | None) -> None:
    """Round `value` into `stored`.

    Args:
        stored: (n,), changed in place.
        value: (n,).
        bits: (n,), used if `stored` is bfloat16. None: round to nearest.
    """
    if value is not stored:
        rounds = bits is not None and stored.dtype == torch.bfloat16
        stored.copy_(round_stochastically(value, bits) if rounds else value)


MOMENTS = ("exp_avg", "exp_avg_sq")
_SETTINGS = ("foreach", "fused", "decoupled_weight_decay", "lr", "weight_decay", "eps")
"""Settings of a group that are arguments of PyTorch's function too."""


def add_state(
    optimizer: torch.optim.Optimizer,
    groups: Sequence[Group],
    moments: Sequence[str],
    dtype: torch.dtype | None,
) -> None:
    """Give parameters that were never updated their first state.

    Args:
        optimizer: The optimizer, changed in place.
        groups: Its groups of these parameters; `fused` says whether it has fused kernels.
        moments: Names of the moments.
        dtype: Dtype of the moments. None: the parameter's dtype.
    """
    for group in groups:
        for p in group["params"]:
            if not optimizer.state[p]:
                device = p.device if group["fused"] else "cpu"
                state = {"step": torch.zeros((), dtype=torch.float32, device=device)}
                for name in moments:
                    state[name] = torch.zeros_like(p, dtype=dtype, requires_grad=False)
                optimizer.state[p] = state


class RoundedAdam(torch.optim.Adam):
    """Adam and AdamW with rounding, see the module. `mask_update` works, because a bfloat16 value is rounded to itself.

    Args:
        groups: Groups of parameters.
        rounding: How values are stored in bfloat16.
        moments: Dtype of both moments.
        **how: Arguments of `torch.optim.Adam`.
    """

    def __init__(
        self, groups: list[Group], rounding: Rounding, moments: torch.dtype, **how: Any
    ) -> None:
        super().__init__(groups, **how)
        self.state_dtype = moments
        self._rounding = rounding

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy of this optimizer shares with it."""
        return super().__getstate__() | {
            "state_dtype": self.state_dtype,
            "_rounding": self._rounding,
        }

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update all parameters that have a gradient.

        Args:
            closure: Not used.
        """
        add_state(self, self.param_groups, MOMENTS, self.state_dtype)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: nn.Parameter, group: Group) -> None:
        state = self.state[parameter]
        gradient = local_part(parameter.grad).view(-1)
        stored = [
            local_part(x).view(-1) for x in (parameter, *(state[name] for name in MOMENTS))
        ]
        wide = wide_type(parameter.dtype)
        size = len(gradient)
        before = state["step"].clone()
        piece = PIECE_ON_CPU if gradient.device.type == "cpu" else PIECE
        for start in range(0, max(size, 1), piece):
            stop = min(start + piece, size)
            pieces = [x[start:stop] for x in stored]
            copies = [x.to(wide) for x in pieces]  # or the pieces themselves
            adam(
                *([x] for x in (copies[0], gradient[start:stop].to(wide), *copies[1:])),
                [],
                [state["step"] if stop == size else state["step"].clone()],
                **{name: group[name] for name in _SETTINGS},
                found_inf=getattr(self, "found_inf", None),
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                maximize=False,
            )
            halves = any(x.dtype == torch.bfloat16 for x in pieces)
            bits = self._rounding.bits(parameter, before, start, stop) if halves else None
            for number, (target, value) in enumerate(zip(pieces, copies, strict=True)):
                store(target, value, None if bits is None else bits >> 16 * number)
