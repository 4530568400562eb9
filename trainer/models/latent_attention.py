"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values of all heads from a small latent."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from longshard.context.planning.options import ContextParallelOptions
from trainer.families.layers import NormArgs
from trainer.families.mixers import (
    LatentAttentionArgs,
)
from trainer.models.attention import InnerAttention
from trainer.models.initialization import Branch, Weights
from trainer.models.rotary import apply_rope
from trainer.parallel.tensor_parallel import (
    GATHERED,
    LOCAL_PARAMETER,
    Styles,
    tokens_divided,
)


class UpProjection(Weights):
    """The matrix from latents to keys and values, (H * (N + V), R).

    Attention applies it where it needs keys and values.

    The constructor takes the shape, see `Weights`.
    """

    muon_matrices = ("weight",)


class IndexerInputs(NamedTuple):
    """What an indexer of keys reads."""

    x: Tensor
    """The input of the layer, (B, S, dim)."""
    queried: Tensor
    """Latents of queries, (B, S, Q)."""
    freqs_cis: Tensor | None
    """Rotary table. None if the layer rotates nothing."""
    positions: Tensor | None
    """(B, S), -1 for padding. None without packed documents."""


class LatentAttention(Branch):
    """Attention whose context-parallel ranks exchange latents instead of keys and values.

    The first N channels of a head's query and key are not rotated, and the last P are. All heads share the rotated part
    of a key. A head's value has V channels. A latent has R channels, and the P rotated channels follow.

    Args:
        dim: Channels of the hidden states.
        args: Number of heads, and the sizes of latents.
        norms: The model's norms; latents have an RMSNorm of this epsilon.
        branches: Residual branches of the model, see `initialization.draw`.
    """

    def __init__(
        self, dim: int, args: LatentAttentionArgs, norms: NormArgs, *, branches: int
    ) -> None:
        super().__init__()
        self.args = args
        self.branches = branches
        latent = args.latent
        queries = args.n_heads * latent.head_dim
        if latent.query_rank is None:
            self.wq = nn.Linear(dim, queries, bias=False)
        else:
            self.wq_a = nn.Linear(dim, latent.query_rank, bias=False)
            self.q_a_norm = nn.RMSNorm(latent.query_rank, eps=norms.eps)
            self.wq_b = nn.Linear(latent.query_rank, queries, bias=False)
        self.wkv_a = nn.Linear(dim, latent.rank + latent.rope_dim, bias=False)
        self.kv_a_norm = nn.RMSNorm(latent.rank, eps=norms.eps)
        self.gathered = nn.Identity()
        """Tensor parallelism gathers here: a rank has the latents of its tokens before, and all latents after."""
        values = args.n_heads * (latent.nope_dim + latent.value_dim)
        self.wkv_b = UpProjection(values, latent.rank)
        self.wo = nn.Linear(args.n_heads * latent.value_dim, dim, bias=False)
        self.inner_attention = InnerAttention(args.window)

    def forward(
        self,
        x: Tensor,
        freqs_cis: Tensor | None,
        attention_plan: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        **adapter_inputs: Tensor,
    ) -> Tensor:
        """Return the output, (B, S, dim).

        Args:
            x: (B, S, dim).
            freqs_cis: Rotary table. None if the layer rotates nothing.
            attention_plan: Handle of the open plan. None without a plan.
            positions: (B, S), -1 for padding. Only an indexer reads them: it learns nothing from padding. None without
                packed documents.
            **adapter_inputs: Passed to the linear modules, see `transforms/lora.py`.
        """
        args = self.args.latent
        queried = x
        if args.query_rank is not None:
            queried = self.q_a_norm(self.wq_a(x, **adapter_inputs))
        # (B, S, H, N + P); with tensor parallelism some of the heads
        q = self.queries(queried, **adapter_inputs).unflatten(-1, (-1, args.head_dim))
        compressed, shared = self.wkv_a(x, **adapter_inputs).split(
            [args.rank, args.rope_dim], -1
        )
        # (B, S, 1, W)
        latent = self.gathered(torch.cat((self.kv_a_norm(compressed), shared), -1)).unsqueeze(2)
        if self.args.rope_theta != 0:
            freqs_cis = freqs_cis.narrow(-3, 0, q.shape[1])
            q, latent = (
                torch.cat((kept, apply_rope(rotated, freqs_cis)), -1)
                for kept, rotated in (
                    x.split([x.shape[-1] - args.rope_dim, args.rope_dim], -1)
                    for x in (q, latent)
                )
            )
        # (B, H, S, N + P), (B, 1, S, W)
        q = q.transpose(1, 2)
        latent = latent.transpose(1, 2)
        up = self.wkv_b().unflatten(0, (-1, args.nope_dim + args.value_dim))
        settings = {"scale": self.args.scale, "plan": attention_plan, "up": up}
        out = self.attend(q, latent, settings, IndexerInputs(x, queried, freqs_cis, positions))
        return self.wo(out.transpose(1, 2).flatten(2), **adapter_inputs)

    def attend(
        self, q: Tensor, latent: Tensor, settings: Mapping[str, Any], _inputs: IndexerInputs
    ) -> Tensor:
        """Return attention to the keys and values of the latents, (B, H, S, V).

        Args:
            q: (B, H, S, N + P).
            latent: (B, 1, S, R + P).
            settings: Keyword arguments of the inner attention.
            _inputs: Not used.
        """
        return self.inner_attention.run(q, latent, latent[..., :0], **settings)

    def rows_of_heads(self) -> dict[str, list[int]]:
        """Return the rows of one head in each divided parameter, by name of the parameter.

        The list has one number of rows for each kind of matrix in the parameter.
        """
        latent = self.args.latent
        queries = "wq.weight" if latent.query_rank is None else "wq_b.weight"
        return {queries: [latent.head_dim], "wkv_b.weight": [latent.nope_dim, latent.value_dim]}

    @property
    def queries(self) -> nn.Linear:
        """The module that makes queries."""
        return self.wq if self.args.latent.query_rank is None else self.wq_b

    def tensor_parallel_styles(self) -> Styles:
        """Return how tensor-parallel ranks divide this attention, by names of its modules.

        A rank makes the latents of its own tokens, (B, S / tp, ...). Then the ranks gather all latents, and each rank
        computes its own heads.
        """
        styles = tokens_divided(("wq_a", "q_a_norm", "wkv_a", "kv_a_norm")) | {
            "wq": ColwiseParallel(input_layouts=Shard(1)),
            "wq_b": ColwiseParallel(input_layouts=Shard(1)),
            "gathered": GATHERED,
            "wkv_b": LOCAL_PARAMETER,
            "wo": RowwiseParallel(output_layouts=Shard(1)),
        }
        return {name: style for name, style in styles.items() if hasattr(self, name)}

    def context_parallel_styles(self, options: ContextParallelOptions, ranks: int) -> Styles:
        """Return how context-parallel ranks share a sequence, by names of modules.

        Args:
            options: Options of planned attention.
            ranks: Number of context-parallel ranks; not used.
        """
        return {"inner_attention": self.inner_attention.planned(options)}
