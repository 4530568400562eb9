"""The decays of linear attention, which Mamba's papers define."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longshard.sharding.tensors import wide_type
from trainer.models.weights import Weights


class Decay(nn.Module):
    """Logarithms of decays, -e^a_log * step, with step = softplus(x + dt_bias) (Mamba, arXiv 2312.00752).

    The parameters are in float32 or wider, and are never rounded to the dtype of the computation, because e^a_log
    multiplies a sum over all tokens.

    Args:
        heads: H.
        channels: Number of decays of a head.
    """

    float32_at_least = True

    def __init__(self, heads: int, channels: int = 1) -> None:
        super().__init__()
        self.channels = channels
        self.a_log = Weights(heads)
        self.dt_bias = Weights(heads * channels)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return logarithms of decays and steps, (B, S, H) each. With several channels (B, S, H, channels).

        Args:
            x: (B, S, H * channels).
        """
        rate = self.a_log()
        dt_bias = self.dt_bias()
        dtype = torch.promote_types(x.dtype, wide_type(rate.dtype))
        step = F.softplus(x.to(dtype) + dt_bias.to(dtype))
        rate = rate.to(dtype).exp()
        if self.channels > 1:
            step = step.unflatten(-1, (-1, self.channels))
            rate = rate.unsqueeze(-1)
        return -rate * step, step

    def init_parameter(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """Draw `a_log` as the logarithm of uniform numbers; set `dt_bias` to one.

        Args:
            name: Name of the parameter in this module.
            parameter: 1-D, filled in place.
            generator: The source of random numbers.
        """
        if name == "a_log.weight":
            parameter.uniform_(0.01, 16.0, generator=generator).log_()
        else:
            parameter.fill_(1.0)
