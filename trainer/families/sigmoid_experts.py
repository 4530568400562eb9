"""Experts that are chosen by sigmoids, a bias and groups, as in DeepSeek-V3 (arXiv 2412.19437). Torch-free."""

from collections.abc import Mapping
from typing import Any

from trainer.config.errors import ConfigError
from trainer.families.args import ExpertArgs
from trainer.families.decoder_args import TransformerArgs
from trainer.families.decoder_config_json import read_experts, write_experts
from trainer.families.decoder_tensors import SELECTION_BIAS
from trainer.hugging_face.config_json import Entries

_KEYS = ("n_routed_experts", "moe_intermediate_size")
_SHARED = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
NAMES: Mapping[str, str] = {
    SELECTION_BIAS: "mlp.gate.e_score_correction_bias",
    **{f"feed_forward.shared.{ours}": f"mlp.shared_experts.{theirs}" for ours, theirs in _SHARED.items()},
}
"""Their modules there."""


def read_sigmoid_experts(config: Entries) -> tuple[ExpertArgs, list[bool]]:
    """Return the experts, and which layers have them: all but the first ones.

    Raises:
        ConfigError: an entry that cannot be computed here.
    """
    n_layers, dense = config.whole("num_hidden_layers"), config.content["first_k_dense_replace"]
    if not isinstance(dense, int):
        raise ConfigError(f"{config.file}: first_k_dense_replace = {dense!r} must be a number of layers")
    experts = read_experts(
        config,
        *_KEYS,
        normalise=config.switch("norm_topk_prob"),
        sigmoid=True,
        groups=config.whole("n_group"),
        groups_per_token=config.whole("topk_group"),
        scale=float(config.number("routed_scaling_factor")),
        shared_dim=config.whole("n_shared_experts") * config.whole("moe_intermediate_size"),
    )
    return experts, [layer >= dense for layer in range(n_layers)]


def write_sigmoid_experts(args: TransformerArgs, architecture: str) -> dict[str, Any]:
    """Return the entries that `read_sigmoid_experts` reads."""
    entries, experts = write_experts(args, architecture, *_KEYS), args.experts
    return {
        **entries,
        "n_shared_experts": max(experts.shared_dim // experts.hidden_dim, 1),
        "norm_topk_prob": experts.normalise,
        "n_group": experts.groups,
        "topk_group": experts.groups_per_token,
        "routed_scaling_factor": experts.scale,
        "first_k_dense_replace": sum(not args.layer(layer).experts for layer in range(args.n_layers)),
    }
