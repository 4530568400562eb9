"""Adam and AdamW for weights or moments that are stored in another data type than that of the update.

The update runs in float32 (float64 for float64 weights), by PyTorch's kernels, over a piece of elements at a time:

    weights, moments (n,) bfloat16 -> float32 -> adam -> float32 -> rounded -> (n,) bfloat16

What is not stored in bfloat16 is updated in place, or rounded to nearest.
"""

from typing import Any

import torch
from torch import nn
from torch.optim.adam import adam

from trainer.components.rounding import Rounding, store
from trainer.distributed.sharding.tensors import local_part

PIECE, PIECE_ON_CPU = 2**22, 2**18  # which the caches of a CPU hold
"""Elements that are copied at once; copies and random bits take at most 60 bytes each."""


def initial_state(parameter: nn.Parameter, *, dtype: torch.dtype | None, fused: bool) -> dict[str, torch.Tensor]:
    """Return the state of a parameter that was never updated. dtype: of the moments; None: the parameter's."""
    return {
        "step": torch.zeros((), dtype=torch.float32, device=parameter.device if fused else "cpu"),
        "exp_avg": torch.zeros_like(parameter, dtype=dtype, requires_grad=False),
        "exp_avg_sq": torch.zeros_like(parameter, dtype=dtype, requires_grad=False),
    }


class RoundedAdam(torch.optim.Adam):
    """See the module. `mask_update` works as with PyTorch's own: a value of bfloat16 is rounded to itself."""

    def __init__(self, groups: list[dict[str, Any]], rounding: Rounding, moments: torch.dtype, **how: Any) -> None:
        """moments: data type of both; how: arguments of `torch.optim.Adam`."""
        super().__init__(groups, **how)
        self.state_dtype, self._rounding = moments, rounding

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
        size, before = len(gradient), state["step"].clone()
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
            halves = any(x.dtype == torch.bfloat16 for x in pieces)
            bits = self._rounding.bits(parameter, before, start, stop) if halves else None
            for number, (target, value) in enumerate(zip(pieces, copies, strict=True)):
                store(target, value, None if bits is None else bits >> 16 * number)
