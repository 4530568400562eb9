"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values of all heads from a small latent."""

import torch
from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from longshard.context.planning.options import ContextParallelOptions
from trainer.families.layers import NormArgs
from trainer.families.mixers import LatentAttentionArgs
from trainer.models.attention import InnerAttention
from trainer.models.initialization import Branch
from trainer.models.rotary import apply_rope
from trainer.models.weights import Weights
from trainer.parallel.tensor_parallel import Gathered, LocalParameter, Styles, tokens_divided


class UpProjection(Weights):
    """(H * (N + V), R): what makes keys and values of latents, which attention applies where it needs them."""

    muon_matrices = ("weight",)


class LatentAttention(Branch):
    """Attention whose context-parallel ranks send each other latents, in the place of keys and values.

    Of a head's query and key, N channels are not rotated, and P behind them are; all heads share a key's rotated part.

    Args:
        dim: channels of the hidden states.
        args: heads, and the sizes of latents.
        norms: of the model; latents have an RMSNorm of this epsilon.
        branches: of the model, see `initialization.draw`.
    """

    def __init__(
        self, dim: int, args: LatentAttentionArgs, norms: NormArgs, *, branches: int = 1
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
        """Where tensor-parallel ranks, each with the latents of its tokens, get those of all."""
        values = args.n_heads * (latent.nope_dim + latent.value_dim)
        self.wkv_b = UpProjection(values, latent.rank)
        self.wo = nn.Linear(args.n_heads * latent.value_dim, dim, bias=False)
        self.inner_attention = InnerAttention(args.window)

    def forward(
        self,
        x: torch.Tensor,
        freqs_cis: torch.Tensor | None,
        attention_plan: torch.Tensor | None = None,
        *,
        positions: torch.Tensor | None = None,
        **of_adapters: torch.Tensor,
    ) -> torch.Tensor:
        """As `Attention`: x: (B, S, dim) -> the same shape."""
        args = self.args.latent
        if args.query_rank is None:
            q = self.wq(x, **of_adapters)
        else:
            q = self.wq_b(self.q_a_norm(self.wq_a(x, **of_adapters)), **of_adapters)
        # (B, S, H, N + P); with tensor parallelism some of the heads
        q = q.unflatten(-1, (-1, args.head_dim))
        compressed, shared = self.wkv_a(x, **of_adapters).split([args.rank, args.rope_dim], -1)
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
        out = self.inner_attention.run(q, latent, latent[..., :0], **settings)
        return self.wo(out.transpose(1, 2).flatten(2), **of_adapters)

    def rows_of_heads(self) -> dict[str, list[int]]:
        """Return the numbers of rows that each head has in a parameter, one for each of its matrices."""
        latent = self.args.latent
        queries = "wq.weight" if latent.query_rank is None else "wq_b.weight"
        return {
            queries: [latent.head_dim],
            "wkv_b.weight": [latent.nope_dim, latent.value_dim],
        }

    @property
    def queries(self) -> nn.Linear:
        """Return the module that makes queries."""
        return self.wq if self.args.latent.query_rank is None else self.wq_b

    def tensor_parallel_styles(self) -> Styles:
        """Return how tensor-parallel ranks divide it: a rank makes latents of its tokens, and gets those of all."""
        of_tokens = ("wq_a", "q_a_norm", "wkv_a", "kv_a_norm")
        styles = tokens_divided(of_tokens)
        styles |= {name: ColwiseParallel(input_layouts=Shard(1)) for name in ("wq", "wq_b")}
        styles |= {"gathered": Gathered(), "wkv_b": LocalParameter()}
        styles["wo"] = RowwiseParallel(output_layouts=Shard(1))
        return {name: style for name, style in styles.items() if hasattr(self, name)}

    def context_parallel_styles(self, options: ContextParallelOptions, ranks: int) -> Styles:
        """Return how context-parallel ranks share a sequence, by the names of its modules."""
        return {"inner_attention": self.inner_attention.planned(options)}
