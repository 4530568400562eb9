r"""The layers of a decoder: a mixer with its feed-forward network, and layers that predict further tokens.

    x -> norm -> mixer -> norm -> + -> norm -> feed-forward or experts -> norm -> + ->
     \__________________________/ \____________________________________________/

Each norm is optional. A mixer is attention or linear attention. A third branch may follow, with the layer's own input.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from trainer.families.args import expert_layers
from trainer.families.decoder_args import TransformerArgs
from trainer.families.feed_forward_args import DenseArgs, FeedForwardArgs
from trainer.families.layer_kinds import key_sources
from trainer.families.linear_args import GatedDeltaArgs, KimiDeltaArgs, MambaArgs
from trainer.families.mixers import (
    AttentionArgs,
    LatentAttentionArgs,
    Mixer,
    SharedKeysArgs,
    SparseAttentionArgs,
)
from trainer.models.attention import Attention, SharedKeysAttention
from trainer.models.beside_dense import ExpertsBesideDense
from trainer.models.feed_forward import FeedForward, gated
from trainer.models.latent_attention import LatentAttention
from trainer.models.linear_attention import GatedDeltaNet, KimiDeltaAttention, Mamba2
from trainer.models.moe import MoE
from trainer.models.norms import build_norm
from trainer.models.sparse_attention import SparseAttention
from trainer.models.tiles import in_tiles
from trainer.parallel.tensor_parallel import Styles, tokens_divided

MIXERS: dict[type[Mixer], Callable[..., nn.Module]] = {
    AttentionArgs: Attention,
    SharedKeysArgs: SharedKeysAttention,
    LatentAttentionArgs: LatentAttention,
    SparseAttentionArgs: SparseAttention,
    GatedDeltaArgs: GatedDeltaNet,
    KimiDeltaArgs: KimiDeltaAttention,
    MambaArgs: Mamba2,
}
"""Record of a mixer -> its module, called with (channels of hidden states, the record, norms of the model)."""


def build_feed_forward(args: TransformerArgs, feed_forward: FeedForwardArgs) -> nn.Module:
    """Return the feed-forward network of a layer, or its experts, with their part of the model's balance coefficient.

    Args:
        args: The arguments of the model.
        feed_forward: The record of the layer's network.
    """
    branches = 2 * args.n_layers
    if isinstance(feed_forward, DenseArgs):
        return FeedForward(args.dim, feed_forward, branches=branches)
    coefficient = args.router_aux_loss_coef / len(expert_layers(args))
    rates = {"aux_loss_coef": coefficient, "bias_update_rate": args.router_bias_update_rate}
    if feed_forward.beside_dense:
        return ExpertsBesideDense(
            args.dim, feed_forward, args.norms, branches=branches, **rates
        )
    return MoE(args.dim, feed_forward, branches=branches, **rates)


class TransformerBlock(nn.Module):
    """Mixer and feed-forward network. Each has a residual connection, and a norm before or after it, or both.

    Args:
        args: The arguments of the model.
        layer: Number of the layer.
    """

    def __init__(self, args: TransformerArgs, layer: int) -> None:
        super().__init__()
        record = args.layer(layer)
        norms = record.norms
        norm = partial(build_norm, norms, args.dim)
        self.attention_norm = norm() if norms.before else None
        self.attention = MIXERS[type(record.mixer)](
            args.dim, record.mixer, norms, branches=2 * args.n_layers
        )
        self.attention_post_norm = norm() if norms.after else None
        self.ffn_norm = norm() if norms.before else None
        self.feed_forward = build_feed_forward(args, record.feed_forward)
        self.ffn_post_norm = norm() if norms.after else None
        self.has_experts = record.has_experts
        self.theta = record.mixer.rope_theta
        self.residual_scale = args.residual_scale
        self.gives_keys = layer in key_sources(args.kinds).values()
        if self.gives_keys:
            self.attention.gives_keys = True
        self.activation = args.activation
        self.input_gate = None
        if record.input_dim:
            self.input_gate = nn.Linear(args.dim, record.input_dim, bias=False)
            self.input_projection = nn.Linear(record.input_dim, args.dim, bias=False)
            self.input_norm = norm()
        self.register_buffer("layer_scalar", torch.ones(1) if args.layer_scalar else None)
        self.tiles = 1
        """Parts of the sequence in which the norm, the feed-forward network and the residual sum are computed."""

    def forward(
        self,
        x: Tensor,
        freqs_cis: Tensor | None,
        attention_plan: Tensor | None = None,
        positions: Tensor | None = None,
        *,
        keys: Sequence[Tensor] | None = None,
        layer_input: Tensor | None = None,
        **adapter_inputs: Tensor,
    ) -> Tensor | tuple[Tensor, ...]:
        """Return the output, (B, S, dim). With `gives_keys` the keys and the values follow, (B, K, S, D) each.

        Args:
            x: (B, S, dim).
            freqs_cis: Rotary table of this layer's frequencies. None if the layer rotates nothing.
            attention_plan: Handle of the open plan. None without a plan.
            positions: (B, S), -1 for padding. None without packed documents.
            keys: Keys and values of an earlier layer, if the layer shares them.
            layer_input: The layer's own input, (B, S, channels). None if the layer has none.
            **adapter_inputs: Passed to the linear modules, see `transforms/lora.py`.
        """
        shared = adapter_inputs if keys is None else {**adapter_inputs, "keys": keys}
        out = self.with_attention(x, freqs_cis, attention_plan, positions, **shared)
        x, *own_keys = out if self.gives_keys else (out,)
        if self.has_experts:
            x = self.with_experts(x, positions)
        else:
            # With sequence parallelism x has this rank's tokens, and the network sees all tokens: (B, S / tp, tp).
            tokens = x.shape[1]
            rows = [
                n.unflatten(1, (n.shape[1] // max(tokens, 1), tokens)).mT
                for n in adapter_inputs.values()
            ]
            parts = self.ffn_norm, self.feed_forward, self.ffn_post_norm
            modules = [part for part in parts if part is not None]
            x = in_tiles(self.with_feed_forward, [x, *rows], self.tiles, modules)
        if layer_input is not None:
            own = gated(self.activation, self.input_gate(x), layer_input)
            x = self._with_branch(x, self.input_projection(own), self.input_norm)
        x = x if self.layer_scalar is None else x * self.layer_scalar.to(x.dtype)
        return (x, *own_keys) if own_keys else x

    def with_attention(
        self,
        x: Tensor,
        freqs_cis: Tensor | None,
        attention_plan: Tensor | None,
        positions: Tensor | None,
        **adapter_inputs: Tensor,
    ) -> Tensor | tuple[Tensor, ...]:
        """Return x plus the output of the mixer.

        Args:
            x: (B, S, dim).
            freqs_cis: As in `forward`.
            attention_plan: As in `forward`.
            positions: As in `forward`.
            **adapter_inputs: As in `forward`, and its `keys`.

        Returns:
            (B, S, dim). If the layer gives its keys and values, they follow.
        """
        normed = x if self.attention_norm is None else self.attention_norm(x)
        out = self.attention(
            normed, freqs_cis, attention_plan, positions=positions, **adapter_inputs
        )
        out, *own_keys = out if self.gives_keys else (out,)
        x = self._with_branch(x, out, self.attention_post_norm)
        return (x, *own_keys) if own_keys else x

    def with_experts(self, x: Tensor, positions: Tensor | None) -> Tensor:
        """Return x plus the output of the experts. It is not compiled: only the routing knows the numbers of rows.

        Args:
            x: (B, S, dim).
            positions: (B, S), -1 for padding. None without packed documents.

        Returns:
            (B, S, dim).
        """
        normed = x if self.ffn_norm is None else self.ffn_norm(x)
        beside = {"residual": x} if isinstance(self.feed_forward, ExpertsBesideDense) else {}
        # positions tell the router which tokens are padding
        out = self.feed_forward(normed, positions, **beside)
        return self._with_branch(x, out, self.ffn_post_norm)

    def with_feed_forward(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        """Return x plus the output of the feed-forward network.

        Args:
            x: (B, S, dim), or a part of the sequence.
            rows: Numbers of the tokens for adapters, (B, S / tp, tp). None without dropout of adapters.

        Returns:
            The shape of x.
        """
        adapter_inputs = {} if rows is None else {"token_numbers": rows.mT.flatten(1)}
        normed = x if self.ffn_norm is None else self.ffn_norm(x)
        return self._with_branch(
            x, self.feed_forward(normed, **adapter_inputs), self.ffn_post_norm
        )

    def tensor_parallel_styles(self) -> Styles:
        """Return how tensor-parallel ranks divide the norms: each rank normalises its own tokens."""
        norms = "attention_norm", "attention_post_norm", "ffn_norm", "ffn_post_norm"
        styles = tokens_divided(name for name in norms if getattr(self, name) is not None)
        if self.input_gate is not None:
            styles |= tokens_divided(("input_gate", "input_projection", "input_norm"))
        return styles

    def compiled_methods(self) -> list[tuple[nn.Module, str]]:
        """Return the methods, as (module, name), that are compiled if the block is not compiled as a whole."""
        parts = [(self, "with_attention")]
        if self.has_experts:
            return parts + self.feed_forward.compiled_methods()
        return [*parts, (self, "with_feed_forward")]

    def _with_branch(self, x: Tensor, out: Tensor, norm: nn.Module | None) -> Tensor:
        """Add the output of a branch to its input."""
        out = out if norm is None else norm(out)
        return x + (out if self.residual_scale == 1 else out * self.residual_scale)


class FurtherTokenLayer(TransformerBlock):
    """Predicts one token more than the layer before it: multi-token prediction (DeepSeek-V3, arXiv 2412.19437).

        h'_i = norm(layer(projection [norm(embedding of token i + k) ; norm(h_i)]))        for the k-th such layer

    h is the input of the output projection, after the norm: of the model, or of the layer before, as in vLLM and
    Megatron. The outer norm is one of the model's `mtp_norms`, not a module of this layer. FSDP shards experts by
    themselves; a norm after them in the layer would start its recomputation before their backward, and FSDP would
    gather for a forward.

    Args:
        args: The arguments of the model.
        layer: Number of the layer, counted after the layers of the model.
    """

    def __init__(self, args: TransformerArgs, layer: int) -> None:
        super().__init__(args, layer)
        self.embedding_norm = build_norm(args.norms, args.dim)
        self.hidden_norm = build_norm(args.norms, args.dim)
        self.projection = nn.Linear(2 * args.dim, args.dim, bias=False)

    def tensor_parallel_styles(self) -> Styles:
        """Return how tensor-parallel ranks divide its norms and its projection: each rank computes its own tokens."""
        own = tokens_divided(("embedding_norm", "hidden_norm", "projection"))
        return super().tensor_parallel_styles() | own

    def forward(self, x: Tensor, *args: Tensor | None, **adapter_inputs: Tensor) -> Tensor:
        """Return the hidden states, (B, S, dim).

        Args:
            x: Embeddings, then hidden states, in the last dimension: (B, S, 2 dim).
            *args: The other arguments of `TransformerBlock.forward`.
            **adapter_inputs: Passed to the linear modules.
        """
        embedded, hidden = x.chunk(2, -1)
        x = self.projection(
            torch.cat([self.embedding_norm(embedded), self.hidden_norm(hidden)], -1)
        )
        return super().forward(x, *args, **adapter_inputs)
