"""A U-Net on periodic fields as single-device code; see unet_args.py for its source."""

import torch
import torch.nn.functional as F
from torch import nn

from examples.fields.layers import draw_parameter
from examples.fields.parallelize import parallelize_fields
from examples.fields.unet_args import UNetArgs
from trainer.models.model_spec import ModelSpec


def convolution(inputs: int, outputs: int, kernel: int = 3, stride: int = 1) -> nn.Conv2d:
    """Return a convolution on a periodic grid. It keeps the size of the grid, or halves it with stride 2.

    Args:
        inputs: Channels of the input.
        outputs: Channels of the output.
        kernel: Size of the kernel.
        stride: 1 or 2.
    """
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, padding_mode="circular")


class Block(nn.Module):
    """Two convolutions, each after a norm, with a residual around them, (N, inputs, H, W) -> (N, outputs, H, W).

    Args:
        inputs: Channels of the input.
        outputs: Channels of the output.
        groups: Groups of channels of a norm.
    """

    def __init__(self, inputs: int, outputs: int, groups: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(groups, inputs)
        self.conv1 = convolution(inputs, outputs)
        self.norm2 = nn.GroupNorm(groups, outputs)
        self.conv2 = convolution(outputs, outputs)
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv1(F.silu(self.norm1(x)))
        return self.skip(x) + self.conv2(F.silu(self.norm2(y)))


class Down(nn.Module):
    """A level on the way down: a convolution that halves the grid (except on the first level), and blocks.

    Args:
        args: Sizes of the model.
        level: Number of the level.
    """

    def __init__(self, args: UNetArgs, level: int) -> None:
        super().__init__()
        width = args.widths[level]
        self.halve = convolution(args.widths[level - 1], width, stride=2) if level else nn.Identity()
        self.blocks = nn.Sequential(*(Block(width, width, args.groups) for _ in range(args.blocks)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(self.halve(x))


class Up(nn.Module):
    """A level on the way up: it doubles the grid, joins the level on the way down, and runs blocks.

    Args:
        args: Sizes of the model.
        level: Number of the level.
    """

    def __init__(self, args: UNetArgs, level: int) -> None:
        super().__init__()
        width = args.widths[level]
        self.conv = convolution(args.widths[level + 1], width)
        inputs = [2 * width, *[width] * (args.blocks - 1)]
        self.blocks = nn.Sequential(*(Block(n, width, args.groups) for n in inputs))

    def forward(self, x: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        x = self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))
        return self.blocks(torch.cat([skip, x], 1))


class UNet(nn.Module):
    """The model. `forward` returns hidden states; the loss calls `output`, which returns the change of the fields.

    Args:
        args: Sizes of the model.
    """

    def __init__(self, args: UNetArgs) -> None:
        super().__init__()
        self.args = args
        self.stem = convolution(args.channels, args.widths[0])
        levels = range(len(args.widths))
        layers = [*(Down(args, i) for i in levels), *(Up(args, i) for i in reversed(levels[:-1]))]
        self.layers = nn.ModuleDict({str(i): layer for i, layer in enumerate(layers)})
        self.norm = nn.GroupNorm(args.groups, args.widths[0])
        self.output = convolution(args.widths[0], args.channels)

    def forward(self, fields: torch.Tensor) -> torch.Tensor:
        """Return the hidden states, (N, widths[0], H, W).

        Args:
            fields: (N, channels, H, W).
        """
        x = self.stem(fields)
        skips = []
        for number, layer in self.layers.items():
            if int(number) < len(self.args.widths):
                x = layer(x)
                skips.append(x)
            else:
                x = layer(x, skips[self.args.n_layers - 1 - int(number)])
        return F.silu(self.norm(x))

    def init_buffers(self, device: torch.device) -> None:
        """Do nothing: the model has no buffers."""

    def init_parameter(self, name: str, parameter: torch.Tensor, generator: torch.Generator) -> None:
        draw_parameter(name, parameter, generator)


SPEC = ModelSpec(build=UNet, parallelize=parallelize_fields)
