"""Shapes of the neighbourhood-attention family. Torch-free.

Sources: Hassani et al., "Neighborhood Attention Transformer" (arXiv 2204.07143) and "Dilated Neighborhood Attention
Transformer" (arXiv 2209.15001); positions by depthwise convolutions as in Chu et al. (arXiv 2102.10882).
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from trainer.config.errors import ConfigError


@dataclass(frozen=True)
class NATArgs:
    """Arguments of one transformer. The shape of the fields comes from the data."""

    task: ClassVar[str] = "fields"
    norms_have_parameters: ClassVar[bool] = True
    free_to_change: ClassVar[frozenset[str]] = frozenset(["height", "width"])
    axes: ClassVar[tuple[str, ...]] = ("height", "width")
    compiles: ClassVar[bool] = True
    assumed_shape: ClassVar[tuple[int, int, int]] = (3, 256, 256)

    dim: int = 256
    n_layers: int = 8
    n_heads: int = 8
    kernel: int = 7
    """Neighbours along each axis that a point sees, including itself."""
    dilation: int = 4
    """Distance between neighbours in every second layer."""
    hidden_dim: int = 1024
    channels: int = 0
    height: int = 0
    width: int = 0

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    def dilation_of_layer(self, layer: int) -> int:
        """Return the distance between the neighbours that a point sees in a layer.

        Args:
            layer: Number of the layer.
        """
        return self.dilation if layer % 2 else 1

    def for_fields(self, channels: int, height: int, width: int) -> "NATArgs":
        if min(height, width) < self.kernel * self.dilation:
            raise ConfigError(
                f"fields of {height} x {width} are smaller than the neighbourhood of model.name = 'nat', "
                f"{self.kernel} points at a distance of {self.dilation}; use data with sides of at least "
                f"{self.kernel * self.dilation}, or another flavor"
            )
        return replace(self, channels=channels, height=height, width=width)

    def tensor_parallel_sizes(self) -> dict[str, int]:
        return {"attention heads": self.n_heads, "feed-forward channels": self.hidden_dim}

    def linear_elements(self) -> int:
        """Return the number of weights of the linear modules of a layer, without biases."""
        return 4 * self.dim**2 + 2 * self.dim * self.hidden_dim

    def n_params(self) -> int:
        layer = self.linear_elements() + 4 * self.dim + self.hidden_dim + 10 * self.dim + 4 * self.dim
        stem = self.dim * (9 * self.channels + 1)
        return self.n_layers * layer + stem + 2 * self.dim + self.channels * (self.dim + 1)

    def flops_per_token(self, seq_len: int) -> tuple[float, float]:
        """Return FLOPs per point of the grid, twice: attention counts only the neighbours that a point sees.

        Args:
            seq_len: Not used: neighbourhoods do not grow with the grid.
        """
        attention = 12.0 * self.n_layers * self.dim * self.kernel**2
        matrices = self.n_layers * (self.linear_elements() + 9 * self.dim) + self.channels * self.dim * 10
        return attention + 6.0 * matrices, attention + 6.0 * matrices

    def words(self) -> str:
        return (
            f"{self.n_layers} layers of width {self.dim}, {self.n_heads} heads of {self.head_dim}, neighbourhoods of "
            f"{self.kernel} x {self.kernel} points with dilation 1 and {self.dilation}"
        )


FLAVORS: dict[str, NATArgs] = {
    "debugmodel": NATArgs(dim=64, n_layers=4, n_heads=4, kernel=5, dilation=2, hidden_dim=128),
    "base": NATArgs(),
}
