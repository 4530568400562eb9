"""Short causal convolution of queries, keys and values. Context parallelism replaces its inner part."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longshard.context.convolution import convolved
from trainer.models.cached import Cached
from trainer.models.initialization import Weights, draw


class InnerConvolution(Cached):
    """Depthwise causal convolution over whole sequences. `ContextParallelConvolution` replaces it by a planned one."""

    def forward(
        self,
        x: Tensor,
        weight: Tensor,
        *,
        positions: Tensor | None = None,
        plan: Tensor | None = None,
    ) -> Tensor:
        """Return the convolution, (B, S, C).

        Args:
            x: (B, S, C).
            weight: (C, 1, kernel).
            positions: (B, S), position of each token in its document: tokens of other documents do not count.
            plan: Not used; the planned convolution uses it.
        """
        rows = F.pad(x, (0, 0, weight.shape[2] - 1, 0))
        return convolved(rows, weight, positions, [(0, x.shape[1])])


class Taps(Weights):
    """Weights of a depthwise convolution, (C, 1, kernel), with the layout of a depthwise nn.Conv1d.

    Args:
        channels: C.
        kernel: Tokens of the convolution.
    """

    muon_matrices = ()

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__(channels, 1, kernel)

    def init_parameter(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """Draw with the variance of nn.Conv1d.

        Args:
            name: Name of the parameter in this module.
            parameter: (C, 1, kernel), filled in place.
            generator: The source of random numbers.
        """
        draw(parameter, generator, branches=3)


class ShortConvolution(nn.Module):
    """Adds to each channel of q, k and v a weighted sum of its last `kernel` tokens, before rotary positions.

    This is Canon-B of Allen-Zhu (arXiv 2512.17351), residual and without an activation, close to the convolution of
    Primer (arXiv 2109.08668). Layers of state space models and linear attention have a convolution at the same place.
    Tensor parallelism divides channels as it divides heads. One convolution over all channels needs one exchange.

    Args:
        query_dim: Channels of the queries.
        kv_dim: Channels of the keys, and of the values.
        kernel: Tokens of the convolution.
    """

    def __init__(self, query_dim: int, kv_dim: int, kernel: int) -> None:
        super().__init__()
        self.q = Taps(query_dim, kernel)
        self.k = Taps(kv_dim, kernel)
        self.v = Taps(kv_dim, kernel)
        self.inner_convolution = InnerConvolution()

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        positions: Tensor | None = None,
        plan: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Return q, k and v with their convolutions added, in the same shapes.

        Args:
            q: (B, S, H * D).
            k: (B, S, K * D).
            v: (B, S, K * D).
            positions: (B, S), positions within packed documents. None if documents are not masked.
            plan: The handle of the open plan. None without context parallelism.
        """
        x = torch.cat((q, k, v), -1)
        weight = torch.cat((self.q(), self.k(), self.v()))
        x = x + self.inner_convolution.run(x, weight, positions=positions, plan=plan)
        return x.split([q.shape[-1], k.shape[-1], v.shape[-1]], dim=-1)
