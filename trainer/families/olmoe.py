"""What transformers calls OLMoE; sizes.toml has the sizes and their sources. Torch-free."""

from typing import Any

from trainer.families.args import ExpertArgs
from trainer.families.decoder_args import TransformerArgs, sizes
from trainer.families.decoder_config_json import HFDecoder, check_choice, experts_to_write, read_balance
from trainer.hugging_face.config_json import Entries

FLAVORS = sizes("olmoe")


def _read(config: Entries) -> dict[str, Any]:
    """One norm is of the queries, or keys, of all heads, which have no size of their own."""
    config.only("clip_qkv", None)
    config.only("head_dim", config.whole("hidden_size") // config.whole("num_attention_heads"))
    biases = config.switch("attention_bias")
    experts = ExpertArgs(
        config.whole("num_experts"),
        config.whole("num_experts_per_tok"),
        config.whole("intermediate_size"),
        normalise=config.switch("norm_topk_prob"),
    )
    return {
        "qk_norm": True,
        "qk_norm_of_all_heads": True,
        "attention_bias": biases,
        "output_bias": biases,
        "experts": check_choice(config, experts),
        "router_aux_loss_coef": read_balance(config),
    }


def _write(args: TransformerArgs) -> dict[str, Any]:
    experts = experts_to_write(args, HF.architecture)
    return {
        "intermediate_size": experts.hidden_dim,
        "num_experts": experts.number,
        "num_experts_per_tok": experts.per_token,
        "norm_topk_prob": experts.normalise,
        "router_aux_loss_coef": args.router_aux_loss_coef,
        "attention_bias": args.attention_bias,
        "clip_qkv": None,
    }


HF = HFDecoder("olmoe", "OlmoeForCausalLM", _read, _write)
