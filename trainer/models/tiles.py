"""Computes a per-position module, for example a feed-forward network, for one part of the sequence at a time.

The backward computes each part again before the gradients of the part. So the inner activations of one part exist at a
time. TiledMLP of ALST (arXiv 2506.13996) does so inside a checkpointed block, and so computes the network three times.
Here a separate operation saves the input before the network. It is the last tensor that the block saves, so the
block's recomputation ends there: the network is computed as often as without parts.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from longshard.sharding.forward import replace_forward
from longshard.sharding.tensors import local_part, wide_type
from trainer.config.errors import ConfigError
from trainer.transforms.compile import rows_vary

Compute = Callable[..., Tensor]


def in_tiles(
    compute: Compute,
    inputs: Sequence[Tensor],
    tiles: int,
    modules: Sequence[nn.Module],
    *,
    dim: int = 1,
) -> Tensor:
    """Return `compute(*inputs)`, with the shape and dtype of the first input, computed in `tiles` parts of a dimension.

    The backward computes each part again. A DTensor input is replaced by its local part, so the result is a plain
    tensor. All ranks must have the same number of positions, so that collectives of the modules join equal parts.
    Gradients of weights are summed over the parts in float32 or wider.

    Args:
        compute: The function.
        inputs: For example x, (B, S, dim).
        tiles: Number of parts. 1: `compute` is called once, with the inputs as they are.
        modules: The modules that `compute` uses.
        dim: The dimension of the positions in each input.
    """
    if tiles == 1:
        return compute(*inputs)
    saved = []
    inputs = _Save.apply(saved, torch.empty(0, requires_grad=True), *map(local_part, inputs))
    return _Tiles.apply(
        compute, (tiles, dim), modules, saved.pop(), len(inputs), *inputs, *_trained(modules)
    )


def experts_in_tiles(experts: nn.Module, tiles: int) -> None:
    """Let experts compute one part of the rows at a time; in place. Call it before FSDP wraps them.

    FSDP's hooks then stay outside, so FSDP gathers the experts' weights once for all parts.

    Args:
        experts: A module with the forward of `Experts`.
        tiles: Number of parts.
    """
    forward = experts.forward
    replace_forward(
        experts,
        "experts in parts",
        lambda *inputs, meanwhile: (
            in_tiles(lambda *part: forward(*part)[0], inputs, tiles, [experts], dim=0),
            meanwhile(),
        ),
    )


def compute_in_tiles(block: nn.Module, tiles: int) -> None:
    """Let a block compute its feed-forward network in parts; in place.

    Args:
        block: The block.
        tiles: Number of parts.

    Raises:
        ConfigError: The block has no attribute `tiles`.
    """
    if not hasattr(block, "tiles"):
        raise ConfigError(
            f"activation_checkpoint.mlp_chunk_tokens needs a block that computes its network by in_tiles, and "
            f"{type(block).__name__} does not; leave it out"
        )
    block.tiles = tiles


class _Save(torch.autograd.Function):
    """Save tensors for a later operation, which takes them from the context of this operation.

    Its second input needs a gradient, because autograd saves nothing if no input needs one.
    """

    @staticmethod
    def forward(
        ctx: Any, saved: list[Any], _needs_gradient: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*inputs)
        saved.append(ctx)
        views = tuple(x.view_as(x) for x in inputs)
        ctx.mark_non_differentiable(*(x for x in views if not x.is_floating_point()))
        return views

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, None, *grads


class _Tiles(torch.autograd.Function):
    """Computes the parts.

    split: number of parts, dimension; count: the first `count` tensors are inputs, the others are weights.
    """

    @staticmethod
    def forward(
        ctx: Any,
        compute: Compute,
        split: tuple[int, int],
        modules: Sequence[nn.Module],
        saved: Any,
        count: int,
        *tensors: Tensor,
    ) -> Tensor:
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
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        inputs = ctx.saved.saved_tensors
        trained = _trained(ctx.modules)
        input_gradients = [
            torch.empty_like(x) if x.is_floating_point() else None for x in inputs
        ]
        float_gradients = [x for x in input_gradients if x is not None]
        sums = []

        def add(
            grad: Tensor, parts: Sequence[Tensor], part_gradients: Sequence[Tensor]
        ) -> None:
            parts = [x.detach().requires_grad_(x.is_floating_point()) for x in parts]
            _mark_uneven(parts, inputs[0], ctx.split)
            with torch.enable_grad():
                out = ctx.compute(*parts)
            gradients = torch.autograd.grad(
                out, [*(x for x in parts if x.requires_grad), *trained], grad
            )
            for target, g in zip(part_gradients, gradients, strict=False):
                target.copy_(g)
            weight_gradients = gradients[len(part_gradients) :]
            if not sums:
                sums.extend(g.to(wide_type(g.dtype), copy=True) for g in weight_gradients)
            else:
                for total, g in zip(sums, weight_gradients, strict=True):
                    total.add_(g)

        for part, *parts in zip(
            *(x.tensor_split(*ctx.split) for x in (grad, *inputs, *float_gradients)),
            strict=True,
        ):
            add(part, parts[: len(inputs)], parts[len(inputs) :])
        gradients = (total.to(p.dtype) for total, p in zip(sums, trained, strict=True))
        return None, None, None, None, None, *input_gradients, *gradients


def _mark_uneven(parts: Sequence[Tensor], whole: Tensor, split: tuple[int, int]) -> None:
    """Let one compiled graph serve parts that differ in their number of positions.

    whole: the tensor before the split. split: number of parts, and dimension.
    """
    tiles, dim = split
    if whole.shape[dim] % tiles:
        rows_vary(*parts, dim=dim)


def _trained(modules: Sequence[nn.Module]) -> list[nn.Parameter]:
    return [p for module in modules for p in module.parameters() if p.requires_grad]
