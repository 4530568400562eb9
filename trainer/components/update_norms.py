"""How large weights are, and how far each step moves them, by kind of parameter: what shows a run that drifts."""

import re
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from trainer.components.grad_norm import replicas_of
from trainer.distributed.parallel_dims import ParallelDims
from trainer.distributed.sharding.exchange import all_reduce
from trainer.distributed.sharding.tensors import local_part, to_device
from trainer.observer import Observer
from trainer.runtime.agreement import of_all_ranks


class UpdateNorms(Observer):
    """Logs root mean squares of weights and of their last updates, over all layers of a kind of parameter.

    It keeps a copy of this rank's weights while the optimizer works. A collective of all ranks.
    """

    def __init__(self, model_parts: Sequence[nn.Module], optimizer: torch.optim.Optimizer, dims: ParallelDims) -> None:
        self._dims, self._device = dims, dims["world"].device_type
        trained = [(name, p) for part in model_parts for name, p in part.named_parameters() if p.requires_grad]
        kinds = [re.sub(r"\.\d+\.", ".", name) for name, _ in trained]
        stages = [kinds] if dims.size("pp") == 1 else of_all_ranks(kinds, dims["world"])
        self._kinds = list(dict.fromkeys(kind for stage in stages for kind in stage))
        self._parameters = [(self._kinds.index(kind), p) for kind, (_, p) in zip(kinds, trained, strict=True)]
        self._sums = torch.zeros(3, len(self._kinds), dtype=torch.float64, device=self._device)
        """Of this rank: squares of weights, squares of updates, elements."""
        optimizer.register_step_pre_hook(lambda *_: self._before())
        optimizer.register_step_post_hook(lambda *_: self._after())

    @torch.no_grad()
    def _before(self) -> None:
        self._old = [local_part(parameter).clone() for _, parameter in self._parameters]

    @torch.no_grad()
    def _after(self) -> None:
        self._sums = torch.zeros_like(self._sums)
        for (kind, parameter), old in zip(self._parameters, self._old, strict=True):
            new = local_part(parameter)
            norms = torch._foreach_norm([new, new - old], 2, dtype=torch.float64)
            squares = to_device(torch.stack(norms).square(), self._sums.device)
            self._sums[:2, kind] += squares / replicas_of(parameter, self._dims)
            self._sums[2, kind] += new.numel() / replicas_of(parameter, self._dims)
        del self._old

    def record(self, positions: Mapping[int, Mapping[str, int]]) -> dict[str, float]:
        """Return `weight_rms.KIND` and `update_rms.KIND`; one collective."""
        weights, updates, elements = all_reduce(self._sums.clone(), self._dims["world"]).tolist()
        return {
            f"{what}.{kind}": (square / max(number, 1)) ** 0.5
            for what, squares in (("weight_rms", weights), ("update_rms", updates))
            for kind, square, number in zip(self._kinds, squares, elements, strict=True)
        }
