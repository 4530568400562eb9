"""Sizes and the model of `proof.py`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config.schema import Model
from trainer.families.registry import flavor_args

FAMILY = "qwen3_next"


@dataclass(frozen=True)
class Size:
    """The sizes of the model and of the work."""

    dim: int = 128
    layers: int = 4
    """Linear attention and full attention alternate."""
    heads: int = 2
    head_dim: int = 64
    linear_heads: int = 2
    """Heads of linear attention; their keys have half the size of their values."""
    hidden: int = 384
    seq_len: int = 2048
    factor: int = 16
    context_parallel: int = 4
    first_steps: int = 300
    first_rate: float = 4e-3
    short_steps: int = 1500
    short_rate: float = 3e-3
    long_steps: int = 8
    long_rate: float = 1e-3
    one_rank_steps: int = 3
    samples: int = 4
    asked: int = 4
    """Number of prompts for `lct generate` and transformers."""

    @property
    def lengths(self) -> list[int]:
        """Lengths of needle prompts: the short sequence length, and each four times the length before."""
        return [self.seq_len * 4**i for i in range(self.factor.bit_length() // 2 + 1)]


FULL = Size()
TINY = Size(
    dim=32,
    layers=2,
    head_dim=16,
    linear_heads=2,
    hidden=64,
    seq_len=512,
    factor=4,
    first_steps=3,
    short_steps=2,
    long_steps=3,
    one_rank_steps=2,
    samples=1,
    asked=2,
)


def config_of(size: Size, vocab_size: int) -> dict[str, Any]:
    """Return the `config.json` of the model.

    The model has linear and full attention, so that the proof compares both on four ranks and on one rank. RoPE rotates
    whole heads: with a quarter of each, as in this family, models find needles beyond their length, without YaRN.
    The family has experts: the first layer has a single expert, and the other layers have none.

    Args:
        size: The sizes of the model.
        vocab_size: The size of the vocabulary.
    """
    kinds = ["linear_attention", "full_attention"]
    rotary = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
    return {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": FAMILY,
        "hidden_size": size.dim,
        "num_hidden_layers": size.layers,
        "layer_types": [kinds[layer % 2] for layer in range(size.layers)],
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.heads,
        "head_dim": size.head_dim,
        "linear_num_key_heads": size.linear_heads,
        "linear_num_value_heads": size.linear_heads,
        "linear_key_head_dim": size.head_dim // 2,
        "linear_value_head_dim": size.head_dim,
        "linear_conv_kernel_dim": 4,
        "intermediate_size": size.hidden,
        "num_experts": 1,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": size.hidden,
        "shared_expert_intermediate_size": 16,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [*range(1, size.layers)],
        "vocab_size": vocab_size,
        "max_position_embeddings": size.seq_len,
        "rope_parameters": rotary,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
    }


def parameters(folder: Path) -> int:
    """Return the number of parameters of the model in a folder, with tied embeddings.

    Args:
        folder: The folder with `config.json`.
    """
    return flavor_args(Model(name=FAMILY, flavor=str(folder.absolute()))).n_params()
