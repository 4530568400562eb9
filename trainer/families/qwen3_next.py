"""Qwen3-Next: linear attention in three of four layers; sizes.toml has the sizes and their sources. Torch-free."""

from typing import Any

from trainer.config.errors import ConfigError
from trainer.families.decoder_args import TransformerArgs, sizes
from trainer.families.decoder_config_json import (
    FULL,
    HFDecoder,
    layer_kinds,
    read_balance,
    read_experts,
    read_layer_types,
    read_sparse_layers,
    write_experts,
    write_sparse_layers,
)
from trainer.families.linear_args import GatedDeltaArgs
from trainer.hugging_face.config_json import Entries

FLAVORS = sizes("qwen3_next")
_EXPERTS, _LINEAR = ("num_experts", "moe_intermediate_size"), "linear_attention"


def _read(config: Entries) -> dict[str, Any]:
    """Full attention has gates, and norms of queries and keys; all norms of the hidden size count from one."""
    n_layers, sparse = config.whole("num_hidden_layers"), read_sparse_layers(config)
    every = config.whole("full_attention_interval", 4)
    assumed = [FULL if (i + 1) % every == 0 else _LINEAR for i in range(n_layers)]
    kinds = read_layer_types(config, (FULL, _LINEAR), assumed)
    names = "num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim"
    linear = GatedDeltaArgs(*(config.whole(f"linear_{name}") for name in names))
    if linear.value_heads % linear.key_heads:
        raise ConfigError(
            f"{config.file}: linear_num_value_heads = {linear.value_heads} must be a multiple of "
            f"linear_num_key_heads = {linear.key_heads}"
        )
    experts = read_experts(
        config,
        *_EXPERTS,
        normalise=config.switch("norm_topk_prob"),
        shared_dim=config.whole("shared_expert_intermediate_size"),
        shared_gate=True,
    )
    config.only("attention_bias", False)
    return {
        "qk_norm": True,
        "norm_offset": True,
        "attention_gate": True,
        "linear": linear,
        "experts": experts,
        "router_aux_loss_coef": read_balance(config),
        **layer_kinds(n_layers, linear=[kind == _LINEAR for kind in kinds], experts=sparse),
    }


_FURTHER = {
    "": "mtp.layers.0.",
    "embedding_norm": "mtp.pre_fc_norm_embedding",
    "hidden_norm": "mtp.pre_fc_norm_hidden",
    "projection": "mtp.fc",
    "mtp_norms": "mtp.norm",
}
"""Of its only layer for further tokens."""


def _write(args: TransformerArgs) -> dict[str, Any]:
    entries = write_experts(args, HF.architecture, *_EXPERTS)
    if (linear := args.linear) is None:
        raise ConfigError(f"{HF.architecture} of Hugging Face's transformers needs linear attention, and this has none")
    return {
        **entries,
        "layer_types": [_LINEAR if args.layer(layer).linear else FULL for layer in range(args.n_layers)],
        "linear_num_key_heads": linear.key_heads,
        "linear_num_value_heads": linear.value_heads,
        "linear_key_head_dim": linear.key_dim,
        "linear_value_head_dim": linear.value_dim,
        "linear_conv_kernel_dim": linear.kernel,
        "attention_bias": False,
        "shared_expert_intermediate_size": args.experts.shared_dim,
        "norm_topk_prob": args.experts.normalise,
        "router_aux_loss_coef": args.router_aux_loss_coef,
        **write_sparse_layers(args),
    }


HF = HFDecoder("qwen3_next", "Qwen3NextForCausalLM", _read, _write, rotates_a_share=True, further=_FURTHER)
