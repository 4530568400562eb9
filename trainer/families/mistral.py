"""Sizes of Mistral 7B, and what transformers calls it. Torch-free.

Source: "Mistral 7B" (arXiv 2310.06825); version 0.1, whose tokens see 4,096 tokens. Later versions have no window.
"""

from dataclasses import replace
from typing import Any

from trainer.families.decoder_args import TransformerArgs
from trainer.families.decoder_config_json import HFDecoder
from trainer.hugging_face.config_json import Entries

_7B = TransformerArgs(
    dim=4096,
    n_layers=32,
    n_heads=32,
    n_kv_heads=8,
    ffn_hidden_dim=14336,
    vocab_size=32000,
    max_seq_len=32768,
    rope_theta=10000.0,
    sliding_window=4096,
)
FLAVORS: dict[str, TransformerArgs] = {
    "debugmodel": replace(_7B, dim=256, n_layers=4, n_heads=8, n_kv_heads=4, ffn_hidden_dim=512, sliding_window=128),
    "7B": _7B,
}


def _read(config: Entries) -> dict[str, Any]:
    """Without the entry all layers have a window of 4,096 tokens, with null none."""
    config.only("layer_types", None)
    without = config.content["sliding_window"] is None
    return {"sliding_window": None if without else config.whole("sliding_window")}


def _write(args: TransformerArgs) -> dict[str, Any]:
    return {"sliding_window": args.sliding_window}


HF = HFDecoder(
    "mistral",
    "MistralForCausalLM",
    _read,
    _write,
    {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
)
