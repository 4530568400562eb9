"""What is computed for single positions, such as a feed-forward network, for a part of the sequence at a time.

The backward computes each part again before it, so that the inner activations of one part exist at a time. TiledMLP of
ALST (arXiv 2506.13996) does so inside a checkpointed block, which computes the network three times. Here the input is
saved by an operation of its own before the network: as it is the last tensor that the block saves, the block's
recomputation ends there, and the network is computed as often as without parts.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from longshard.sharding.forward import replace_forward
from longshard.sharding.tensors import local_part
from trainer.config.errors import ConfigError
from trainer.transforms.compile import rows_vary

Compute = Callable[..., torch.Tensor]


def in_tiles(
    compute: Compute,
    inputs: Sequence[torch.Tensor],
    tiles: int,
    modules: Sequence[nn.Module],
    *,
    dim: int = 1,
) -> torch.Tensor:
    """Return `compute(*inputs)`, a tensor shaped as the first input, computed in `tiles` parts of a dimension.

    inputs: such as x of (B, S, dim); dim: that of the positions in each. modules: those that `compute` uses. A DTensor
    is split within each rank, which must have equally many positions, so that collectives of the modules have the parts
    of all ranks. Gradients of weights are summed over the parts in at least float32.
    """
    if tiles == 1:
        return compute(*inputs)
    inputs = [local_part(x) for x in inputs]
    saved: list[Any] = []
    inputs = _Save.apply(saved, torch.empty(0, requires_grad=True), *inputs)
    return _Tiles.apply(
        compute, (tiles, dim), modules, saved.pop(), len(inputs), *inputs, *_trained(modules)
    )


def experts_in_tiles(experts: nn.Module, tiles: int) -> None:
    """Let experts compute a part of the rows at a time; in place. Their forward is that of `Experts`.

    Below FSDP's hooks, so that the experts' weights are gathered once for all parts.
    """
    forward = experts.forward
    replace_forward(
        experts,
        "experts in parts",
        lambda *inputs, beside: (
            in_tiles(lambda *part: forward(*part)[0], inputs, tiles, [experts], dim=0),
            beside(),
        ),
    )


def compute_in_tiles(block: nn.Module, tiles: int) -> None:
    """Let a block compute its feed-forward network in parts; in place. ConfigError if it has no attribute `tiles`."""
    if not hasattr(block, "tiles"):
        raise ConfigError(
            f"activation_checkpoint.mlp_chunk_tokens needs a block that computes its network by in_tiles, and "
            f"{type(block).__name__} does not; leave it out"
        )
    block.tiles = tiles


class _Save(torch.autograd.Function):
    """Save tensors for a later operation, which takes them from this one's context.

    Its second input is a tensor that needs a gradient, because autograd saves nothing where no input does.
    """

    @staticmethod
    def forward(
        ctx: Any, saved: list[Any], _needs_gradient: torch.Tensor, *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(*inputs)
        saved.append(ctx)
        views = tuple(x.view_as(x) for x in inputs)
        ctx.mark_non_differentiable(*(x for x in views if not x.is_floating_point()))
        return views

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return None, None, *grads


class _Tiles(torch.autograd.Function):
    """split: number of parts, dimension; count: how many of the tensors are inputs, the others being weights."""

    @staticmethod
    def forward(
        ctx: Any,
        compute: Compute,
        split: tuple[int, int],
        modules: Sequence[nn.Module],
        saved: Any,
        count: int,
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        ctx.compute = compute
        ctx.split = split
        ctx.modules = modules
        ctx.saved = saved
        whole = tensors[0].new_empty(tensors[0].shape)
        for out, *parts in zip(
            *(x.tensor_split(*split) for x in (whole, *tensors[:count])), strict=True
        ):
            _mark_uneven(parts, whole, split)
            out.copy_(compute(*parts))
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        inputs = ctx.saved.saved_tensors
        trained = _trained(ctx.modules)
        of_inputs = [torch.empty_like(x) if x.is_floating_point() else None for x in inputs]
        given = [x for x in of_inputs if x is not None]
        sums: list[torch.Tensor] = []

        def add(
            grad: torch.Tensor, parts: Sequence[torch.Tensor], of_parts: Sequence[torch.Tensor]
        ) -> None:
            parts = [x.detach().requires_grad_(x.is_floating_point()) for x in parts]
            _mark_uneven(parts, inputs[0], ctx.split)
            with torch.enable_grad():
                out = ctx.compute(*parts)
            found = torch.autograd.grad(
                out, [*(x for x in parts if x.requires_grad), *trained], grad
            )
            for target, g in zip(of_parts, found, strict=False):
                target.copy_(g)
            of_trained = found[len(of_parts) :]
            if not sums:
                sums.extend(
                    g.to(torch.promote_types(g.dtype, torch.float32), copy=True)
                    for g in of_trained
                )
            else:
                for total, g in zip(sums, of_trained, strict=True):
                    total.add_(g)

        for part, *parts in zip(
            *(x.tensor_split(*ctx.split) for x in (grad, *inputs, *given)), strict=True
        ):
            add(part, parts[: len(inputs)], parts[len(inputs) :])
        gradients = (total.to(p.dtype) for total, p in zip(sums, trained, strict=True))
        return None, None, None, None, None, *of_inputs, *gradients


def _mark_uneven(
    parts: Sequence[torch.Tensor], whole: torch.Tensor, split: tuple[int, int]
) -> None:
    """Let one compiled graph serve parts that differ in their number of positions."""
    tiles, dim = split
    if whole.shape[dim] % tiles:
        rows_vary(*parts, dim=dim)


def _trained(modules: Sequence[nn.Module]) -> list[nn.Parameter]:
    return [p for module in modules for p in module.parameters() if p.requires_grad]
