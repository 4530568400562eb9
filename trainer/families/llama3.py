"""Sizes of the Llama 3 family, and what transformers calls it. Torch-free.

Sources: "The Llama 3 Herd of Models" (arXiv 2407.21783) and the model cards of Llama 3, 3.1 and 3.2.
"""

from typing import Any

from trainer.families.decoder_args import RopeScaling, TransformerArgs
from trainer.families.decoder_config_json import HFDecoder
from trainer.hugging_face.config_json import Entries

# The published 8B and 70B are Llama 3 here (no scaling); `model.rope_scaling = 8.0` makes them Llama 3.1.
FLAVORS: dict[str, TransformerArgs] = {
    "debugmodel": TransformerArgs(dim=256, n_layers=4, n_heads=8, n_kv_heads=4, ffn_hidden_dim=512),
    # Llama 2's
    "7B": TransformerArgs(n_kv_heads=32, ffn_hidden_dim=11008, vocab_size=32000, max_seq_len=4096, rope_theta=10000.0),
    "1B": TransformerArgs(
        dim=2048, n_layers=16, ffn_hidden_dim=8192, rope_scaling=RopeScaling(32.0), tie_embeddings=True
    ),
    "3B": TransformerArgs(
        dim=3072, n_layers=28, n_heads=24, ffn_hidden_dim=8192, rope_scaling=RopeScaling(32.0), tie_embeddings=True
    ),
    "8B": TransformerArgs(),
    "70B": TransformerArgs(dim=8192, n_layers=80, n_heads=64, ffn_hidden_dim=28672),
    "405B": TransformerArgs(dim=16384, n_layers=126, n_heads=128, ffn_hidden_dim=53248, rope_scaling=RopeScaling(8.0)),
}


def _read(config: Entries) -> dict[str, Any]:
    """One switch is for all biases of attention."""
    config.only("mlp_bias", False)
    config.only("sliding_window", None)
    biases = config.switch("attention_bias")
    return {"attention_bias": biases, "output_bias": biases}


def _write(args: TransformerArgs) -> dict[str, Any]:
    return {"attention_bias": args.attention_bias, "mlp_bias": False}


HF = HFDecoder("llama", "LlamaForCausalLM", _read, _write)
