"""What transformers calls Qwen3's mixtures of experts; sizes.toml has the sizes and their sources. Torch-free."""

from typing import Any

from trainer.config.errors import ConfigError
from trainer.families.args import ExpertArgs
from trainer.families.decoder_args import TransformerArgs, sizes
from trainer.families.decoder_config_json import HFDecoder, read_balance
from trainer.hugging_face.config_json import Entries

FLAVORS = sizes("qwen3_moe")


def _read(config: Entries) -> dict[str, Any]:
    """Since transformers 5 the number of experts is `num_local_experts`."""
    config.only("decoder_sparse_step", 1)
    config.only("mlp_only_layers", [])
    config.only("use_sliding_window", False)
    config.only("attention_bias", False)
    number = config.whole("num_local_experts" if "num_local_experts" in config.content else "num_experts")
    per_token = config.whole("num_experts_per_tok")
    if per_token > number:
        raise ConfigError(f"{config.file}: num_experts_per_tok = {per_token} must be at most num_experts = {number}")
    normalise = config.switch("norm_topk_prob")
    experts = ExpertArgs(number, per_token, config.whole("moe_intermediate_size"), normalise=normalise)
    return {"qk_norm": True, "experts": experts, "router_aux_loss_coef": read_balance(config)}


def _write(args: TransformerArgs) -> dict[str, Any]:
    entries = {"attention_bias": False, "use_sliding_window": False, "decoder_sparse_step": 1, "mlp_only_layers": []}
    if (experts := args.experts) is None:
        raise ConfigError("Qwen3MoeForCausalLM of Hugging Face's transformers needs experts, and this model has none")
    return entries | {
        "num_experts": experts.number,
        "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": experts.hidden_dim,
        "norm_topk_prob": experts.normalise,
        "router_aux_loss_coef": args.router_aux_loss_coef,
    }


HF = HFDecoder("qwen3_moe", "Qwen3MoeForCausalLM", _read, _write)
