"""Sizes of Qwen2 and Qwen2.5, and what transformers calls them. Torch-free.

Sources: "Qwen2 Technical Report" (arXiv 2407.10671), "Qwen2.5 Technical Report" (arXiv 2412.15115).
"""

from dataclasses import replace
from typing import Any

from trainer.families.decoder_args import TransformerArgs
from trainer.families.decoder_config_json import HFDecoder, read_windows, write_windows
from trainer.hugging_face.config_json import Entries

_7B = TransformerArgs(
    dim=3584,
    n_layers=28,
    n_heads=28,
    n_kv_heads=4,
    ffn_hidden_dim=18944,
    vocab_size=152064,
    max_seq_len=32768,
    norm_eps=1e-6,
    rope_theta=1e6,
    attention_bias=True,
)
_SMALL = replace(_7B, vocab_size=151936, tie_embeddings=True)
FLAVORS: dict[str, TransformerArgs] = {
    "debugmodel": replace(_SMALL, dim=256, n_layers=4, n_heads=8, n_kv_heads=4, ffn_hidden_dim=512),
    "0.5B": replace(_SMALL, dim=896, n_layers=24, n_heads=14, n_kv_heads=2, ffn_hidden_dim=4864),
    "1.5B": replace(_SMALL, dim=1536, n_heads=12, n_kv_heads=2, ffn_hidden_dim=8960),
    "7B": _7B,
}


def _read(config: Entries) -> dict[str, Any]:
    """Queries, keys and values always have a bias."""
    return {"attention_bias": True, **read_windows(config)}


HF = HFDecoder(
    "qwen2",
    "Qwen2ForCausalLM",
    _read,
    write_windows,
    {"num_key_value_heads": 32, "max_position_embeddings": 32768},
)
