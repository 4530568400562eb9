"""Shapes of the family for points. Torch-free.

Sources: convolutions whose weights depend on the offsets to neighbours, as in Schuett et al., "SchNet" (arXiv
1706.08566). Attention between learned slices of all points, as in Wu et al., "Transolver" (arXiv 2402.02366).
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from trainer.config.errors import ConfigError

PLACES = 4
"""The last channels of points: where they are, as cosine and sine of the angles of a periodic box."""


@dataclass(frozen=True)
class PointsArgs:
    """Arguments of one model of points. The shape of the fields comes from the data: height is the number of points."""

    task: ClassVar[str] = "fields"
    norms_have_parameters: ClassVar[bool] = True
    free_to_change: ClassVar[frozenset[str]] = frozenset(["height"])
    axes: ClassVar[tuple[str, ...]] = ("points",)
    compiles: ClassVar[bool] = False
    assumed_shape: ClassVar[tuple[int, int, int]] = (3 + PLACES, 4096, 1)

    dim: int = 128
    n_layers: int = 6
    neighbors: int = 16
    """Points that a point sees in a layer, itself included."""
    slices: int = 32
    """Learned groups of points, between which there is attention."""
    channels: int = 0
    height: int = 0
    width: int = 0

    def for_fields(self, channels: int, height: int, width: int) -> "PointsArgs":
        if width != 1 or channels <= PLACES:
            raise ConfigError(
                f"fields of {height} x {width} with {channels} channels are no points, which model.name = 'points' "
                "needs; use data of `python -m examples.fields.make_fields --points 1024`, or model.name = 'unet'"
            )
        if height < self.neighbors:
            raise ConfigError(
                f"{height} points are fewer than the {self.neighbors} neighbours of model.name = 'points'; use more "
                "points, or another flavor"
            )
        return replace(self, channels=channels, height=height, width=width)

    def tensor_parallel_sizes(self) -> dict[str, int]:
        return {}

    def linear_elements(self) -> int:
        """Return the number of weights of the linear modules of a layer, without biases."""
        return self.dim * (11 * self.dim + PLACES + self.slices)

    def n_params(self) -> int:
        layer = self.linear_elements() + 14 * self.dim + self.slices
        stem = self.dim * (self.channels + 1)
        output = (self.channels - PLACES) * (self.dim + 1)
        return self.n_layers * layer + stem + 2 * self.dim + output

    def flops_per_token(self, seq_len: int) -> tuple[float, float]:
        """Return FLOPs per point, twice. The weights of each neighbour and the sums of slices are included.

        Args:
            seq_len: Not used: neighbours and slices do not grow with the number of points.
        """
        layer = 10 * self.dim + self.neighbors * (self.dim + PLACES) + 3 * self.slices
        flops = 6.0 * self.dim * (self.n_layers * layer + 2 * self.channels - PLACES)
        return flops, flops

    def words(self) -> str:
        return (
            f"{self.n_layers} layers of width {self.dim}, convolutions over {self.neighbors} neighbours, attention "
            f"between {self.slices} slices of all points"
        )


FLAVORS: dict[str, PointsArgs] = {
    "debugmodel": PointsArgs(dim=32, n_layers=4, neighbors=16, slices=8),
    "base": PointsArgs(),
}
