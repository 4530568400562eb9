"""A model of fields at points as single-device code; see points_args.py for its sources.

Fields at points are fields of one column, (N, channels, points, 1). The last channels have the places of the points,
the same for all samples. Each rank has some of the points, and fetches features of neighbours by their numbers.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from examples.fields.layers import FeedForward, draw_parameter
from examples.fields.parallelize import parallelize_fields
from examples.fields.points_args import PLACES, PointsArgs
from longshard.domain.domain import Domain
from longshard.domain.points import nearest
from longshard.domain.tensor import DomainTensor
from trainer.models.model_spec import ModelSpec


class Messages(nn.Module):
    """A convolution over the neighbours of a point, (P, N, dim) -> (P, N, dim). Its weights depend on the offsets.

    Args:
        args: Sizes of the model.
    """

    def __init__(self, args: PointsArgs) -> None:
        super().__init__()
        self.near = nn.Linear(args.dim, args.dim)
        self.out = nn.Linear(args.dim, args.dim)
        self.weights = nn.Sequential(nn.Linear(PLACES, args.dim), nn.GELU(), nn.Linear(args.dim, args.dim))

    def forward(self, x: torch.Tensor, numbers: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Return the mean message of the neighbours of each point after a linear map, (P, N, dim).

        Args:
            x: Features, (P, N, dim).
            numbers: Numbers of the neighbours of each point, (P, k).
            offsets: Offsets to the places of the neighbours, (P, k, PLACES).
        """
        sent = self.near(x)[numbers] * self.weights(offsets).unsqueeze(2)  # (P, k, N, dim)
        return self.out(sent.mean(1))


class Slices(nn.Module):
    """Attention between learned weighted means of all points, (P, N, dim) -> (P, N, dim).

    Args:
        args: Sizes of the model.
    """

    def __init__(self, args: PointsArgs) -> None:
        super().__init__()
        self.weights = nn.Linear(args.dim, args.slices)
        self.qkv = nn.Linear(args.dim, 3 * args.dim, bias=False)
        self.out = nn.Linear(args.dim, args.dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.weights(x).softmax(-1)  # (P, N, slices)
        means = torch.einsum("pns,pnd->nsd", weights, x) / (weights.sum(0).unsqueeze(-1) + 1e-6)
        q, k, v = self.qkv(means).chunk(3, -1)
        return self.out(torch.einsum("pns,nsd->pnd", weights, F.scaled_dot_product_attention(q, k, v)))


class Layer(nn.Module):
    """Messages of neighbours, attention between slices and feed-forward, (P, N, dim) -> (P, N, dim).

    Each has a residual around it.

    Args:
        args: Sizes of the model.
    """

    def __init__(self, args: PointsArgs) -> None:
        super().__init__()
        self.messages_norm = nn.LayerNorm(args.dim)
        self.messages = Messages(args)
        self.slices_norm = nn.LayerNorm(args.dim)
        self.slices = Slices(args)
        self.ffn_norm = nn.LayerNorm(args.dim)
        self.feed_forward = FeedForward(args.dim, 2 * args.dim)

    def forward(self, x: torch.Tensor, numbers: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        x = x + self.messages(self.messages_norm(x), numbers, offsets)
        x = x + self.slices(self.slices_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Head(nn.Linear):
    """(P, N, dim) -> the change of the fields, (N, channels, P, 1); places do not change."""

    muon_matrices = ()  # updated by AdamW, like other outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.pad(super().forward(x), (0, PLACES)).permute(1, 2, 0).unsqueeze(-1)


class Points(nn.Module):
    """The model. `forward` returns hidden states; the loss calls `output`, which returns the change of the fields.

    Args:
        args: Sizes of the model.
    """

    def __init__(self, args: PointsArgs) -> None:
        super().__init__()
        self.args = args
        self.stem = nn.Linear(args.channels, args.dim)
        self.layers = nn.ModuleDict({str(i): Layer(args) for i in range(args.n_layers)})
        self.norm = nn.LayerNorm(args.dim)
        self.output = Head(args.dim, args.channels - PLACES)

    def forward(self, fields: torch.Tensor) -> torch.Tensor:
        """Return the hidden states, (P, N, dim).

        Args:
            fields: (N, channels, P, 1).
        """
        x = fields.squeeze(-1).permute(2, 0, 1)
        places = x[:, 0, -PLACES:].detach()
        x = self.stem(x)
        numbers, offsets = self.neighbors(places)
        for layer in self.layers.values():
            x = layer(x, numbers, offsets)
        return self.norm(x)

    def neighbors(self, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the numbers of the nearest points of each point, (P, k), and the offsets to them, (P, k, PLACES).

        The offsets are scaled by the square root of the number of points, so that they are about 1.

        Args:
            places: Places of the points, (P, PLACES).
        """
        exact = places.to(torch.promote_types(places.dtype, torch.float32))
        points = exact if isinstance(exact, DomainTensor) else DomainTensor(exact, Domain({}))
        _, numbers = nearest(points, points, self.args.neighbors)
        numbers = numbers if isinstance(places, DomainTensor) else numbers.local
        return numbers, (places[numbers] - places.unsqueeze(1)) * (math.sqrt(self.args.height) / 8)

    def init_buffers(self, device: torch.device) -> None:
        """Do nothing: the model has no buffers."""

    def init_parameter(self, name: str, parameter: torch.Tensor, generator: torch.Generator) -> None:
        ends = ("messages.out.weight", "slices.out.weight", "feed_forward.w2.weight")
        draw_parameter(name, parameter, generator, ends, 3 * self.args.n_layers)


SPEC = ModelSpec(build=Points, parallelize=parallelize_fields)
