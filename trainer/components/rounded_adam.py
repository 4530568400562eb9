"""Adam and AdamW for weights or moments that are stored in another data type than that of the update.

The update runs in float32 (float64 for float64 weights), by PyTorch's kernels, over a piece of elements at a time:

    weights, moments (n,) bfloat16 -> float32 -> adam -> float32 -> rounded -> (n,) bfloat16

What is not stored in bfloat16 is updated in place, or rounded to nearest.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.adam import adam

from trainer.components.rounding import global_indices, round_stochastically
from trainer.config.schema import JobConfig
from trainer.distributed.sharding.tensors import local_part
from trainer.transforms.random_bits import parameter_seed, random_bits

PIECE, PIECE_ON_CPU = 2**22, 2**18  # which the caches of a CPU hold
"""Elements that are copied at once; copies and random bits take at most 60 bytes each."""
_STEP = 0x2545F4914F6CDD1D  # odd, so that steps have different keys


def initial_state(parameter: nn.Parameter, *, dtype: torch.dtype | None, fused: bool) -> dict[str, torch.Tensor]:
    """Return the state of a parameter that was never updated. dtype: of the moments; None: the parameter's."""
    return {
        "step": torch.zeros((), dtype=torch.float32, device=parameter.device if fused else "cpu"),
        "exp_avg": torch.zeros_like(parameter, dtype=dtype, requires_grad=False),
        "exp_avg_sq": torch.zeros_like(parameter, dtype=dtype, requires_grad=False),
    }


class RoundedAdam(torch.optim.Adam):
    """See the module. `mask_update` works as with PyTorch's own: a value of bfloat16 is rounded to itself."""

    def __init__(
        self, groups: list[dict[str, Any]], config: JobConfig, names: dict[nn.Parameter, str], **how: Any
    ) -> None:
        """how: arguments of `torch.optim.Adam`."""
        settings = config.optimizer
        super().__init__(groups, decoupled_weight_decay=settings.name == "AdamW", **how)
        self.state_dtype: torch.dtype = getattr(torch, config.state_dtype)
        self._stochastic = settings.rounding == "stochastic"
        self._keys = {p: parameter_seed(config.training.seed, f"{name}/rounding") for p, name in names.items()}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update all parameters that have a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    if not self.state[parameter]:
                        fused = bool(group["fused"])
                        self.state[parameter] = initial_state(parameter, dtype=self.state_dtype, fused=fused)
                    self._update(parameter, group)

    def _update(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        state, gradient = self.state[parameter], local_part(parameter.grad).view(-1)
        stored = [local_part(x).view(-1) for x in (parameter, state["exp_avg"], state["exp_avg_sq"])]
        wide = torch.promote_types(parameter.dtype, torch.float32)
        key, size = self._keys[parameter] + state["step"].long() * _STEP, len(gradient)
        piece = PIECE_ON_CPU if gradient.device.type == "cpu" else PIECE
        for start in range(0, max(size, 1), piece):
            stop = min(start + piece, size)
            pieces = [x[start:stop] for x in stored]
            copies = [x.to(wide) for x in pieces]  # or the pieces themselves
            adam(
                *([x] for x in (copies[0], gradient[start:stop].to(wide), *copies[1:])),
                [],
                [state["step"] if stop == size else state["step"].clone()],
                foreach=group["foreach"],
                fused=group["fused"],
                found_inf=getattr(self, "found_inf", None),
                decoupled_weight_decay=group["decoupled_weight_decay"],
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
            rounds = self._stochastic and any(x.dtype == torch.bfloat16 for x in pieces)
            bits = random_bits(global_indices(parameter, start, stop), key) if rounds else None
            _store(pieces, copies, bits)


def _store(pieces: Sequence[torch.Tensor], values: Sequence[torch.Tensor], bits: torch.Tensor | None) -> None:
    """Round the values into the pieces, each with 16 of the bits; None: to nearest."""
    for number, (piece, value) in enumerate(zip(pieces, values, strict=True)):
        if value is not piece:
            rounds = bits is not None and piece.dtype == torch.bfloat16
            piece.copy_(round_stochastically(value, bits >> 16 * number) if rounds else value)
