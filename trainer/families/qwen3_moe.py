"""What transformers calls Qwen3's mixtures of experts; sizes.toml has the sizes and their sources. Torch-free."""

from typing import Any

from trainer.families.decoder_args import TransformerArgs, sizes
from trainer.families.decoder_config_json import (
    HFDecoder,
    layer_kinds,
    read_balance,
    read_experts,
    read_sparse_layers,
    write_experts,
    write_sparse_layers,
)
from trainer.hugging_face.config_json import Entries

FLAVORS = sizes("qwen3_moe")
_WIDTH = "moe_intermediate_size"


def _read(config: Entries) -> dict[str, Any]:
    """Since transformers 5 the number of experts is `num_local_experts`; a window is one of all layers."""
    biases, sparse = config.switch("attention_bias"), read_sparse_layers(config)
    number = "num_local_experts" if "num_local_experts" in config.content else "num_experts"
    return {
        "qk_norm": True,
        "attention_bias": biases,
        "output_bias": biases,
        "experts": read_experts(config, number, _WIDTH, normalise=config.switch("norm_topk_prob")),
        "sliding_window": config.whole("sliding_window") if config.switch("use_sliding_window") else None,
        "router_aux_loss_coef": read_balance(config),
        **layer_kinds(len(sparse), experts=sparse),
    }


def _write(args: TransformerArgs) -> dict[str, Any]:
    return {
        **write_experts(args, HF.architecture, "num_experts", _WIDTH),
        "attention_bias": args.attention_bias,
        "use_sliding_window": args.sliding_window is not None,
        "sliding_window": args.sliding_window,
        "norm_topk_prob": args.experts.normalise,
        "router_aux_loss_coef": args.router_aux_loss_coef,
        **write_sparse_layers(args),
    }


HF = HFDecoder("qwen3_moe", "Qwen3MoeForCausalLM", _read, _write)
