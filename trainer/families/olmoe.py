"""What transformers calls OLMoE; sizes.toml has the sizes and their sources. Torch-free."""

from typing import Any

from trainer.families.decoder_args import TransformerArgs, sizes
from trainer.families.decoder_config_json import HFDecoder, read_balance, read_experts, write_experts
from trainer.hugging_face.config_json import Entries

FLAVORS = sizes("olmoe")
_EXPERTS = "num_experts", "intermediate_size"


def _read(config: Entries) -> dict[str, Any]:
    """One norm is of the queries, or keys, of all heads, which have no size of their own."""
    config.only("clip_qkv", None)
    config.only("head_dim", config.whole("hidden_size") // config.whole("num_attention_heads"))
    biases = config.switch("attention_bias")
    return {
        "qk_norm": True,
        "qk_norm_of_all_heads": True,
        "attention_bias": biases,
        "output_bias": biases,
        "experts": read_experts(config, *_EXPERTS, normalise=config.switch("norm_topk_prob")),
        "router_aux_loss_coef": read_balance(config),
    }


def _write(args: TransformerArgs) -> dict[str, Any]:
    return {
        **write_experts(args, HF.architecture, *_EXPERTS),
        "norm_topk_prob": args.experts.normalise,
        "router_aux_loss_coef": args.router_aux_loss_coef,
        "attention_bias": args.attention_bias,
        "clip_qkv": None,
    }


HF = HFDecoder("olmoe", "OlmoeForCausalLM", _read, _write)
