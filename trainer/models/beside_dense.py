"""Experts next to the dense network of a layer, each with its own norms (Gemma 4).

    x -> norm -> dense network -> norm -> +
    x -> norm -> experts ------> norm -> +      the router sees x after a norm of its own

The layer has the norm before the dense network, and the norm behind the sum.
"""

from functools import partial

from torch import Tensor
from torch.distributed.tensor.parallel import SequenceParallel

from trainer.families.feed_forward_args import ExpertArgs
from trainer.families.layers import NormArgs
from trainer.models.initialization import Filled
from trainer.models.moe import MoE, Router
from trainer.models.norms import build_norm, build_rms_norm
from trainer.parallel.tensor_parallel import LOCAL_COPY, Styles, tokens_divided


class ScaledRouter(Router):
    """A router that normalises its input, and multiplies the weights of each expert by a factor.

    Args:
        dim: As in `Router`.
        args: As in `Router`.
        norms: The model's norms.
        **rates: Further arguments of `Router`.
    """

    def __init__(self, dim: int, args: ExpertArgs, norms: NormArgs, **rates: float) -> None:
        super().__init__(dim, args, **rates)
        self.input_norm = build_rms_norm(norms, dim)
        self.input_scale = dim**-0.5
        self.scales = Filled(args.number, 1.0)

    def forward(self, x: Tensor, real: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Choose the experts of each token, see `Router.forward`.

        Args:
            x: (N, dim).
            real: (N,), bool, False for padding. None without padding.

        Returns:
            The experts of each token, (N, k), int64, and their weights, (N, k).
        """
        chosen, weights = super().forward(self.input_norm(x) * self.input_scale, real)
        return chosen, weights * self.scales()[chosen]


class ExpertsBesideDense(MoE):
    """A router with its experts, and a dense network for all tokens, with a norm for each of them.

    Args:
        dim: As in `MoE`.
        args: As in `MoE`.
        norms: The model's norms.
        branches: As in `MoE`.
        **rates: As in `MoE`.
    """

    def __init__(
        self, dim: int, args: ExpertArgs, norms: NormArgs, *, branches: int = 1, **rates: float
    ) -> None:
        super().__init__(dim, args, branches=branches, **rates)
        self.router = ScaledRouter(dim, args, norms, **rates)
        self.norm_before = build_norm(norms, dim)
        self.norm_after = build_norm(norms, dim)
        self.shared_norm = build_norm(norms, dim)

    def forward(
        self, x: Tensor, positions: Tensor | None = None, *, residual: Tensor
    ) -> Tensor:
        """Return the normed output of the experts plus the normed output of the dense network, (B, S, dim).

        Args:
            x: Input of the dense network, (B, S, dim).
            positions: (B, S), negative for padding. None without padding.
            residual: Input of the router, and of the norm before the experts, (B, S, dim). It is not added.
        """
        real = None if positions is None else (positions >= 0).flatten()
        choice = self.router(residual.flatten(0, 1), real)
        rows = self.norm_before(residual).flatten(0, 1)
        out, dense = self.experts(rows, *choice, meanwhile=partial(self.shared_output, x))
        return self.norm_after(out.view_as(x)) + self.shared_norm(dense)

    def tensor_parallel_styles(self) -> Styles:
        """Return how tensor-parallel ranks divide it, see `MoE`."""
        rows = SequenceParallel(sequence_dim=0, use_local_output=True)
        own = {"router.input_norm": rows, "router.scales": LOCAL_COPY}
        norms = tokens_divided(("norm_before", "norm_after", "shared_norm"))
        return super().tensor_parallel_styles() | own | norms
