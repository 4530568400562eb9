"""DeepSeek-V3 and R1, and what has their architecture; sizes.toml has the sizes and their sources. Torch-free."""

from typing import Any

from trainer.config.errors import ConfigError
from trainer.families.args import LatentArgs
from trainer.families.decoder_args import TransformerArgs, sizes
from trainer.families.decoder_config_json import HFDecoder, layer_kinds
from trainer.families.decoder_tensors import FURTHER_AS_LAYERS
from trainer.families.sigmoid_experts import NAMES, read_sigmoid_experts, write_sigmoid_experts
from trainer.hugging_face.config_json import Entries

FLAVORS = sizes("deepseek_v3")
LATENT_NAMES = {
    "attention.wq_a": "self_attn.q_a_proj",
    "attention.q_a_norm": "self_attn.q_a_layernorm",
    "attention.wq_b": "self_attn.q_b_proj",
    "attention.wkv_a": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_a_norm": "self_attn.kv_a_layernorm",
    "attention.wkv_b": "self_attn.kv_b_proj",
}
"""Modules of latent attention there."""


def read_latent(config: Entries) -> dict[str, Any]:
    """Return the fields of a model with latent attention.

    Raises:
        ConfigError: biases, or keys that heads share.
    """
    config.only("attention_bias", False)
    if config.whole("num_attention_heads") != config.whole("num_key_value_heads"):
        raise ConfigError(
            f"{config.file}: num_key_value_heads = {config.content['num_key_value_heads']!r} must be "
            f"num_attention_heads = {config.whole('num_attention_heads')}: a latent is for all heads"
        )
    names = "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"
    query_rank = config.whole("q_lora_rank") if config.content.get("q_lora_rank") is not None else None
    latent = LatentArgs(*(config.whole(name) for name in names), query_rank)
    if latent.rope_dim % 2 or latent.value_dim > latent.head_dim:
        raise ConfigError(
            f"{config.file}: qk_rope_head_dim = {latent.rope_dim} must be even, and v_head_dim = {latent.value_dim} at "
            f"most qk_nope_head_dim + qk_rope_head_dim = {latent.head_dim}"
        )
    return {"latent": latent, "head_size": None}


def write_latent(args: TransformerArgs, architecture: str) -> dict[str, Any]:
    """Return the entries that `read_latent` reads.

    Raises:
        ConfigError: the model has no latent attention.
    """
    if (latent := args.latent) is None:
        raise ConfigError(f"{architecture} of Hugging Face's transformers needs latent attention, and this has none")
    return {
        "attention_bias": False,
        "head_dim": latent.rope_dim,
        "kv_lora_rank": latent.rank,
        "q_lora_rank": latent.query_rank,
        "qk_nope_head_dim": latent.nope_dim,
        "qk_rope_head_dim": latent.rope_dim,
        "v_head_dim": latent.value_dim,
    }


def _read(config: Entries) -> dict[str, Any]:
    config.only("rope_interleave", True)
    experts, sparse = read_sigmoid_experts(config)
    return {**read_latent(config), "experts": experts, **layer_kinds(len(sparse), experts=sparse)}


def _write(args: TransformerArgs) -> dict[str, Any]:
    entries = write_latent(args, HF.architecture) | write_sigmoid_experts(args, HF.architecture)
    return entries | {"rope_interleave": True, "num_nextn_predict_layers": args.mtp_layers}


HF = HFDecoder(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    _read,
    _write,
    names=NAMES | LATENT_NAMES,
    further=FURTHER_AS_LAYERS,
)
