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
from torch.distributed.tensor import DTensor

from trainer.config.errors import ConfigError

Compute = Callable[[torch.Tensor], torch.Tensor]


def in_tiles(compute: Compute, x: torch.Tensor, tiles: int, modules: Sequence[nn.Module]) -> torch.Tensor:
    """Return `compute(x)` for x of (B, S, dim), computed in `tiles` parts of the sequence.

    modules: those that `compute` uses. A DTensor is split within each rank, which must have equally many positions, so
    that collectives of the modules have the parts of all ranks. Gradients of weights are summed over the parts in at
    least float32.
    """
    if tiles == 1:
        return compute(x)
    x = x.to_local() if isinstance(x, DTensor) else x
    saved: list[Any] = []
    x = _Save.apply(x, torch.empty(0, requires_grad=True), saved)
    return _Tiles.apply(compute, tiles, modules, saved.pop(), x, *_trained(modules))


def compute_in_tiles(block: nn.Module, tiles: int) -> None:
    """Let a block compute its feed-forward network in parts; in place.

    Raises:
        ConfigError: the block has no attribute `tiles`, which it passes to `in_tiles`.
    """
    if not hasattr(block, "tiles"):
        raise ConfigError(
            f"activation_checkpoint.mlp_chunk_tokens needs a block that computes its network by in_tiles, and "
            f"{type(block).__name__} does not; leave it out"
        )
    block.tiles = tiles


class _Save(torch.autograd.Function):
    """Save a tensor for a later operation, which takes it from this one's context.

    Its second input is a tensor that needs a gradient, because autograd saves nothing where no input does.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, _needs_gradient: torch.Tensor, saved: list[Any]) -> torch.Tensor:
        ctx.save_for_backward(x)
        saved.append(ctx)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad, None, None


class _Tiles(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, compute: Compute, tiles: int, modules: Sequence[nn.Module], saved: Any, x: torch.Tensor, *_: Any
    ) -> torch.Tensor:
        ctx.compute, ctx.tiles, ctx.modules, ctx.saved = compute, tiles, modules, saved
        return _joined(compute, x.tensor_split(tiles, dim=1), x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        (x,) = ctx.saved.saved_tensors
        trained = _trained(ctx.modules)
        sums: list[torch.Tensor] = []

        def gradient(part: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                part = part.detach().requires_grad_()
                out = ctx.compute(part)
            of_part, *of_trained = torch.autograd.grad(out, [part, *trained], grad)
            if not sums:
                sums.extend(g.to(torch.promote_types(g.dtype, torch.float32), copy=True) for g in of_trained)
            else:
                for total, g in zip(sums, of_trained, strict=True):
                    total.add_(g)
            return of_part

        parts = zip(x.tensor_split(ctx.tiles, dim=1), grad.tensor_split(ctx.tiles, dim=1), strict=True)
        of_x = _joined(lambda pair: gradient(*pair), parts, x.shape)
        return None, None, None, None, of_x, *(total.to(p.dtype) for total, p in zip(sums, trained, strict=True))


def _trained(modules: Sequence[nn.Module]) -> list[nn.Parameter]:
    return [p for module in modules for p in module.parameters() if p.requires_grad]


def _joined(compute: Callable[[Any], torch.Tensor], parts: Any, shape: torch.Size) -> torch.Tensor:
    """Return what is computed of each part, in one tensor; no two parts are alive beside it."""
    whole, begin = None, 0
    for part in parts:
        out = compute(part)
        if whole is None:
            whole = out.new_empty(shape)
        whole[:, begin : begin + out.shape[1]] = out
        begin += out.shape[1]
    return whole
