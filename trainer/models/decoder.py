"""The decoder of all families of language models, as single-device code. Its arguments say what a family has.

Llama 3 is arXiv 2407.21783, Qwen3 2505.09388, Qwen2 2407.10671, Mistral 2310.06825, Gemma 3
2503.19786, OLMo 2 2501.00656, GLM-4.5 2508.06471, DeepSeek-V3 2412.19437.
"""

import math
from collections.abc import Callable
from copy import deepcopy
from functools import partial

import torch
from torch import nn

from longshard.context.live import own_positions, with_layer
from trainer.families.args import all_layers, expert_layers
from trainer.families.decoder_args import TransformerArgs
from trainer.families.feed_forward_args import DenseArgs, FeedForwardArgs
from trainer.families.linear_args import GatedDeltaArgs, KimiDeltaArgs, MambaArgs
from trainer.families.mixers import AttentionArgs, LatentAttentionArgs, Mixer
from trainer.models.attention import Attention
from trainer.models.feed_forward import FeedForward
from trainer.models.initialization import fill
from trainer.models.latent_attention import LatentAttention
from trainer.models.linear_attention import GatedDeltaNet, KimiDeltaAttention, Mamba2
from trainer.models.moe import MoE, routers_of
from trainer.models.norms import build_norm
from trainer.models.rotary import freqs_cis_at, rope_frequencies
from trainer.models.tiles import in_tiles
from trainer.parallel.tensor_parallel import Styles, tokens_divided

MIXERS: dict[type[Mixer], Callable[..., nn.Module]] = {
    AttentionArgs: Attention,
    LatentAttentionArgs: LatentAttention,
    GatedDeltaArgs: GatedDeltaNet,
    KimiDeltaArgs: KimiDeltaAttention,
    MambaArgs: Mamba2,
}
"""Record of a mixer -> its module, built of (channels of hidden states, the record, norms of the model)."""


def build_feed_forward(args: TransformerArgs, feed_forward: FeedForwardArgs) -> nn.Module:
    """Return the feed-forward network of a layer, or its experts."""
    branches = 2 * args.n_layers
    if isinstance(feed_forward, DenseArgs):
        return FeedForward(args.dim, feed_forward, branches=branches)
    coefficient = args.router_aux_loss_coef / len(expert_layers(args))
    rates = {"aux_loss_coef": coefficient, "bias_update_rate": args.router_bias_update_rate}
    return MoE(args.dim, feed_forward, branches=branches, **rates)


class TransformerBlock(nn.Module):
    """Attention and feed-forward, each with norms before or behind it and a residual around it."""

    def __init__(self, args: TransformerArgs, layer: int) -> None:
        super().__init__()
        record = args.layer(layer)
        norms = record.norms
        build = MIXERS[type(record.mixer)]
        self.attention_norm = build_norm(norms, args.dim) if norms.before else None
        self.attention = build(args.dim, record.mixer, norms, branches=2 * args.n_layers)
        self.attention_post_norm = build_norm(norms, args.dim) if norms.after else None
        self.ffn_norm = build_norm(norms, args.dim) if norms.before else None
        self.feed_forward = build_feed_forward(args, record.feed_forward)
        self.ffn_post_norm = build_norm(norms, args.dim) if norms.after else None
        self.has_experts = record.has_experts
        self.theta = record.mixer.rope_theta
        self.residual_scale = args.residual_scale
        self.tiles = 1
        """Parts of the sequence in which the norm, the feed-forward network and the residual sum are computed."""

    def forward(
        self,
        x: torch.Tensor,
        freqs_cis: torch.Tensor | None,
        attention_plan: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        **of_adapters: torch.Tensor,
    ) -> torch.Tensor:
        """x: (B, S, dim) -> the same shape. freqs_cis: of this layer's frequencies, None if it rotates nothing."""
        x = self.with_attention(x, freqs_cis, attention_plan, positions, **of_adapters)
        if self.has_experts:
            return self.with_experts(x, positions)
        # With sequence parallelism x has some of the tokens, and the network sees those of all ranks: (B, S / tp, tp).
        tokens = x.shape[1]
        rows = [
            n.unflatten(1, (n.shape[1] // max(tokens, 1), tokens)).mT
            for n in of_adapters.values()
        ]
        parts = self.ffn_norm, self.feed_forward, self.ffn_post_norm
        return in_tiles(
            self.with_feed_forward,
            [x, *rows],
            self.tiles,
            [part for part in parts if part is not None],
        )

    def with_attention(
        self,
        x: torch.Tensor,
        freqs_cis: torch.Tensor | None,
        attention_plan: torch.Tensor | None,
        positions: torch.Tensor | None,
        **of_adapters: torch.Tensor,
    ) -> torch.Tensor:
        """Add the output of attention."""
        normed = x if self.attention_norm is None else self.attention_norm(x)
        out = self.attention(
            normed, freqs_cis, attention_plan, positions=positions, **of_adapters
        )
        return self._with_branch(x, out, self.attention_post_norm)

    def with_experts(self, x: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        """Add the output of experts. It is not compiled: numbers of rows are only known to the routing."""
        normed = x if self.ffn_norm is None else self.ffn_norm(x)
        # count no padding
        return self._with_branch(x, self.feed_forward(normed, positions), self.ffn_post_norm)

    def with_feed_forward(
        self, x: torch.Tensor, rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Add the output of the feed-forward network. rows: the numbers of adapters' tokens, (B, S / tp, tp)."""
        of_adapters = {} if rows is None else {"token_numbers": rows.mT.flatten(1)}
        normed = x if self.ffn_norm is None else self.ffn_norm(x)
        return self._with_branch(
            x, self.feed_forward(normed, **of_adapters), self.ffn_post_norm
        )

    def tensor_parallel_styles(self) -> Styles:
        """Return how tensor-parallel ranks divide the norms of branches: each normalises its own tokens."""
        norms = "attention_norm", "attention_post_norm", "ffn_norm", "ffn_post_norm"
        return tokens_divided(name for name in norms if getattr(self, name) is not None)

    def compiled_methods(self) -> list[tuple[nn.Module, str]]:
        """Return its methods that are compiled where it is not compiled as a whole."""
        parts = [(self, "with_attention")]
        if self.has_experts:
            return parts + self.feed_forward.compiled_methods()
        return [*parts, (self, "with_feed_forward")]

    def _with_branch(
        self, x: torch.Tensor, out: torch.Tensor, norm: nn.Module | None
    ) -> torch.Tensor:
        """Add the output of a branch to its input."""
        out = out if norm is None else norm(out)
        return x + (out if self.residual_scale == 1 else out * self.residual_scale)


class FurtherTokenLayer(TransformerBlock):
    """Predicts one token more than what it follows: multi-token prediction (DeepSeek-V3, arXiv 2412.19437).

        h'_i = norm(layer(projection [norm(embedding of token i + k) ; norm(h_i)]))        for the k-th such layer

    h: what the model, or the layer before, gives to the output, behind its norm, as vLLM and Megatron compute it. The
    outer norm is one of the model's `mtp_norms`: behind experts that FSDP shards by themselves, a norm in the layer
    would begin its recomputation before their backward, and FSDP would gather for a forward.
    """

    def __init__(self, args: TransformerArgs, layer: int) -> None:
        super().__init__(args, layer)
        self.embedding_norm = build_norm(args.norms, args.dim)
        self.hidden_norm = build_norm(args.norms, args.dim)
        self.projection = nn.Linear(2 * args.dim, args.dim, bias=False)

    def tensor_parallel_styles(self) -> Styles:
        """Return how tensor-parallel ranks divide its norms and its projection: by their own tokens."""
        own = tokens_divided(("embedding_norm", "hidden_norm", "projection"))
        return super().tensor_parallel_styles() | own

    def forward(
        self, x: torch.Tensor, *args: torch.Tensor | None, **of_adapters: torch.Tensor
    ) -> torch.Tensor:
        """x: (B, S, 2 dim), embeddings and hidden states; args: as of a layer -> (B, S, dim)."""
        embedded, hidden = x.chunk(2, -1)
        x = self.projection(
            torch.cat([self.embedding_norm(embedded), self.hidden_norm(hidden)], -1)
        )
        return super().forward(x, *args, **of_adapters)


def _own(theta: float) -> str:
    """Return the name of the frequencies of layers that have their own base."""
    return f"frequencies_of_{theta}".replace(".", "_")


class CappedOutput(nn.Linear):
    """Projection to logits c * tanh(logit / c), whose size is bounded (Gemma 2, arXiv 2408.00118). softcap: c."""

    def __init__(self, dim: int, vocab_size: int, softcap: float) -> None:
        super().__init__(dim, vocab_size, bias=False)
        self.softcap = softcap

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: (B, S, dim) -> (B, S, vocab)."""
        return self.softcap * torch.tanh(super().forward(hidden) / self.softcap)


class Transformer(nn.Module):
    """The decoder. `forward` returns hidden states; the loss calls `output`, the projection to logits.

    A pipeline stage has some of the layers, and None for an embedding, norm or output that it lacks.
    """

    def __init__(self, args: TransformerArgs) -> None:
        super().__init__()
        self.args = args
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        # A dictionary keeps the layers' names when a pipeline stage drops some of them.
        kinds = {
            i: TransformerBlock if i < args.n_layers else FurtherTokenLayer
            for i in all_layers(args)
        }
        self.layers = nn.ModuleDict({str(i): kind(args, i) for i, kind in kinds.items()})
        self.norm = build_norm(args.norms, args.dim)
        further = all_layers(args)[args.n_layers :]
        self.mtp_norms = nn.ModuleDict({str(i): deepcopy(self.norm) for i in further})
        cap = args.logits_softcap
        kind = (
            partial(nn.Linear, bias=False)
            if cap is None
            else partial(CappedOutput, softcap=cap)
        )
        self.output = kind(args.dim, args.vocab_size)
        if args.tie_embeddings:
            self.output.weight = self.tok_embeddings.weight
        pairs = args.table_dim // 2
        self.thetas = sorted(
            {theta for i in all_layers(args) if (theta := args.layer(i).mixer.rope_theta)}
        )
        self.register_buffer("frequencies", torch.empty(pairs), persistent=False)
        for theta in self.thetas:
            self.register_buffer(_own(theta), torch.empty(pairs), persistent=False)
        self.rotary_dtype = torch.float32
        self.by_length = False
        """Whether LongRoPE goes by the length of each text, as in transformers, and not by `max_seq_len`."""

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None = None,
        attention_plan: torch.Tensor | None = None,
        next_tokens: torch.Tensor | None = None,
        **of_adapters: torch.Tensor,
    ) -> torch.Tensor:
        """Return the hidden states of tokens: (B, S) -> (B, S, dim).

        positions: (B, S); by default the positions of this rank in the layout of the plan, or 0 to S - 1 without a
        plan. Padding has the position -1.
        attention_plan: handle of the open `context_parallel`. A pipeline stage without the embedding takes hidden
        states instead of tokens. next_tokens: (B, S, K), the K tokens that follow each -> (B (1 + K), S, dim), with
        the hidden states of the layers that predict further tokens behind the others; between stages, the embeddings
        of these tokens. of_adapters: `token_numbers` (B, S), if adapters have dropout.
        """
        tables = self._freqs_cis(tokens, positions, attention_plan)
        x = tokens
        embedded = ()
        if next_tokens is not None and self.tok_embeddings is not None:
            x = torch.cat([tokens, *next_tokens.unbind(-1)])
        x = x if self.tok_embeddings is None else self._embedded(x)
        if next_tokens is not None:
            x, *embedded = x.chunk(1 + next_tokens.shape[-1])

        def through(number: str, x: torch.Tensor) -> torch.Tensor:
            table = tables.get(self.layers[number].theta)
            return self.layers[number](
                x, table, with_layer(attention_plan, int(number)), positions, **of_adapters
            )

        before_norm = [number for number in self.layers if int(number) < self.args.n_layers]
        for number in before_norm:
            x = through(number, x)
        if self.norm is None:
            # A stage of the output alone: torch 2.11 finds no gradient for an input that is also the result.
            x = x if len(self.layers) or self.tok_embeddings is not None else x.view_as(x)
            return torch.cat([x, *embedded]) if embedded else x
        x = self.norm(x)
        if embedded:
            found = [x]
            for number, of_next in zip(
                list(self.layers)[len(before_norm) :], embedded, strict=True
            ):
                found.append(
                    self.mtp_norms[number](through(number, torch.cat([of_next, found[-1]], -1)))
                )
            x = torch.cat(found)
        return x if self.args.logits_divisor == 1 else x / self.args.logits_divisor

    def _embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(tokens)
        scale = self.args.embedding_scale
        # Rounded as embeddings are: sqrt(3072) is 55.5 in bfloat16.
        return x if scale == 1 else x * torch.full((), scale, dtype=x.dtype, device=x.device)

    def _freqs_cis(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None,
        attention_plan: torch.Tensor | None,
    ) -> dict[float | None, torch.Tensor]:
        """Return the rotary tables that these layers use, by the base of own frequencies, None for the model's."""
        if positions is None and attention_plan is not None:
            positions = own_positions(attention_plan, tokens.device)
        elif positions is None:
            # The hidden states of a later stage may be a part of the sequence, over tensor-parallel ranks.
            length = self.args.max_seq_len if self.tok_embeddings is None else tokens.shape[1]
            positions = torch.arange(length, device=tokens.device)
        kinds = {None: (self.frequencies, self.args.rope_scaling)}
        kinds |= {theta: (self.get_buffer(_own(theta)), None) for theta in self.thetas}
        used = {layer.theta for layer in self.layers.values()}
        tables = {theta: kind for theta, kind in kinds.items() if theta in used}
        options = {
            "dtype": self.rotary_dtype,
            "unrotated": self.args.table_dim - self.args.rotary_dim,
        }
        return {
            theta: freqs_cis_at(positions, *kind, **options) for theta, kind in tables.items()
        }

    def init_buffers(self, device: torch.device) -> None:
        args = self.args
        self.rotary_dtype = torch.promote_types(next(self.parameters()).dtype, torch.float32)
        rotated = args.rotary_dim
        unrotated = args.table_dim - args.rotary_dim
        self._set_frequencies(args.max_seq_len, device)
        for theta in self.thetas:
            setattr(
                self, _own(theta), rope_frequencies(rotated, theta, None, unrotated).to(device)
            )
        for router in routers_of([self]).values():
            router.init_buffers(device)

    def rotate_for(self, length: int) -> float:
        """Rotate a text of `length` tokens, and return the longest text for which this holds.

        With `by_length` LongRoPE has its short factors up to the original length, and the long ones beyond it.
        """
        scaling = self.args.rope_scaling
        if not self.by_length or scaling is None or scaling.kind != "longrope":
            return math.inf
        self._set_frequencies(length, self.frequencies.device)
        return (
            scaling.original_max_seq_len if length <= scaling.original_max_seq_len else math.inf
        )

    def _set_frequencies(self, longest: int, device: torch.device) -> None:
        args = self.args
        unrotated = self.args.table_dim - self.args.rotary_dim
        found = rope_frequencies(
            args.rotary_dim, args.rope_theta, args.rope_scaling, unrotated, longest
        )
        self.frequencies = found.to(device)

    def init_parameter(
        self, name: str, parameter: torch.Tensor, generator: torch.Generator
    ) -> None:
        """Set norms to one; draw embeddings of unit scale, and an output whose logits are small.

        A tied matrix also makes the logits.
        """
        if name == "tok_embeddings.weight":
            scale = 0.02 if self.args.tie_embeddings else 1.0 / self.args.embedding_scale
            parameter.normal_(0.0, scale, generator=generator)
        elif name == "output.weight":
            parameter.normal_(0.0, 1.0 / parameter.shape[1], generator=generator)
        else:
            fill(name, parameter, generator)


def rotated_until(model: nn.Module, length: int) -> float:
    """Set the frequencies of any model for a text of `length` tokens; return the longest text for which they hold."""
    rotate_for = getattr(model, "rotate_for", None)
    return math.inf if rotate_for is None else rotate_for(length)
