"""Shapes of the U-Net family. Torch-free.

Source: Ronneberger, Fischer and Brox, "U-Net" (arXiv 1505.04597), with residual blocks and group norms.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

from trainer.config.errors import ConfigError


class Convolution(NamedTuple):
    """A convolution of the model.

    Attributes:
        inputs: Channels of the input.
        outputs: Channels of the output.
        kernel: Size of the kernel.
        level: How often the grid of the result was halved.
    """

    inputs: int
    outputs: int
    kernel: int
    level: int


@dataclass(frozen=True)
class UNetArgs:
    """Arguments of one U-Net. The shape of the fields comes from the data."""

    task: ClassVar[str] = "fields"
    norms_have_parameters: ClassVar[bool] = True
    free_to_change: ClassVar[frozenset[str]] = frozenset(["height", "width"])
    axes: ClassVar[tuple[str, ...]] = ("height", "width")
    compiles: ClassVar[bool] = True
    assumed_shape: ClassVar[tuple[int, int, int]] = (3, 256, 256)

    widths: tuple[int, ...] = (32, 64, 128)
    """Channels of each level; each level has half the grid of the one before."""
    blocks: int = 2
    """Residual blocks of a level, down and up."""
    groups: int = 8
    """Groups of channels of a norm."""
    channels: int = 0
    height: int = 0
    width: int = 0

    @property
    def n_layers(self) -> int:
        """Levels on the way down and on the way up; the coarsest level counts once."""
        return 2 * len(self.widths) - 1

    def for_fields(self, channels: int, height: int, width: int) -> "UNetArgs":
        multiple = 2 ** (len(self.widths) - 1)
        if height % multiple or width % multiple:
            raise ConfigError(
                f"fields of {height} x {width} cannot be halved {len(self.widths) - 1} times by model.name = 'unet'; "
                f"use data with sides that are multiples of {multiple}, or another flavor"
            )
        return replace(self, channels=channels, height=height, width=width)

    def convolutions(self) -> Iterator[Convolution]:
        """Yield every convolution of the model."""
        yield Convolution(self.channels, self.widths[0], 3, 0)
        for level, width in enumerate(self.widths):
            if level:
                yield Convolution(self.widths[level - 1], width, 3, level)
            yield from self._blocks(width, width, level)
        for level in reversed(range(len(self.widths) - 1)):
            width = self.widths[level]
            yield Convolution(self.widths[level + 1], width, 3, level)
            yield from self._blocks(2 * width, width, level)
        yield Convolution(self.widths[0], self.channels, 3, 0)

    def _blocks(self, inputs: int, width: int, level: int) -> Iterator[Convolution]:
        for block in range(self.blocks):
            first = width if block else inputs
            yield Convolution(first, width, 3, level)
            yield Convolution(width, width, 3, level)
            if first != width:
                yield Convolution(first, width, 1, level)

    def _norms(self) -> int:
        """Return the number of parameters of the norms: two norms in each block, and the last norm."""
        down = sum(self.blocks * 4 * width for width in self.widths)
        up = sum(self.blocks * 4 * width + 2 * width for width in self.widths[:-1])  # the first norm has 2 * width
        return down + up + 2 * self.widths[0]

    def tensor_parallel_sizes(self) -> dict[str, int]:
        return {}

    def n_params(self) -> int:
        return sum(c.outputs * (c.inputs * c.kernel**2 + 1) for c in self.convolutions()) + self._norms()

    def flops_per_token(self, seq_len: int) -> tuple[float, float]:
        """Return FLOPs per point of the grid, twice: the model has no attention.

        Args:
            seq_len: Not used.
        """
        flops = sum(6.0 * math.prod(c[:2]) * c.kernel**2 / 4**c.level for c in self.convolutions())
        return flops, flops

    def words(self) -> str:
        return f"{len(self.widths)} levels of {', '.join(map(str, self.widths))} channels, {self.blocks} blocks each"


FLAVORS: dict[str, UNetArgs] = {
    "debugmodel": UNetArgs(widths=(16, 32, 64), blocks=1, groups=4),
    "base": UNetArgs(widths=(64, 128, 256, 512)),
}
