"""Latent attention in which an indexer chooses the keys of each query (DeepSeek-V3.2-Exp, 2025; GLM-5).

The indexer reads the input of the layer and the latents of queries, and gives them no gradient. It learns by a loss of
its own, see `longshard/context/execution/sparse_rows.py`, as long as its weights require gradients. They have no other
gradient, so the loss needs no coefficient.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from longshard.context.execution.sparse_rows import Index
from longshard.context.planning.options import ContextParallelOptions
from longshard.context.sparse_attention import SparseSettings, sparse_attention
from trainer.families.layers import NormArgs
from trainer.families.mixers import IndexArgs, LatentArgs, SparseAttentionArgs
from trainer.models.auxiliary_loss import AuxiliaryLoss
from trainer.models.cached import Cached
from trainer.models.initialization import Branch
from trainer.models.latent_attention import IndexerInputs, LatentAttention
from trainer.models.rotary import apply_rope, apply_rope_to_halves
from trainer.parallel.tensor_parallel import GATHERED, Styles, prefixed, tokens_divided


class Indexer(Branch):
    """Computes the index of its tokens, from which sparse attention computes index scores.

    Args:
        dim: Channels of the hidden states.
        latent: Sizes of the latents. An index head rotates the number of channels that a key of attention rotates.
        args: Number and size of the index heads.
    """

    def __init__(self, dim: int, latent: LatentArgs, args: IndexArgs) -> None:
        super().__init__()
        self.args = args
        self.rope_dim = latent.rope_dim
        self.queries = nn.Linear(latent.query_rank, args.n_heads * args.head_dim, bias=False)
        self.keys = nn.Linear(dim, args.head_dim, bias=False)
        self.key_norm = nn.LayerNorm(args.head_dim, eps=1e-6)
        self.head_weights = nn.Linear(dim, args.n_heads, bias=False)
        self.gathered = nn.Identity()
        """Tensor parallelism gathers here: a rank has the index of its tokens before, and of all tokens after."""

    def forward(self, x: Tensor, queried: Tensor, freqs_cis: Tensor) -> Index:
        """Return the rotated queries and keys, and the scaled weights of heads, from which index scores are computed.

        With tensor parallelism, a rank passes its own tokens and gets the index of all tokens: a collective.

        Args:
            x: (B, S, dim).
            queried: Latents of queries, (B, S, Q).
            freqs_cis: Rotary table.
        """
        heads, head_dim = self.args.n_heads, self.args.head_dim
        parts = self.queries(queried), self.key_norm(self.keys(x)), self.head_weights(x)
        sizes = [heads * head_dim, head_dim, heads]
        queries, keys, weights = self.gathered(torch.cat(parts, -1)).split(sizes, -1)
        queries = self._rotated(queries.unflatten(-1, (heads, head_dim)), freqs_cis)
        keys = self._rotated(keys.unsqueeze(2), freqs_cis).squeeze(2)
        return Index(queries, keys, weights * (heads * head_dim) ** -0.5)

    def _rotated(self, x: Tensor, freqs_cis: Tensor) -> Tensor:
        """Return x, (B, S, J, D), with its first channels rotated."""
        rotate = apply_rope if self.args.adjacent_pairs else apply_rope_to_halves
        turned, kept = x.split([self.rope_dim, x.shape[-1] - self.rope_dim], -1)
        return torch.cat((rotate(turned, freqs_cis.narrow(-3, 0, x.shape[1])), kept), -1)


class InnerSparseAttention(Cached):
    """Attention to chosen keys. The operator looks up its plan itself.

    Args:
        per_query: Number of keys that a query attends to; 0 for all keys that the query sees.
    """

    def __init__(self, per_query: int) -> None:
        super().__init__()
        self.per_query = per_query

    def forward(
        self,
        q: Tensor,
        latent: Tensor,
        index: Index,
        *,
        up: Tensor,
        scale: float,
        plan: Tensor | None = None,
        learns: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Return the output, (B, H, S, V), and the loss of the indexer at each query, (B, S).

        Args:
            q: (B, H, S, N + P).
            latent: (B, 1, S, R + P).
            index: The index of the same tokens.
            up: (H, N + V, R).
            scale: Factor of the scores.
            plan: Handle of the open plan. None without a plan.
            learns: Whether to compute the loss.
        """
        settings = SparseSettings(scale, self.per_query, learns)
        result = sparse_attention(q, latent.squeeze(1), up, index, plan, settings)
        return result.output, result.loss


class SparseAttention(LatentAttention):
    """Latent attention to the keys that an indexer chooses.

    Args:
        dim: As in `LatentAttention`.
        args: As in `LatentAttention`, and the sizes of the indexer.
        norms: As in `LatentAttention`.
        branches: As in `LatentAttention`.
    """

    def __init__(
        self, dim: int, args: SparseAttentionArgs, norms: NormArgs, *, branches: int
    ) -> None:
        super().__init__(dim, args, norms, branches=branches)
        self.indexer = Indexer(dim, args.latent, args.index)
        self.inner_attention = InnerSparseAttention(args.index.per_query)
        self.auxiliary = AuxiliaryLoss()

    def attend(
        self, q: Tensor, latent: Tensor, settings: Mapping[str, Any], inputs: IndexerInputs
    ) -> Tensor:
        """Return attention to the chosen keys, (B, H, S, V).

        If the indexer's weights require gradients, the backward adds the gradient of the indexer's loss. Padding has no
        loss.

        Args:
            q: (B, H, S, N + P).
            latent: (B, 1, S, R + P).
            settings: Keyword arguments of the inner attention.
            inputs: What the indexer reads.
        """
        index = self.indexer(inputs.x.detach(), inputs.queried.detach(), inputs.freqs_cis)
        learns = index.weights.requires_grad
        out, loss = self.inner_attention.run(q, latent, index, **settings, learns=learns)
        if not learns:
            return out
        if inputs.positions is not None:
            loss = loss.masked_fill(inputs.positions < 0, 0)
        # Each tensor-parallel rank compares the index with its own heads. The mean of these losses has the gradient of
        # the loss for all heads, as the gradient is linear in the weights of attention.
        share = q.shape[1] / self.args.n_heads
        return self.auxiliary(out, loss.sum() * share)

    def attend_to_all(self) -> None:
        """Attend to all keys that a query sees: the dense warm-up."""
        self.inner_attention.per_query = 0

    def tensor_parallel_styles(self) -> Styles:
        """Return how tensor-parallel ranks divide this module.

        Each rank computes the index of its own tokens. Then it gathers the index of all tokens.
        """
        own = tokens_divided(("queries", "keys", "key_norm", "head_weights"))
        return super().tensor_parallel_styles() | prefixed(
            "indexer", own | {"gathered": GATHERED}
        )

    def context_parallel_styles(self, options: ContextParallelOptions, ranks: int) -> Styles:
        """Return no styles: the operator looks up its plan.

        Args:
            options: Not used.
            ranks: Not used.
        """
        return {}
