"""The decoder of all families of language models, as single-device code. Its arguments say what a family has.

Llama 3 is arXiv 2407.21783, Qwen3 2505.09388, Qwen2 2407.10671, Mistral 2310.06825.
"""

import torch
from torch import nn

from trainer.distributed.context_parallel.live import of_layer, own_positions
from trainer.families.decoder_args import TransformerArgs
from trainer.models.attention import Attention
from trainer.models.feed_forward import FeedForward
from trainer.models.initialization import start
from trainer.models.moe import MoE, routers_of
from trainer.models.rotary import freqs_cis_at, rope_frequencies
from trainer.models.tiles import in_tiles


def build_norm(kind: str, dim: int, eps: float) -> nn.Module:
    """Return RMSNorm, LayerNorm with a weight only, or LayerNorm without parameters (np_layernorm, as in OLMo)."""
    if kind == "rmsnorm":
        return nn.RMSNorm(dim, eps=eps)
    return nn.LayerNorm(dim, eps=eps, elementwise_affine=kind == "layernorm", bias=False)


def build_feed_forward(args: TransformerArgs, layer: int) -> nn.Module:
    """Return the feed-forward network of a layer, or its experts."""
    if args.experts is None:
        return FeedForward(args.dim, args.ffn_hidden_dim, branches=2 * args.n_layers)
    coefficient = args.router_aux_loss_coef / args.n_layers
    rates = {"aux_loss_coef": coefficient, "bias_update_rate": args.router_bias_update_rate}
    return MoE(args.dim, args.experts, branches=2 * args.n_layers, **rates)


class TransformerBlock(nn.Module):
    """Attention and feed-forward, each with a norm before it and a residual around it."""

    def __init__(self, args: TransformerArgs, layer: int) -> None:
        super().__init__()
        self.attention_norm = build_norm(args.norm_type, args.dim, args.norm_eps)
        self.attention = Attention(
            args.dim,
            n_heads=args.n_heads,
            n_kv_heads=args.n_kv_heads,
            head_dim=args.head_dim,
            sliding_window=args.window_of_layer(layer),
            sinks=args.attention_sinks,
            short_conv_kernel=args.short_conv_kernel,
            bias=args.attention_bias,
            output_bias=args.output_bias,
            qk_norm_eps=args.norm_eps if args.qk_norm else None,
            branches=2 * args.n_layers,
        )
        self.ffn_norm = build_norm(args.norm_type, args.dim, args.norm_eps)
        self.feed_forward = build_feed_forward(args, layer)
        self.has_experts = args.experts is not None
        self.tiles = 1
        """Parts of the sequence in which the norm, the feed-forward network and the residual sum are computed."""

    def forward(
        self,
        x: torch.Tensor,
        freqs_cis: torch.Tensor,
        attention_plan: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        **of_adapters: torch.Tensor,
    ) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), freqs_cis, attention_plan, positions=positions, **of_adapters)
        if self.has_experts:
            return x + self.feed_forward(self.ffn_norm(x), positions)  # routers count no padding
        # With sequence parallelism x has some of the tokens, and the network sees those of all ranks: (B, S / tp, tp).
        tokens = x.shape[1]
        rows = [n.unflatten(1, (n.shape[1] // max(tokens, 1), tokens)).mT for n in of_adapters.values()]
        return in_tiles(self._with_feed_forward, [x, *rows], self.tiles, (self.ffn_norm, self.feed_forward))

    def _with_feed_forward(self, x: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
        of_adapters = {} if rows is None else {"token_numbers": rows.mT.flatten(1)}
        return x + self.feed_forward(self.ffn_norm(x), **of_adapters)


class Transformer(nn.Module):
    """The decoder. `forward` returns hidden states; the loss calls `output`, the projection to logits.

    A pipeline stage has some of the layers, and None for an embedding, norm or output that it lacks.
    """

    def __init__(self, args: TransformerArgs) -> None:
        super().__init__()
        self.args = args
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        # A dictionary keeps the layers' names when a pipeline stage drops some of them.
        self.layers = nn.ModuleDict({str(i): TransformerBlock(args, i) for i in range(args.n_layers)})
        self.norm = build_norm(args.norm_type, args.dim, args.norm_eps)
        self.output = nn.Linear(args.dim, args.vocab_size, bias=False)
        if args.tie_embeddings:
            self.output.weight = self.tok_embeddings.weight
        self.register_buffer("frequencies", torch.empty(args.head_dim // 2), persistent=False)
        self.rotary_dtype = torch.float32

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None = None,
        attention_plan: torch.Tensor | None = None,
        **of_adapters: torch.Tensor,
    ) -> torch.Tensor:
        """tokens: (B, S) -> hidden: (B, S, dim). positions: (B, S); by default those of this rank in the layout of the
        plan, or 0 to S - 1 without a plan. Padding has the position -1.

        attention_plan: handle of the open `context_parallel`. A pipeline stage without the embedding takes hidden
        states instead of tokens. of_adapters: `token_numbers` (B, S), if adapters have dropout.
        """
        freqs_cis = self._freqs_cis(tokens, positions, attention_plan)
        x = tokens if self.tok_embeddings is None else self.tok_embeddings(tokens)
        for number, layer in self.layers.items():
            x = layer(x, freqs_cis, of_layer(attention_plan, int(number)), positions, **of_adapters)
        if self.norm is not None:
            return self.norm(x)
        # A stage of the output alone: torch 2.11 finds no gradient for an input that is also the result.
        return x if len(self.layers) or self.tok_embeddings is not None else x.view_as(x)

    def _freqs_cis(
        self, tokens: torch.Tensor, positions: torch.Tensor | None, attention_plan: torch.Tensor | None
    ) -> torch.Tensor:
        if positions is None and attention_plan is not None:
            positions = own_positions(attention_plan, tokens.device)
        elif positions is None:
            # The hidden states of a later stage may be a part of the sequence, over tensor-parallel ranks.
            length = self.args.max_seq_len if self.tok_embeddings is None else tokens.shape[1]
            positions = torch.arange(length, device=tokens.device)
        return freqs_cis_at(positions, self.frequencies, self.args.rope_scaling, self.rotary_dtype)

    def init_buffers(self, device: torch.device) -> None:
        args = self.args
        self.rotary_dtype = torch.promote_types(next(self.parameters()).dtype, torch.float32)
        self.frequencies = rope_frequencies(args.head_dim, args.rope_theta, args.rope_scaling).to(device)
        for router in routers_of([self]).values():
            router.init_buffers(device)

    def init_parameter(self, name: str, parameter: torch.Tensor, generator: torch.Generator) -> None:
        """Set norms to one; draw embeddings of unit scale, and an output whose logits are small.

        A tied matrix also makes the logits.
        """
        if name == "tok_embeddings.weight":
            parameter.normal_(0.0, 0.02 if self.args.tie_embeddings else 1.0, generator=generator)
        elif name == "output.weight":
            parameter.normal_(0.0, 1.0 / parameter.shape[1], generator=generator)
        else:
            start(name, parameter)
