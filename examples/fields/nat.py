"""A transformer with neighbourhood attention as single-device code; see nat_args.py for its sources."""

from functools import partial

import torch
from torch import nn

from examples.fields.layers import FeedForward, draw_parameter
from examples.fields.nat_args import NATArgs
from examples.fields.parallelize import parallelize_fields
from longshard.domain.modules import NeighborhoodAttention
from trainer.models.model_spec import ModelSpec


class Attention(nn.Module):
    """Neighbourhood attention over a grid, (N, H, W, dim) -> (N, H, W, dim).

    Args:
        args: Sizes of the model.
        layer: Number of the layer.
    """

    def __init__(self, args: NATArgs, layer: int) -> None:
        super().__init__()
        self.head_dim = args.head_dim
        self.wq, self.wv, self.wo = (nn.Linear(args.dim, args.dim) for _ in range(3))
        self.wk = nn.Linear(args.dim, args.dim, bias=False)  # softmax cancels a bias that all keys share
        self.inner_attention = NeighborhoodAttention(args.kernel, dilation=args.dilation_of_layer(layer))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # -1: with tensor parallelism each rank has some of the heads.
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))  # (N, H, W, heads, D)
        return self.wo(self.inner_attention(q, k, v).flatten(-2))


class Layer(nn.Module):
    """Positions by a depthwise convolution, attention and feed-forward, (N, H, W, dim) -> (N, H, W, dim).

    Each has a residual around it.

    Args:
        args: Sizes of the model.
        layer: Number of the layer.
    """

    def __init__(self, args: NATArgs, layer: int) -> None:
        super().__init__()
        self.positions = nn.Conv2d(args.dim, args.dim, 3, padding=1, padding_mode="circular", groups=args.dim)
        self.attention_norm = nn.LayerNorm(args.dim)
        self.attention = Attention(args, layer)
        self.ffn_norm = nn.LayerNorm(args.dim)
        self.feed_forward = FeedForward(args.dim, args.hidden_dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.positions(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Head(nn.Linear):
    """(N, H, W, dim) -> (N, channels, H, W)."""

    muon_matrices = ()  # updated by AdamW, like other outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).permute(0, 3, 1, 2)


class NAT(nn.Module):
    """The model. `forward` returns hidden states; the loss calls `output`, which returns the change of the fields.

    Args:
        args: Sizes of the model.
    """

    def __init__(self, args: NATArgs) -> None:
        super().__init__()
        self.args = args
        self.stem = nn.Conv2d(args.channels, args.dim, 3, padding=1, padding_mode="circular")
        self.layers = nn.ModuleDict({str(i): Layer(args, i) for i in range(args.n_layers)})
        self.norm = nn.LayerNorm(args.dim)
        self.output = Head(args.dim, args.channels)

    def forward(self, fields: torch.Tensor) -> torch.Tensor:
        """Return the hidden states, (N, H, W, dim).

        Args:
            fields: (N, channels, H, W).
        """
        x = self.stem(fields).permute(0, 2, 3, 1)
        for layer in self.layers.values():
            x = layer(x)
        return self.norm(x)

    def init_buffers(self, device: torch.device) -> None:
        """Do nothing: the model has no buffers."""

    def init_parameter(self, name: str, parameter: torch.Tensor, generator: torch.Generator) -> None:
        ends = ("attention.wo.weight", "feed_forward.w2.weight")
        draw_parameter(name, parameter, generator, ends, 2 * self.args.n_layers)


# Linear modules of a layer, by the dimension of their weight that tensor parallelism shards.
_SHARDED = {
    "attention.wq": 0,
    "attention.wk": 0,
    "attention.wv": 0,
    "attention.wo": 1,
    "feed_forward.w1": 0,
    "feed_forward.w2": 1,
}

SPEC = ModelSpec(build=NAT, parallelize=partial(parallelize_fields, sharded=_SHARDED))
