"""Products of all pairs of tokens of a chunk of linear attention, decayed in between: see `linear_chunks.py`."""

from collections.abc import Sequence

import torch
from torch import Tensor

BLOCK = 4  # a divisor of a chunk, by a power of two


def pairs(xs: Sequence[Tensor], y: Tensor, decay: Tensor, mask: Tensor) -> list[Tensor]:
    """Return for each x the sums over channels of x_t e^(G_t - G_s) y_s, (..., C, C); 0 outside the mask.

    Args:
        xs: Tensors (..., C, K).
        y: (..., C, K).
        decay: G, the running sums of logarithms, (..., C, 1 or K).
        mask: (..., C, C) bool, within the lower triangle.
    """
    if decay.shape[-1] == 1:
        between = _between(decay, mask).squeeze(-1)
        return [(x @ y.mT) * between for x in xs]
    results = [x.new_empty(*x.shape[:-1], x.shape[-2]) for x in xs]
    for half in _halves(y):
        grown, fades = _decayed(decay, half)
        before = _half(y, half, 0) * fades
        for x, products in zip(xs, results, strict=True):
            _squares(products, 2 * half)[..., half:, :half] = (
                _half(x, half, 1) * grown
            ) @ before.mT
    near = _near(decay) * _in_blocks(y).unsqueeze(-3)
    for x, products in zip(xs, results, strict=True):
        _squares(products, BLOCK).copy_((near @ _in_blocks(x).unsqueeze(-1)).squeeze(-1))
    return [products.masked_fill_(~mask, 0) for products in results]


def pairs_adjoint(
    gradients: Sequence[Tensor],
    xs: Sequence[Tensor],
    y: Tensor,
    decay: Tensor,
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return the gradients of each x, of y and of decay, in their shapes.

    Args:
        gradients: The gradients of the results of `pairs`, (..., C, C); zero outside the mask.
        xs: Tensors (..., C, K).
        y: (..., C, K).
        decay: G, (..., C, 1 or K).
    """
    if decay.shape[-1] == 1:
        between = _between(decay, _lower(y)).squeeze(-1)
        gradients = [gradient * between for gradient in gradients]
        dxs = [gradient @ y for gradient in gradients]
        dy = sum(gradient.mT @ x for gradient, x in zip(gradients, xs, strict=True))
    else:
        dxs = [torch.zeros_like(x) for x in xs]
        dy = torch.zeros_like(y)
        for half in _halves(y):
            grown, fades = _decayed(decay, half)
            before = _half(y, half, 0) * fades
            dbefore = 0
            for gradient, x, dx in zip(gradients, xs, dxs, strict=True):
                there = _squares(gradient, 2 * half)[..., half:, :half]
                _half(dx, half, 1).add_((there @ before) * grown)
                dbefore = dbefore + there.mT @ (_half(x, half, 1) * grown)
            _half(dy, half, 0).add_(dbefore * fades)
        near = _near(decay)
        weights = 0
        for gradient, x, dx in zip(gradients, xs, dxs, strict=True):
            here = _squares(gradient, BLOCK)
            _in_blocks(dx).add_(
                torch.einsum("...ts,...tsc->...tc", here, near * _in_blocks(y).unsqueeze(-3))
            )
            weights = weights + here.unsqueeze(-1) * _in_blocks(x).unsqueeze(-2)
        _in_blocks(dy).add_((weights * near).sum(-3))
    ddecay = sum(sum_to_decay(x * dx, decay) for x, dx in zip(xs, dxs, strict=True))
    return dxs, dy, ddecay - sum_to_decay(y * dy, decay)


def _lower(x: Tensor) -> Tensor:
    return x.new_ones(x.shape[-2], x.shape[-2], dtype=torch.bool).tril()


def _between(decay: Tensor, mask: Tensor) -> Tensor:
    """Return e^(G_t - G_s) of all pairs, (..., T, T, 1 or K); 0 outside the mask."""
    exponent = decay.unsqueeze(-2) - decay.unsqueeze(-3)
    return exponent.masked_fill(~mask.unsqueeze(-1), -torch.inf).exp()


# Decays of single channels. Two halves of 2, 4, ... blocks are compared through the first token of the second half,
# so that no exponent is above 0. Pairs inside a block are computed one by one:
#
#     8 blocks:   half of 16 tokens: 0-3 with 4-7    of 8: 0-1 with 2-3, 4-5 with 6-7    of 4: 0 with 1, 2 with 3, ...


def _halves(x: Tensor) -> list[int]:
    """Return the lengths of halves, in tokens.

    Each pair of tokens of different blocks is in the two halves of one length.
    """
    return [x.shape[-2] >> i for i in range(1, (x.shape[-2] // BLOCK).bit_length())]


def _half(x: Tensor, half: int, which: int) -> Tensor:
    """Return the first halves (which = 0) or the second ones, as a view: (..., C, K) -> (..., N, half, K)."""
    return x.unflatten(-2, (-1, 2, half))[..., which, :, :]


def _decayed(decay: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """Return the decays from the first token of second halves to its half, and from first halves to it."""
    second = _half(decay, half, 1)
    reference = second[..., :1, :]
    return (second - reference).exp(), (reference - _half(decay, half, 0)).exp()


def _near(decay: Tensor) -> Tensor:
    """Return the decays between the pairs of each block: (..., N, block, block, K)."""
    blocks = _in_blocks(decay)
    return _between(blocks, _lower(blocks))


def _in_blocks(x: Tensor) -> Tensor:
    """Return tokens by blocks, as a view: (..., C, K) -> (..., N, block, K)."""
    return x.unflatten(-2, (-1, BLOCK))


def _squares(x: Tensor, size: int) -> Tensor:
    """Return the squares on the diagonal, as a view: (..., C, C) -> (..., N, size, size)."""
    return (
        x.unflatten(-1, (-1, size))
        .unflatten(-3, (-1, size))
        .diagonal(dim1=-4, dim2=-2)
        .movedim(-1, -3)
    )


def sum_to_decay(x: Tensor, decay: Tensor) -> Tensor:
    """Return a gradient of all channels in the shape of the decays: summed if all channels share one decay.

    Args:
        x: The gradient, (..., C, K).
        decay: The decays, (..., C, 1 or K).
    """
    return x.sum(-1, keepdim=True) if decay.shape[-1] == 1 else x
