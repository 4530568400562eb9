"""Small arguments from which the tables of families are made."""

from dataclasses import replace

from trainer.families.decoder_args import TransformerArgs
from trainer.families.feed_forward_args import ExpertArgs
from trainer.families.layer_kinds import LayerKind, RopeScaling
from trainer.families.mixers import LatentArgs

LLAMA = TransformerArgs(
    dim=32,
    n_layers=3,
    n_heads=4,
    n_kv_heads=2,
    ffn_hidden_dim=48,
    vocab_size=4354,
    max_seq_len=64,
    norm_eps=1e-6,
    rope_theta=10000.0,
)
YARN = RopeScaling(4.0, original_max_seq_len=16, kind="yarn")
YARN_V3 = replace(YARN, attention_factor=1.0, mscale_all_dim=1.0)
WINDOWS = tuple(LayerKind(window=window) for window in (False, True, True))
EXPERTS = replace(LLAMA, ffn_hidden_dim=24, experts=ExpertArgs(6, 2, 24))
SIGMOID = ExpertArgs(6, 2, 24, sigmoid=True)
LATENT = replace(EXPERTS, n_kv_heads=4, latent=LatentArgs(10, 6, 4, 8, query_rank=14))
