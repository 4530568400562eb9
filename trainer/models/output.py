"""The projection to logits whose size is bounded (Gemma 2, arXiv 2408.00118)."""

import torch
from torch import nn


class CappedOutput(nn.Linear):
    """Projection to logits c * tanh(logit / c). softcap: c."""

    def __init__(self, dim: int, vocab_size: int, softcap: float) -> None:
        super().__init__(dim, vocab_size, bias=False)
        self.softcap = softcap

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: (B, S, dim) -> (B, S, vocab)."""
        return self.softcap * torch.tanh(super().forward(hidden) / self.softcap)
