"""Models of transformers and diffusers, and some written as their papers have them, that run on shards as they are."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import diffusers
import torch
import torch.nn.functional as F
import transformers
from torch import nn

SHAPE = (2, 3, 32, 40)
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "classifier_dropout_prob": 0.0}
_VIT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": (32, 40), "patch_size": 8}
_WINDOWS = {"image_size": (32, 40), "patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2]}
_PYRAMID = {
    "num_encoder_blocks": 2,
    "depths": [1, 1],
    "sr_ratios": [2, 1],
    "hidden_sizes": [8, 16],
    "num_attention_heads": [1, 2],
    "mlp_ratios": [2, 2],
    "patch_sizes": [7, 3],
    "strides": [4, 2],
}
_UNET = {"block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4, "attention_head_dim": 4}
_DIFFUSION = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "patch_size": 4}


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(9))


class Circular(nn.Module):
    """Convolutions that pad with zeros and circularly, with residual connections."""

    def __init__(self) -> None:
        super().__init__()
        options = [("same", "zeros"), ((2, 1), "circular"), ("same", "circular"), ((2, 1), "zeros")]
        self.layers = nn.ModuleList(nn.Conv2d(3, 3, (5, 3), padding=rows, padding_mode=mode) for rows, mode in options)

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


class FourierOperator(nn.Module):
    """A Fourier neural operator (arXiv 2010.08895): the lowest frequencies are mixed, the others are zero."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.down, self.local = nn.Conv2d(3, 6, 1), nn.Conv2d(6, 2, 1), nn.Conv2d(6, 6, 1)
        self.weights = nn.Parameter(torch.randn(2, 6, 6, 4, 3, 2) / 6)

    def forward(self, x):
        x = self.lift(x)
        weights, seen = torch.view_as_complex(self.weights), torch.fft.rfft2(x)
        mixed = torch.zeros(*seen.shape, dtype=seen.dtype, device=x.device)
        mixed[:, :, :4, :3] = torch.einsum("bixy,ioxy->boxy", seen[:, :, :4, :3], weights[0])
        mixed[:, :, -4:, :3] = torch.einsum("bixy,ioxy->boxy", seen[:, :, -4:, :3], weights[1])
        return self.down(F.gelu(torch.fft.irfft2(mixed, s=(x.size(-2), x.size(-1))) + self.local(x)))


class Mixer(nn.Module):
    """A layer of an MLP-Mixer (arXiv 2105.01601), which sums over all patches."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.norm = nn.Conv2d(3, 8, 8, 8), nn.LayerNorm(8)
        self.tokens, self.channels = nn.Sequential(nn.Linear(20, 12), nn.GELU(), nn.Linear(12, 20)), nn.Linear(8, 8)

    def forward(self, x):
        y = self.patch(x).flatten(2).transpose(1, 2)
        y = y + self.tokens(self.norm(y).transpose(1, 2)).transpose(1, 2)
        return y + self.channels(self.norm(y))


class Transolver(nn.Module):
    """Physics attention (arXiv 2402.02366): points are summed to few slices, which attend to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.slices, self.leave = nn.Linear(3, 8), nn.Linear(4, 5), nn.Linear(8, 8)
        self.temperature = nn.Parameter(torch.full((1, 2, 1, 1), 0.5))
        self.q, self.k, self.v = (nn.Linear(4, 4, bias=False) for _ in range(3))

    def forward(self, x):
        x = self.enter(x.flatten(2).transpose(1, 2) if x.ndim == 4 else x)
        n, points, channels = x.shape
        heads = x.reshape(n, points, 2, channels // 2).permute(0, 2, 1, 3).contiguous()
        weights = self.slices(heads).div(self.temperature).softmax(-1)
        tokens = torch.einsum("bhnc,bhng->bhgc", heads, weights)
        tokens = tokens / (weights.sum(2) + 1e-5)[:, :, :, None].repeat(1, 1, 1, channels // 2)
        scores = torch.matmul(self.q(tokens), self.k(tokens).transpose(-1, -2)) / 2
        seen = torch.einsum("bhgc,bhng->bhnc", torch.matmul(scores.softmax(-1), self.v(tokens)), weights)
        return self.leave(seen.permute(0, 2, 1, 3).reshape(n, points, channels)) + x


class Recurrent(nn.Module):
    """A convolutional LSTM (arXiv 1506.04214), whose first state it makes itself."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3 + 4, 16, 3, padding=1)

    def forward(self, x):
        n, _, h, w = x.size()
        hidden, cell = x.new_zeros(n, 4, h, w), x.new_zeros(n, 4, h, w)
        for _ in range(2):
            i, f, o, g = torch.split(self.conv(torch.cat([x, hidden], 1)), 4, dim=1)
            cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
            hidden = o.sigmoid() * cell.tanh()
        return hidden


class Latents(nn.Module):
    """A Perceiver (arXiv 2103.03206): latents attend to all pixels."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.PerceiverConfig(
            num_latents=6,
            d_latents=12,
            d_model=3,
            num_self_attends_per_block=2,
            num_self_attention_heads=2,
            num_cross_attention_heads=1,
            attention_probs_dropout_prob=0.0,
        )
        self.model = transformers.PerceiverModel(config)

    def forward(self, x):
        return self.model(x.flatten(2).transpose(1, 2)).last_hidden_state


@dataclass(frozen=True)
class Model:
    """A model and its arguments.

    make: builds the model. others: arguments of its forward after the input. checked: whether `parallelize` can follow
    it.
    """

    make: Callable[[], nn.Module]
    others: tuple[Any, ...] = ()
    shape: tuple[int, ...] = SHAPE
    checked: bool = True


def of(library: Any, name: str, *others: Any, shape: tuple[int, ...] = SHAPE, **options: Any) -> Model:
    """A model of a library by the name of its class; its configuration has the same name in transformers."""
    if library is diffusers:
        return Model(lambda: getattr(diffusers, name)(**options), others, shape)
    config = getattr(transformers, name.removesuffix("ForSemanticSegmentation").removesuffix("Model") + "Config")
    return Model(lambda: getattr(transformers, name)(config(**options)), others, shape)


_STEPS = torch.tensor([3, 700])
MODELS = {
    "unet": of(
        diffusers,
        "UNet2DModel",
        _STEPS,
        in_channels=3,
        out_channels=2,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        **_UNET,
    ),
    "resnet": of(
        transformers, "ResNetModel", embedding_size=8, hidden_sizes=[8, 16], depths=[2, 1], layer_type="basic"
    ),
    "bottleneck": of(transformers, "ResNetModel", embedding_size=8, hidden_sizes=[16, 32], depths=[1, 1]),
    "convnext": of(transformers, "ConvNextModel", hidden_sizes=[8, 12, 16, 20], depths=[1, 1, 1, 1]),
    "Circular": Model(Circular),
    "vit": of(transformers, "ViTModel", intermediate_size=24, **_VIT),  # with a class token
    "deit": of(transformers, "DeiTModel", intermediate_size=24, **_VIT),  # with two tokens
    "dinov2": of(
        transformers, "Dinov2WithRegistersModel", shape=(2, 3, 32, 32), mlp_ratio=2, **(_VIT | {"image_size": 32})
    ),
    "swin": of(transformers, "SwinModel", window_size=4, drop_path_rate=0.0, **_WINDOWS),
    "swinv2": of(transformers, "Swinv2Model", window_size=4, drop_path_rate=0.0, **_WINDOWS),
    "segformer": of(
        transformers,
        "SegformerForSemanticSegmentation",
        decoder_hidden_size=8,
        drop_path_rate=0.0,
        **_PYRAMID,
        **NO_DROPOUT,
    ),
    "pvt": of(transformers, "PvtV2Model", image_size=(32, 40), **_PYRAMID),
    "mobilevit": of(
        transformers,
        "MobileViTModel",
        image_size=32,
        hidden_sizes=[8, 12, 16],
        neck_hidden_sizes=[4, 4, 8, 8, 8, 8, 16],
        num_attention_heads=2,
        output_stride=8,
        initializer_range=0.5,  # gradients that are no rounding alone
        **NO_DROPOUT,
    ),
    "dit": of(
        diffusers,
        "DiTTransformer2DModel",
        _STEPS,
        torch.tensor([1, 2]),
        shape=(2, 3, 32, 32),
        in_channels=3,
        sample_size=32,
        norm_num_groups=1,
        num_embeds_ada_norm=10,
        **_DIFFUSION,
    ),
    "sd3": of(
        diffusers,
        "SD3Transformer2DModel",
        draw(2, 5, 12),
        draw(2, 10),
        _STEPS,
        in_channels=3,
        out_channels=3,
        sample_size=40,
        joint_attention_dim=12,
        caption_projection_dim=16,
        pooled_projection_dim=10,
        pos_embed_max_size=12,
        **_DIFFUSION,
    ),
    "conditional unet": of(
        diffusers,
        "UNet2DConditionModel",
        _STEPS,
        draw(2, 5, 12),
        in_channels=3,
        out_channels=3,
        cross_attention_dim=12,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        **_UNET,
    ),
    "vq": of(diffusers, "VQModel", block_out_channels=(8,), norm_num_groups=4, latent_channels=3, num_vq_embeddings=16),
    "fourier": Model(FourierOperator),
    "mixer": Model(Mixer),
    "transolver": Model(Transolver),
    "recurrent": Model(Recurrent),
    "latents": Model(Latents, checked=False),  # it asks whether all values of a mask are true
}
