"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values of all heads from a small latent."""

from collections.abc import Callable

import torch
from torch import nn

from trainer.families.args import LatentArgs
from trainer.models.attention import InnerAttention
from trainer.models.initialization import fill
from trainer.models.rotary import apply_rope
from trainer.models.weights import Weights


class UpProjection(Weights):
    """(H * (N + V), R): what makes keys and values of latents, which attention applies where it needs them."""

    muon_matrices = ("weight",)


class LatentAttention(nn.Module):
    """Attention whose context-parallel ranks send each other latents, in the place of keys and values.

    Of a head's query and key, N channels are not rotated, and P behind them are; all heads share a key's rotated part.

    scale: of the scores; rotate: `apply_rope`, or a function with the same arguments, None for no rotation; branches:
    of the model, see `initialization.draw`.
    """

    def __init__(
        self,
        dim: int,
        args: LatentArgs,
        *,
        n_heads: int,
        scale: float,
        norm_eps: float,
        sliding_window: int | None = None,
        rotate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = apply_rope,
        branches: int = 1,
    ) -> None:
        super().__init__()
        self.args = args
        self.scale = scale
        self.rotate = rotate
        self.branches = branches
        queries = n_heads * args.head_dim
        if args.query_rank is None:
            self.wq = nn.Linear(dim, queries, bias=False)
        else:
            self.wq_a = nn.Linear(dim, args.query_rank, bias=False)
            self.q_a_norm = nn.RMSNorm(args.query_rank, eps=norm_eps)
            self.wq_b = nn.Linear(args.query_rank, queries, bias=False)
        self.wkv_a = nn.Linear(dim, args.rank + args.rope_dim, bias=False)
        self.kv_a_norm = nn.RMSNorm(args.rank, eps=norm_eps)
        self.gathered = nn.Identity()
        """Where tensor-parallel ranks, each with the latents of its tokens, get those of all."""
        self.wkv_b = UpProjection(n_heads * (args.nope_dim + args.value_dim), args.rank)
        self.wo = nn.Linear(n_heads * args.value_dim, dim, bias=False)
        self.inner_attention = InnerAttention(sliding_window)

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
        args = self.args
        if args.query_rank is None:
            q = self.wq(x, **of_adapters)
        else:
            q = self.wq_b(self.q_a_norm(self.wq_a(x, **of_adapters)), **of_adapters)
        # (B, S, H, N + P); with tensor parallelism some of the heads
        q = q.unflatten(-1, (-1, args.head_dim))
        compressed, shared = self.wkv_a(x, **of_adapters).split([args.rank, args.rope_dim], -1)
        # (B, S, 1, W)
        latent = self.gathered(torch.cat((self.kv_a_norm(compressed), shared), -1)).unsqueeze(2)
        if self.rotate is not None:
            freqs_cis = freqs_cis.narrow(-3, 0, q.shape[1])
            q, latent = (
                torch.cat((kept, self.rotate(rotated, freqs_cis)), -1)
                for kept, rotated in (
                    x.split([x.shape[-1] - args.rope_dim, args.rope_dim], -1)
                    for x in (q, latent)
                )
            )
        # (B, H, S, N + P), (B, 1, S, W)
        q = q.transpose(1, 2)
        latent = latent.transpose(1, 2)
        up = self.wkv_b().unflatten(0, (-1, args.nope_dim + args.value_dim))
        settings = {"scale": self.scale, "plan": attention_plan, "up": up}
        out = self.inner_attention(q, latent, latent[..., :0], **settings)
        return self.wo(out.transpose(1, 2).flatten(2), **of_adapters)

    def init_parameter(
        self, name: str, parameter: torch.Tensor, generator: torch.Generator
    ) -> None:
        fill(name, parameter, generator, branches=self.branches if name == "wo.weight" else 1)
