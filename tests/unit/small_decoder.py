"""A small Llama 3 decoder with random weights."""

import torch

from trainer.families.decoder_args import TransformerArgs
from trainer.models.decoder import Transformer
from trainer.models.initialization import initialize

ARGS = TransformerArgs(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_hidden_dim=48, vocab_size=50, max_seq_len=16)


def build(args: TransformerArgs = ARGS, dtype: torch.dtype = torch.float64, seed: int = 0) -> Transformer:
    with torch.device("meta"):
        model = Transformer(args).to(dtype)
    initialize(model, seed=seed, device=torch.device("cpu"))
    return model
