"""The experts of a mixture: feed-forward networks with stacked weights. Each token runs a few of them.

    tokens 0, 1, 2 choose experts (2, 0), (0, 1), (2, 1)
    pairs in the order of experts:   expert 0: 0 1   expert 1: 1 2   expert 2: 0 2      -> rows of a grouped product
    output of token 0:               weight x expert 0's row + weight x expert 2's row

No token is dropped: an expert has one row for each token that has chosen it.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from longshard.sharding.tensors import added_rows, in_parts
from trainer.families.feed_forward_args import ExpertArgs, has_grouped_product
from trainer.models.feed_forward import gated
from trainer.models.initialization import draw
from trainer.parallel.expert_parallel import ROUTING, Routing
from trainer.transforms.lora import is_adapter

Outputs = Callable[..., Tensor]
# torch 2.13 made it public
_grouped_mm = getattr(F, "grouped_mm", None) or torch._grouped_mm

CLAMPED = "clamped"
"""The unit of gpt-oss in place of an activation."""
_LIMIT = 7.0
_STEEPNESS = 1.702


class ExpertWeights(NamedTuple):
    """Stacked weights of some experts.

    The matrices are (E, 2 * hidden, dim) and (E, dim, hidden), the biases (E, 2 * hidden) and (E, dim). Adapters of
    both are (E, rank, inputs) and (E, outputs, rank), see `transforms/lora.py`.
    """

    w13: Tensor
    """Gates in the first half of the rows, then the projections that they multiply."""
    w2: Tensor
    b13: Tensor | None = None
    b2: Tensor | None = None
    w13_lora_a: Tensor | None = None
    w13_lora_b: Tensor | None = None
    w2_lora_a: Tensor | None = None
    w2_lora_b: Tensor | None = None


class Experts(nn.Module):
    """All experts of a layer. Expert parallelism replaces the forward from outside.

    Args:
        dim: Channels of the hidden states.
        args: Number of experts, inner channels, biases.
        branches: Residual branches of the model, see `initialization.draw`.
    """

    stacked = muon_matrices = ("w13", "w2")
    """Parameters that can have adapters, which add `adapter_scale` times their product."""
    routing: Routing = ROUTING

    def __init__(self, dim: int, args: ExpertArgs, *, branches: int = 1) -> None:
        super().__init__()
        self.branches = branches
        self.adapter_scale = 0.0
        number = args.number
        hidden = args.hidden_dim
        self.activation = CLAMPED if args.clamped else args.activation
        self.w13 = nn.Parameter(torch.empty(number, 2 * hidden, dim))
        self.w2 = nn.Parameter(torch.empty(number, dim, hidden))
        self.b13 = nn.Parameter(torch.empty(number, 2 * hidden)) if args.biases else None
        self.b2 = nn.Parameter(torch.empty(number, dim)) if args.biases else None

    def forward(
        self,
        x: Tensor,
        chosen: Tensor,
        weights: Tensor,
        *,
        meanwhile: Callable[[], Tensor | None] = lambda: None,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the weighted sum of each token's experts.

        Args:
            x: (N, dim).
            chosen: Experts of each token, (N, k), int64.
            weights: (N, k).
            meanwhile: Called once. Under expert parallelism it runs while tokens are sent to their experts.

        Returns:
            The sums, (N, dim), and the result of `meanwhile`.
        """
        return self.sums(
            dict(self.named_parameters(recurse=False)), x, chosen, weights
        ), meanwhile()

    def init_parameter(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """Set biases to zero; draw matrices, see `initialization.draw`.

        Args:
            name: Name of the parameter in this module.
            parameter: The whole stacked parameter, (E, ...), filled in place.
            generator: The source of random numbers.
        """
        if name in ("b13", "b2"):
            parameter.zero_()
        else:
            branches = self.branches if name == "w2" else 1
            draw(parameter.flatten(0, 1), generator, branches=branches)

    def sums(
        self,
        parameters: Mapping[str, Tensor],
        x: Tensor,
        chosen: Tensor,
        weights: Tensor,
        *,
        sizes: Sequence[int] | None = None,
    ) -> Tensor:
        """Return the sums with other parameters, for example with the parameters of some of the experts.

        If adapters are off, parameters of adapters are ignored.

        Args:
            parameters: Parameters by name.
            x: (N, dim).
            chosen: (N, k), int64.
            weights: (N, k).
            sizes: Number of pairs of each expert, see `expert_sums`. None: they are counted if needed.

        Returns:
            The sums, (N, dim).
        """
        if not getattr(self, "adapters_on", True):
            parameters = {name: p for name, p in parameters.items() if not is_adapter(name)}
        experts = ExpertWeights(**parameters)
        return expert_sums(
            x,
            chosen,
            weights,
            experts,
            activation=self.activation,
            scale=self.adapter_scale,
            sizes=self.routing.pairs if sizes is None else sizes,
        )


def expert_sums(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    experts: ExpertWeights,
    *,
    activation: str = "silu",
    scale: float = 0.0,
    sizes: Sequence[int] | Callable[[Tensor, int], Sequence[int]] = ROUTING.pairs,
) -> Tensor:
    """Return the weighted sum of each token's experts, (N, dim), in the dtype of x, added up in float32 or wider.

    Args:
        x: (N, dim).
        chosen: (N, k), int64. A choice of E or more counts as zero: the expert is on another rank.
        weights: (N, k).
        experts: The weights of E experts.
        activation: A name of `ACTIVATIONS`, or `CLAMPED`.
        scale: Factor of what adapters add.
        sizes: Number of pairs (token, expert) of each expert, known to the host. Or a function that counts them if
            there is no grouped product; then all choices are of the E experts.
    """
    pairs = chosen.numel() if callable(sizes) else sum(sizes)
    order = chosen.flatten().argsort(stable=True)[:pairs]
    owner = chosen.flatten()[order]
    token = order.div(chosen.shape[1], rounding_mode="floor")
    rows = x.index_select(0, token)
    outputs = partial(_outputs, activation=activation, scale=scale)
    ranks = [a.shape[1] for a in (experts.w13_lora_a, experts.w2_lora_a) if a is not None]
    widths = rows.shape[1], experts.w2.shape[2], *ranks
    if pairs and has_grouped_product(str(rows.dtype).removeprefix("torch."), *widths):
        rows = _grouped(rows, owner, experts, outputs)
    else:
        sizes = sizes(owner, len(experts.w13)) if callable(sizes) else sizes
        rows = _one_by_one(rows, sizes, experts, outputs)
    return _WeightedSums.apply(rows, weights.flatten()[order], token, len(x))


class _WeightedSums(torch.autograd.Function):
    """Rows (T, dim), their weights (T,) and tokens (T,) -> sums of N tokens, (N, dim).

    Only parts of the rows are copied.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, token: Tensor, number: int) -> Tensor:
        ctx.save_for_backward(rows, weights, token)
        return added_rows(rows, token, number, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weights, token = ctx.saved_tensors
        row_gradients = torch.empty_like(rows)
        weight_gradients = torch.empty_like(weights)
        for row, weight, tokens, row_gradient, weight_gradient in in_parts(
            rows, weights, token, row_gradients, weight_gradients
        ):
            part = gradient.index_select(0, tokens).to(
                torch.promote_types(row.dtype, weight.dtype)
            )
            weight_gradient.copy_((part * row).sum(1))
            row_gradient.copy_(part * weight.unsqueeze(1))
        return row_gradients, weight_gradients, None, None


def _grouped(rows: Tensor, owner: Tensor, experts: ExpertWeights, outputs: Outputs) -> Tensor:
    """Return the outputs of rows, (R, dim), which are sorted by expert. owner: the expert of each row, (R,)."""
    numbers = torch.arange(len(experts.w13), device=owner.device)
    ends = torch.searchsorted(owner, numbers, right=True).to(torch.int32)

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out = _grouped_mm(x, weight.transpose(1, 2), offs=ends)
        return out if bias is None else out + bias.index_select(0, owner)

    return outputs(rows, experts, linear)


def _one_by_one(
    rows: Tensor, sizes: Sequence[int], experts: ExpertWeights, outputs: Outputs
) -> Tensor:
    """Return the outputs of rows, (R, dim), which are sorted by expert. sizes: number of rows of each expert.

    An expert without rows gets a gradient of zeros.
    """
    each = zip(
        *([None] * len(sizes) if x is None else x.unbind() for x in experts), strict=True
    )
    parts = zip(rows.split(list(sizes)), (ExpertWeights(*one) for one in each), strict=True)
    return torch.cat([outputs(part, one, F.linear) for part, one in parts])


def _outputs(
    rows: Tensor,
    experts: ExpertWeights,
    linear: Callable[..., Tensor],
    *,
    activation: str,
    scale: float,
) -> Tensor:
    """Return the outputs of rows. linear: (rows, weight, bias or None) -> rows, for one expert or for many."""

    def adapted(x: Tensor, out: Tensor, a: Tensor | None, b: Tensor | None) -> Tensor:
        return out if a is None else out + linear(scale * linear(x, a), b)

    hidden = adapted(
        rows, linear(rows, experts.w13, experts.b13), experts.w13_lora_a, experts.w13_lora_b
    )
    hidden = _gated(hidden, activation)
    return adapted(
        hidden, linear(hidden, experts.w2, experts.b2), experts.w2_lora_a, experts.w2_lora_b
    )


def _gated(hidden: Tensor, activation: str) -> Tensor:
    """Return SwiGLU or GEGLU (arXiv 2002.05202), or the clamped unit of gpt-oss (arXiv 2508.10925).

    (R, 2 * hidden) -> (R, hidden).
    """
    gate, up = hidden.chunk(2, dim=-1)
    if activation != CLAMPED:
        return gated(activation, gate, up)
    gate = gate.clamp(max=_LIMIT)
    up = up.clamp(-_LIMIT, _LIMIT)
    return (up + 1) * gate * torch.sigmoid(_STEEPNESS * gate)
