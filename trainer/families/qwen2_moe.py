"""What transformers calls Qwen2's mixtures of experts; sizes.toml has the sizes and their sources. Torch-free."""

from typing import Any

from trainer.families.args import ExpertArgs
from trainer.families.decoder_args import TransformerArgs, sizes
from trainer.families.decoder_config_json import (
    HFDecoder,
    check_choice,
    experts_to_write,
    layer_kinds,
    read_balance,
    read_sparse_layers,
    read_switched_windows,
    write_sparse_layers,
    write_switched_windows,
)
from trainer.hugging_face.config_json import Entries

FLAVORS = sizes("qwen2_moe")


def _read(config: Entries) -> dict[str, Any]:
    """All tokens have one more expert, each with a gate of its own."""
    (window, windows), sparse = read_switched_windows(config), read_sparse_layers(config)
    experts = ExpertArgs(
        config.whole("num_experts"),
        config.whole("num_experts_per_tok"),
        config.whole("moe_intermediate_size"),
        normalise=config.switch("norm_topk_prob"),
        shared_dim=config.whole("shared_expert_intermediate_size"),
        shared_gate=True,
    )
    return {
        "attention_bias": config.switch("qkv_bias"),
        "experts": check_choice(config, experts),
        "router_aux_loss_coef": read_balance(config),
        "sliding_window": window,
        **layer_kinds(len(sparse), window=windows, experts=sparse),
    }


def _write(args: TransformerArgs) -> dict[str, Any]:
    experts = experts_to_write(args, HF.architecture)
    return {
        "qkv_bias": args.attention_bias,
        "num_experts": experts.number,
        "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": experts.hidden_dim,
        "shared_expert_intermediate_size": experts.shared_dim,
        "norm_topk_prob": experts.normalise,
        "router_aux_loss_coef": args.router_aux_loss_coef,
        **write_switched_windows(args),
        **write_sparse_layers(args),
    }


HF = HFDecoder("qwen2_moe", "Qwen2MoeForCausalLM", _read, _write)
