"""The toy decoder as single-device code."""

import torch
from torch import nn

from examples.toy_family.args import ToyArgs
from trainer.models.attention import Attention
from trainer.models.auxiliary_loss import AuxiliaryLoss
from trainer.models.feed_forward import FeedForward
from trainer.models.rotary import apply_rope_to_halves, precompute_freqs_cis
from trainer.parallel.tensor_parallel import Styles, tokens_divided


class ToyBlock(nn.Module):
    """Pre-norm attention and feed-forward, with a penalty on large hidden states.

    After each step, `bias`, (dim,), moves so that channels become positive as often as negative.

    Args:
        args: Sizes of the model.
    """

    def __init__(self, args: ToyArgs) -> None:
        super().__init__()
        layer = args.layer(0)
        self.attention_norm = nn.LayerNorm(args.dim)
        self.attention = Attention(args.dim, layer.mixer, layer.norms, rotate=apply_rope_to_halves)
        self.ffn_norm = nn.LayerNorm(args.dim)
        self.feed_forward = FeedForward(args.dim, layer.feed_forward)
        self.penalty = AuxiliaryLoss()
        self.register_buffer("bias", torch.empty(args.dim))
        self.register_buffer("counts", torch.empty(2, args.dim, dtype=torch.int64), persistent=False)

    def forward(
        self, x: torch.Tensor, freqs_cis: torch.Tensor, attention_plan: torch.Tensor | None = None
    ) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), freqs_cis, attention_plan) + self.bias.type_as(x)
        x = self.penalty(x, 0.1 * x.square().mean(-1).sum())
        with torch.no_grad():
            positive = (x > 0).flatten(0, 1)
            self.counts.add_(torch.stack((positive.sum(0), torch.ones_like(positive).sum(0))))
        return x + self.feed_forward(self.ffn_norm(x))

    def tensor_parallel_styles(self) -> Styles:
        return tokens_divided(("attention_norm", "ffn_norm"))


class ToyDecoder(nn.Module):
    """A decoder of toy blocks, with an embedding and an output.

    Args:
        args: Sizes of the model.
    """

    def __init__(self, args: ToyArgs) -> None:
        super().__init__()
        self.args = args
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        self.layers = nn.ModuleDict({str(i): ToyBlock(args) for i in range(args.n_layers)})
        self.norm = nn.LayerNorm(args.dim)
        self.output = nn.Linear(args.dim, args.vocab_size, bias=False)
        self.register_buffer("freqs_cis", torch.empty(args.max_seq_len, args.head_dim // 2, 2), persistent=False)

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None = None,
        attention_plan: torch.Tensor | None = None,
    ) -> torch.Tensor:
        freqs_cis = self.freqs_cis if positions is None else self.freqs_cis[positions]
        x = tokens if self.tok_embeddings is None else self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x, freqs_cis, attention_plan)
        return x if self.norm is None else self.norm(x)

    def init_buffers(self, device: torch.device) -> None:
        dtype = torch.promote_types(next(self.parameters()).dtype, torch.float32)
        table = precompute_freqs_cis(self.args.max_seq_len, self.args.head_dim, 10000.0, None, dtype)
        self.freqs_cis = table.to(device)
        for layer in self.layers.values():
            layer.bias = torch.zeros_like(layer.bias, device=device)
            layer.counts = torch.zeros_like(layer.counts, device=device)

    def init_parameter(self, name: str, parameter: torch.Tensor, generator: torch.Generator) -> None:
        """Draw a parameter. Biases are drawn too: zeros would hide wrong handling of biases.

        Args:
            name: Name of the parameter.
            parameter: The parameter, set in place.
            generator: Source of the random numbers.
        """
        parameter.normal_(1.0 if "norm.weight" in name else 0.0, 0.1, generator=generator)
