"""Sizes of the dense Qwen3 models, and what transformers calls them. Torch-free.

Source: "Qwen3 Technical Report" (arXiv 2505.09388), and the configurations of its models.
"""

from dataclasses import replace
from typing import Any

from trainer.families.decoder_args import TransformerArgs
from trainer.families.decoder_config_json import HFDecoder, read_windows, write_windows
from trainer.hugging_face.config_json import Entries

_8B = TransformerArgs(
    dim=4096,
    n_layers=36,
    n_heads=32,
    n_kv_heads=8,
    ffn_hidden_dim=12288,
    vocab_size=151936,
    max_seq_len=32768,
    norm_eps=1e-6,
    rope_theta=1e6,
    qk_norm=True,
)
_SMALL = replace(_8B, head_size=128, tie_embeddings=True)
FLAVORS: dict[str, TransformerArgs] = {
    "debugmodel": replace(_SMALL, dim=256, n_layers=4, n_heads=8, n_kv_heads=4, ffn_hidden_dim=512, head_size=64),
    "0.6B": replace(_SMALL, dim=1024, n_layers=28, n_heads=16, ffn_hidden_dim=3072),
    "1.7B": replace(_SMALL, dim=2048, n_layers=28, n_heads=16, ffn_hidden_dim=6144, head_size=None),
    "4B": replace(_SMALL, dim=2560, ffn_hidden_dim=9728),
    "8B": _8B,
    "14B": replace(_8B, dim=5120, n_layers=40, n_heads=40, ffn_hidden_dim=17408),
    "32B": replace(_8B, dim=5120, n_layers=64, n_heads=64, ffn_hidden_dim=25600, head_size=128),
}


def _read(config: Entries) -> dict[str, Any]:
    """One switch is for all biases of attention."""
    biases = config.switch("attention_bias")
    return {"qk_norm": True, "attention_bias": biases, "output_bias": biases, **read_windows(config)}


def _write(args: TransformerArgs) -> dict[str, Any]:
    return {"attention_bias": args.attention_bias, **write_windows(args)}


HF = HFDecoder(
    "qwen3",
    "Qwen3ForCausalLM",
    _read,
    _write,
    {"head_dim": 128, "num_key_value_heads": 32, "max_position_embeddings": 32768},
)
