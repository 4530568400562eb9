"""What transformers calls GLM-4.5, 4.6 and 4.7; sizes.toml has the sizes and their sources. Torch-free."""

from typing import Any

from trainer.config.errors import ConfigError
from trainer.families.decoder_args import TransformerArgs, sizes
from trainer.families.decoder_config_json import HFDecoder, layer_kinds, read_experts, write_experts
from trainer.families.decoder_tensors import SELECTION_BIAS
from trainer.hugging_face.config_json import Entries

FLAVORS = sizes("glm4_moe")
_EXPERTS = "n_routed_experts", "moe_intermediate_size"


def _read(config: Entries) -> dict[str, Any]:
    """The first layers are dense; a router has sigmoids, a bias for the choice, and groups of experts."""
    n_layers, dense = config.whole("num_hidden_layers"), config.content["first_k_dense_replace"]
    if not isinstance(dense, int):
        raise ConfigError(f"{config.file}: first_k_dense_replace = {dense!r} must be a number of layers")
    experts = read_experts(
        config,
        *_EXPERTS,
        normalise=config.switch("norm_topk_prob"),
        sigmoid=True,
        groups=config.whole("n_group"),
        groups_per_token=config.whole("topk_group"),
        scale=float(config.number("routed_scaling_factor")),
        shared_dim=config.whole("n_shared_experts") * config.whole("moe_intermediate_size"),
    )
    return {
        "qk_norm": config.switch("use_qk_norm"),
        "attention_bias": config.switch("attention_bias"),
        "experts": experts,
        **layer_kinds(n_layers, experts=[layer >= dense for layer in range(n_layers)]),
    }


def _write(args: TransformerArgs) -> dict[str, Any]:
    entries, experts = write_experts(args, HF.architecture, *_EXPERTS), args.experts
    return {
        **entries,
        "use_qk_norm": args.qk_norm,
        "attention_bias": args.attention_bias,
        "n_shared_experts": max(experts.shared_dim // experts.hidden_dim, 1),
        "norm_topk_prob": experts.normalise,
        "n_group": experts.groups,
        "topk_group": experts.groups_per_token,
        "routed_scaling_factor": experts.scale,
        "first_k_dense_replace": sum(not args.layer(layer).experts for layer in range(args.n_layers)),
        "num_nextn_predict_layers": 0,
    }


_SHARED = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
HF = HFDecoder(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    _read,
    _write,
    names={
        SELECTION_BIAS: "mlp.gate.e_score_correction_bias",
        **{f"feed_forward.shared.{ours}": f"mlp.shared_experts.{theirs}" for ours, theirs in _SHARED.items()},
    },
    rotates_a_share=True,
    further="model.layers.{}.",
)
