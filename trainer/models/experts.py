"""The experts of a mixture: feed-forward networks with stacked weights, of which each token runs a few.

    tokens 0, 1, 2 choose experts (2, 0), (0, 1), (2, 1)
    pairs in the order of experts:   expert 0: 0 1   expert 1: 1 2   expert 2: 0 2      -> rows of a grouped product
    output of token 0:               weight x expert 0's row + weight x expert 2's row

No token is dropped: the rows of an expert are as many as tokens have chosen it.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from trainer.families.args import ExpertArgs
from trainer.models.initialization import draw

# torch 2.13 made it public
_grouped_mm = getattr(F, "grouped_mm", None) or torch._grouped_mm

_LIMIT, _STEEPNESS = 7.0, 1.702  # of gpt-oss


class ExpertWeights(NamedTuple):
    """Stacked weights of some experts: (E, 2 * hidden, dim), (E, dim, hidden), and biases (E, 2 * hidden), (E, dim)."""

    w13: torch.Tensor
    """Gates in the first half of the rows, then what they multiply."""
    w2: torch.Tensor
    b13: torch.Tensor | None = None
    b2: torch.Tensor | None = None


class Experts(nn.Module):
    """All experts of a layer. Its forward is what expert parallelism replaces from outside.

    branches: of the model, see `initialization.draw`.
    """

    def __init__(self, dim: int, args: ExpertArgs, *, branches: int = 1) -> None:
        super().__init__()
        self.branches = branches
        number, hidden = args.number, args.hidden_dim
        self.clamped = args.clamped
        self.w13 = nn.Parameter(torch.empty(number, 2 * hidden, dim))
        self.w2 = nn.Parameter(torch.empty(number, dim, hidden))
        self.b13 = nn.Parameter(torch.empty(number, 2 * hidden)) if args.biases else None
        self.b2 = nn.Parameter(torch.empty(number, dim)) if args.biases else None

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x: (N, dim); chosen: (N, k) int64, experts of a token; weights: (N, k) -> their weighted sums: (N, dim)."""
        return self.sums(dict(self.named_parameters(recurse=False)), x, chosen, weights)

    def init_parameter(self, name: str, parameter: torch.Tensor, generator: torch.Generator) -> None:
        if name in ("b13", "b2"):
            parameter.zero_()
        else:
            draw(parameter, generator, fan_in=parameter.shape[2], branches=self.branches if name == "w2" else 1)

    def sums(
        self,
        parameters: Mapping[str, torch.Tensor],
        x: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor,
        *,
        sizes: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Compute the forward with other parameters, such as those of some of the experts. See `expert_sums`."""
        return expert_sums(x, chosen, weights, ExpertWeights(**parameters), clamped=self.clamped, sizes=sizes)


def expert_sums(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    experts: ExpertWeights,
    *,
    clamped: bool,
    sizes: Sequence[int] | None = None,
) -> torch.Tensor:
    """Return the weighted sum of each token's experts: (N, dim), added up in float32 at least.

    x: (N, dim); weights: (N, k); chosen: (N, k) int64. A choice of E or more is of no expert here and counts as zero.
    sizes: how many pairs each expert has; None: all choices are of experts here. It is known to the host, which reads
    it otherwise where there is no grouped product.
    """
    pairs = chosen.numel() if sizes is None else sum(sizes)
    order = chosen.flatten().argsort(stable=True)[:pairs]
    owner, token = chosen.flatten()[order], order.div(chosen.shape[1], rounding_mode="floor")
    rows = x.index_select(0, token)
    if pairs and _has_grouped_product(rows, experts):
        rows = _grouped(rows, owner, experts, clamped=clamped)
    else:
        if sizes is None:
            sizes = count_pairs(owner, len(experts.w13))
        rows = _one_by_one(rows, sizes, experts, clamped=clamped)
    rows = rows * weights.flatten()[order].unsqueeze(1)
    total = rows.new_zeros(x.shape, dtype=torch.promote_types(rows.dtype, torch.float32))
    return total.index_add(0, token, rows.to(total.dtype)).to(x.dtype)


def count_pairs(owner: torch.Tensor, experts: int) -> list[int]:
    """Return how many pairs each expert has, which the host waits for. owner: (pairs,), the expert of each."""
    return owner.bincount(minlength=experts).tolist()


def _has_grouped_product(rows: torch.Tensor, experts: ExpertWeights) -> bool:
    """Return whether one kernel computes all experts; it wants rows of matrices at multiples of 16 bytes."""
    aligned = rows.shape[1] % 8 == 0 and experts.w2.shape[2] % 8 == 0
    return rows.is_cuda and rows.dtype == torch.bfloat16 and aligned


def _grouped(rows: torch.Tensor, owner: torch.Tensor, experts: ExpertWeights, *, clamped: bool) -> torch.Tensor:
    """Return the outputs of rows in the order of experts. owner: (R,), the expert of each."""
    numbers = torch.arange(len(experts.w13), device=owner.device)
    ends = torch.searchsorted(owner, numbers, right=True).to(torch.int32)
    hidden = _grouped_mm(rows, experts.w13.transpose(1, 2), offs=ends)
    if experts.b13 is not None:
        hidden = hidden + experts.b13.index_select(0, owner)
    out = _grouped_mm(_gated(hidden, clamped=clamped), experts.w2.transpose(1, 2), offs=ends)
    return out if experts.b2 is None else out + experts.b2.index_select(0, owner)


def _one_by_one(rows: torch.Tensor, sizes: Sequence[int], experts: ExpertWeights, *, clamped: bool) -> torch.Tensor:
    """Return the outputs of rows in the order of experts. An expert without rows gets a gradient of zeros."""
    w13, w2, b13, b2 = ([None] * len(sizes) if x is None else x.unbind() for x in experts)
    return torch.cat(
        [
            F.linear(_gated(F.linear(part, w13[i], b13[i]), clamped=clamped), w2[i], b2[i])
            for i, part in enumerate(rows.split(list(sizes)))
        ]
    )


def _gated(hidden: torch.Tensor, *, clamped: bool) -> torch.Tensor:
    """(R, 2 * hidden) -> (R, hidden): SwiGLU (arXiv 2002.05202), or the clamped unit of gpt-oss (arXiv 2508.10925)."""
    gate, up = hidden.chunk(2, dim=-1)
    if not clamped:
        return F.silu(gate) * up
    gate, up = gate.clamp(max=_LIMIT), up.clamp(-_LIMIT, _LIMIT)
    return (up + 1) * gate * torch.sigmoid(_STEEPNESS * gate)
