"""What transformers calls Qwen2's mixtures of experts; sizes.toml has the sizes and their sources. Torch-free."""

from typing import Any

from trainer.families.decoder_args import TransformerArgs, sizes
from trainer.families.decoder_config_json import (
    HFDecoder,
    layer_kinds,
    read_balance,
    read_experts,
    read_sparse_layers,
    read_switched_windows,
    write_experts,
    write_sparse_layers,
    write_switched_windows,
)
from trainer.hugging_face.config_json import Entries

FLAVORS = sizes("qwen2_moe")
_EXPERTS = "num_experts", "moe_intermediate_size"


def _read(config: Entries) -> dict[str, Any]:
    """All tokens have one more expert, each with a gate of its own."""
    (window, windows), sparse = read_switched_windows(config), read_sparse_layers(config)
    experts = read_experts(
        config,
        *_EXPERTS,
        normalise=config.switch("norm_topk_prob"),
        shared_dim=config.whole("shared_expert_intermediate_size"),
        shared_gate=True,
    )
    return {
        "attention_bias": config.switch("qkv_bias"),
        "experts": experts,
        "router_aux_loss_coef": read_balance(config),
        "sliding_window": window,
        **layer_kinds(len(sparse), window=windows, experts=sparse),
    }


def _write(args: TransformerArgs) -> dict[str, Any]:
    return {
        **write_experts(args, HF.architecture, *_EXPERTS),
        "qkv_bias": args.attention_bias,
        "shared_expert_intermediate_size": args.experts.shared_dim,
        "norm_topk_prob": args.experts.normalise,
        "router_aux_loss_coef": args.router_aux_loss_coef,
        **write_switched_windows(args),
        **write_sparse_layers(args),
    }


HF = HFDecoder("qwen2_moe", "Qwen2MoeForCausalLM", _read, _write)
