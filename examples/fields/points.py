"""A model of fields at points as single-device code; see points_args.py for its sources.

Fields at points are fields of one column, (N, channels, points, 1), with the places of the points in the last channels,
the same for all samples. So every rank has some of the points, and gets what its neighbours have by number.
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
    """A convolution over the neighbours of a point, whose weights depend on the offsets. (P, N, dim) -> (P, N, dim)."""

    def __init__(self, args: PointsArgs) -> None:
        super().__init__()
        self.near, self.out = nn.Linear(args.dim, args.dim), nn.Linear(args.dim, args.dim)
        self.weights = nn.Sequential(nn.Linear(PLACES, args.dim), nn.GELU(), nn.Linear(args.dim, args.dim))

    def forward(self, x: torch.Tensor, numbers: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """numbers: of the neighbours of each point, (P, k); offsets: to their places, (P, k, PLACES)."""
        sent = self.near(x)[numbers] * self.weights(offsets).unsqueeze(2)  # (P, k, N, dim)
        return self.out(sent.mean(1))


class Slices(nn.Module):
    """Attention between learned weighted means of all points. (P, N, dim) -> (P, N, dim)."""

    def __init__(self, args: PointsArgs) -> None:
        super().__init__()
        self.weights = nn.Linear(args.dim, args.slices)
        self.qkv, self.out = nn.Linear(args.dim, 3 * args.dim, bias=False), nn.Linear(args.dim, args.dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.weights(x).softmax(-1)  # (P, N, slices)
        means = torch.einsum("pns,pnd->nsd", weights, x) / (weights.sum(0).unsqueeze(-1) + 1e-6)
        q, k, v = self.qkv(means).chunk(3, -1)
        return self.out(torch.einsum("pns,nsd->pnd", weights, F.scaled_dot_product_attention(q, k, v)))


class Layer(nn.Module):
    """Messages of neighbours, attention between slices and feed-forward, each with a residual around it."""

    def __init__(self, args: PointsArgs) -> None:
        super().__init__()
        self.messages_norm, self.messages = nn.LayerNorm(args.dim), Messages(args)
        self.slices_norm, self.slices = nn.LayerNorm(args.dim), Slices(args)
        self.ffn_norm, self.feed_forward = nn.LayerNorm(args.dim), FeedForward(args.dim, 2 * args.dim)

    def forward(self, x: torch.Tensor, numbers: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        x = x + self.messages(self.messages_norm(x), numbers, offsets)
        x = x + self.slices(self.slices_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Head(nn.Linear):
    """(P, N, dim) -> the change of the fields, (N, channels, P, 1); places do not change."""

    muon_matrices = ()  # as an output, updated by AdamW

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.pad(super().forward(x), (0, PLACES)).permute(1, 2, 0).unsqueeze(-1)


class Points(nn.Module):
    """The model. `forward` returns hidden states; the loss calls `output`, which makes the change of the fields."""

    def __init__(self, args: PointsArgs) -> None:
        super().__init__()
        self.args = args
        self.stem = nn.Linear(args.channels, args.dim)
        self.layers = nn.ModuleDict({str(i): Layer(args) for i in range(args.n_layers)})
        self.norm = nn.LayerNorm(args.dim)
        self.output = Head(args.dim, args.channels - PLACES)

    def forward(self, fields: torch.Tensor) -> torch.Tensor:
        """fields: (N, channels, P, 1) -> hidden: (P, N, dim)."""
        x = fields.squeeze(-1).permute(2, 0, 1)
        places = x[:, 0, -PLACES:].detach()
        x = self.stem(x)
        numbers, offsets = self.neighbors(places)
        for layer in self.layers.values():
            x = layer(x, numbers, offsets)
        return self.norm(x)

    def neighbors(self, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the numbers of the nearest points of each point, (P, k), and offsets to them, (P, k, PLACES).

        The distance between points of a cloud goes with the root of their number; the offsets are about 1.
        """
        exact = places.to(torch.promote_types(places.dtype, torch.float32))
        points = exact if isinstance(exact, DomainTensor) else DomainTensor(exact, Domain({}))
        _, numbers = nearest(points, points, self.args.neighbors)
        numbers = numbers if isinstance(places, DomainTensor) else numbers.local
        return numbers, (places[numbers] - places.unsqueeze(1)) * (math.sqrt(self.args.height) / 8)

    def init_buffers(self, device: torch.device) -> None:
        """No buffers."""

    def init_parameter(self, name: str, parameter: torch.Tensor, generator: torch.Generator) -> None:
        ends = ("messages.out.weight", "slices.out.weight", "feed_forward.w2.weight")
        draw_parameter(name, parameter, generator, ends, 3 * self.args.n_layers)


SPEC = ModelSpec(build=Points, parallelize=parallelize_fields)
