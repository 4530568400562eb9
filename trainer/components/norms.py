"""One gradient norm for the whole model, also with parameters on different meshes, and clipping by it.

Norms of weights and of their updates, by kind of parameter, show whether a run drifts.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from longshard.sharding.exchange import all_reduce
from longshard.sharding.tensors import local_part, to_device
from trainer.observer import Observer, Positions
from trainer.parallel.parallel_dims import ParallelDims
from trainer.runtime.agreement import gather_values


def settle_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Bring each gradient to its parameter's placement: tensor parallelism leaves norms with partial sums.

    A collective. All sums over the same ranks are one all-reduce.

    Args:
        parameters: Parameters; their gradients are replaced.
    """
    together = defaultdict(list)
    for parameter in parameters:
        grad = parameter.grad
        if isinstance(grad, DTensor) and grad.placements != parameter.placements:
            pairs = enumerate(zip(grad.placements, parameter.placements, strict=True))
            (dim, have, want), *others = [
                (dim, have, want) for dim, (have, want) in pairs if have != want
            ]
            if not others and have.is_partial("sum") and want.is_replicate():
                together[grad.device_mesh, dim, grad.dtype].append(parameter)
            else:
                parameter.grad = grad.redistribute(placements=parameter.placements)
    for (mesh, dim, _), partial in together.items():
        parts = [parameter.grad.to_local() for parameter in partial]
        sums = all_reduce(torch.cat([part.flatten() for part in parts]), mesh.get_group(dim))
        sums = sums.split([part.numel() for part in parts])
        for parameter, part, x in zip(partial, parts, sums, strict=True):
            parameter.grad = DTensor.from_local(
                x.view_as(part),
                mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )


def squared_norm(parameters: Iterable[nn.Parameter], dims: ParallelDims) -> Tensor:
    """Return this rank's part of the squared norm of all gradients: a scalar, float64, on the device of the job.

    Each rank divides its squares by the number of ranks that hold the same gradient. The sum over all ranks then counts
    every element once, on any mesh and pipeline stage. (`clip_grad_norm_` refuses mixed meshes.)

    Args:
        parameters: The parameters of this rank.
        dims: The meshes of the run.
    """
    held = defaultdict(list)  # replicas -> local gradients
    for parameter in parameters:
        if parameter.grad is not None:
            held[replicas_of(parameter.grad, dims)].append(local_part(parameter.grad))
    total = dims.zeros()
    for replicas, grads in held.items():
        # float64: a float32 sum over a million squares is off by 2e-4 on a CPU, differently for each way of sharding.
        # The kernel reads float32 and copies nothing.
        norms = torch.stack(torch._foreach_norm(grads, 2, dtype=torch.float64))
        total += to_device((norms**2).sum(), total.device) / replicas
    return total


@torch.no_grad()
def clip_gradients(
    parameters: Iterable[nn.Parameter], norm: float | Tensor, max_norm: float
) -> None:
    """Scale all gradients so that their common norm is at most `max_norm`.

    Args:
        parameters: The parameters of this rank.
        norm: The norm of all gradients. A tensor, a scalar in float64 on their device, is not read by the host: then
            all gradients are multiplied, by one if nothing is to be scaled.
        max_norm: Largest norm.
    """
    grads = [
        local_part(parameter.grad) for parameter in parameters if parameter.grad is not None
    ]
    if not isinstance(norm, Tensor):
        if norm > max_norm:
            torch._foreach_mul_(grads, max_norm / norm)
        return
    factor = (max_norm / norm).clamp(max=1)
    for dtype in {grad.dtype for grad in grads}:
        torch._foreach_mul_([grad for grad in grads if grad.dtype == dtype], factor.to(dtype))


def replicas_of(x: Tensor, dims: ParallelDims) -> int:
    """Return how many ranks of a stage hold the same shard: the product of the mesh dimensions over which x is not cut.

    Args:
        x: A tensor of any shape, a DTensor if it is sharded.
        dims: The meshes of the run.
    """
    sizes = (
        zip(x.device_mesh.shape, x.placements, strict=True) if isinstance(x, DTensor) else ()
    )
    shards = math.prod(size for size, placement in sizes if not placement.is_replicate())
    return dims.size("world") // dims.size("pp") // shards


class UpdateNorms(Observer):
    """Logs root mean squares of weights and of their last updates, over all layers of a kind of parameter.

    It keeps a copy of this rank's weights while the optimizer works. `record` and the constructor are collectives.

    Args:
        model_parts: The model parts of this rank.
        optimizer: The optimizer, which gets hooks.
        dims: The meshes of the run.
    """

    def __init__(
        self,
        model_parts: Sequence[nn.Module],
        optimizer: torch.optim.Optimizer,
        dims: ParallelDims,
    ) -> None:
        self._dims = dims
        trained = [
            (re.sub(r"\.\d+\.", ".", name), p)
            for part in model_parts
            for name, p in part.named_parameters()
            if p.requires_grad
        ]
        kinds = [kind for kind, _ in trained]
        stages = [kinds] if dims.size("pp") == 1 else gather_values(kinds)
        self._kinds = list(dict.fromkeys(kind for stage in stages for kind in stage))
        self._parameters = [(self._kinds.index(kind), p) for kind, p in trained]
        self._sums = dims.zeros(3, len(self._kinds))
        """This rank's squares of weights, squares of updates, and numbers of elements."""
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
            replicas = replicas_of(parameter, self._dims)
            self._sums[:2, kind] += squares / replicas
            self._sums[2, kind] += new.numel() / replicas
        del self._old

    def record(self, positions: Positions) -> dict[str, float]:
        """Return `weight_rms.KIND` and `update_rms.KIND`; one collective.

        Args:
            positions: Positions of the data streams; not used.
        """
        weights, updates, elements = all_reduce(
            self._sums.clone(), self._dims["world"]
        ).tolist()
        return {
            f"{metric}.{kind}": (square / max(number, 1)) ** 0.5
            for metric, squares in (("weight_rms", weights), ("update_rms", updates))
            for kind, square, number in zip(self._kinds, squares, elements, strict=True)
        }
