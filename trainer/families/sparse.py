"""Architectures of transformers with experts; sizes.toml has the sizes and their sources. Torch-free."""

from trainer.config.errors import ConfigError
from trainer.families.config_parts import (
    BIASES,
    EXPERTS,
    NORMALISE,
    SHARED,
    SPARSE_LAYERS,
    SWITCHED_WINDOWS,
    WINDOW,
    Fields,
    Part,
    always,
    expert_keys,
    experts,
    only,
    read_experts,
    read_layer_types,
    switch,
    windows,
)
from trainer.families.decoder_config_json import HFDecoder
from trainer.families.decoder_tensors import FURTHER_AS_LAYERS, SELECTION_BIAS
from trainer.families.mixers import LatentArgs
from trainer.hugging_face.config_json import Entries, entries_of

_SIGMOID = expert_keys("n_routed_experts", "moe_intermediate_size")
_SIGMOID |= {"n_group": "groups", "topk_group": "groups_per_token"}


def _read_sigmoid(config: Entries) -> Fields:
    layers = range(config.whole("num_hidden_layers"))
    dense = config.content["first_k_dense_replace"]
    if not isinstance(dense, int):
        raise ConfigError(
            f"{config.file}: first_k_dense_replace = {dense!r} must be a number of layers"
        )
    routed = read_experts(
        config,
        _SIGMOID,
        normalise=config.switch("norm_topk_prob"),
        sigmoid=True,
        scale=float(config.number("routed_scaling_factor")),
        shared_dim=config.whole("n_shared_experts") * config.whole("moe_intermediate_size"),
    )
    return {"experts": routed, "layers": {"experts": [layer >= dense for layer in layers]}}


SIGMOID_EXPERTS = Part(
    _read_sigmoid,
    lambda args: {
        **entries_of(args.experts, _SIGMOID),
        "norm_topk_prob": args.experts.normalise,
        "routed_scaling_factor": args.experts.scale,
        "n_shared_experts": max(args.experts.shared_dim // args.experts.hidden_dim, 1),
        "first_k_dense_replace": sum(not kind.experts for kind in args.kinds),
    },
    EXPERTS,
)
"""Experts chosen by sigmoids, a bias and groups (DeepSeek-V3, arXiv 2412.19437), in all layers except the first."""
SIGMOID_NAMES = {
    SELECTION_BIAS: "mlp.gate.e_score_correction_bias",
    "feed_forward.shared.w1": "mlp.shared_experts.gate_proj",
    "feed_forward.shared.w2": "mlp.shared_experts.down_proj",
    "feed_forward.shared.w3": "mlp.shared_experts.up_proj",
}


_MLP_TYPES = "mlp_layer_types"


def _read_mlp_types(config: Entries) -> Fields:
    if config.content.get(_MLP_TYPES) is None:
        return {}
    kinds = read_layer_types(config, ("dense", "sparse"), (), _MLP_TYPES)
    return {"layers": {"experts": [kind == "sparse" for kind in kinds]}}


MLP_TYPES = Part(
    _read_mlp_types,
    lambda args: {_MLP_TYPES: ["sparse" if kind.experts else "dense" for kind in args.kinds]},
)
"""Layers with experts by name. If a file has no entry, an earlier part decides."""


_LATENT = {
    "kv_lora_rank": "rank",
    "qk_nope_head_dim": "nope_dim",
    "qk_rope_head_dim": "rope_dim",
    "v_head_dim": "value_dim",
}
_QUERY_RANK = {"q_lora_rank": "query_rank"}


def _read_latent(config: Entries) -> Fields:
    if config.whole("num_attention_heads") != config.whole("num_key_value_heads"):
        raise ConfigError(
            f"{config.file}: num_key_value_heads = {config.content['num_key_value_heads']!r} must be "
            f"num_attention_heads = {config.whole('num_attention_heads')}: a latent is for all heads"
        )
    has_query_rank = config.content.get("q_lora_rank") is not None
    latent = LatentArgs(**config.wholes(_LATENT | _QUERY_RANK if has_query_rank else _LATENT))
    if latent.rope_dim % 2 or latent.value_dim > latent.head_dim:
        raise ConfigError(
            f"{config.file}: qk_rope_head_dim = {latent.rope_dim} must be even, and v_head_dim = {latent.value_dim} at "
            f"most qk_nope_head_dim + qk_rope_head_dim = {latent.head_dim}"
        )
    return {"latent": latent, "head_size": None}


NO_BIASES = only("attention_bias", False, written=True)
PAIRS = only("rope_interleave", True, written=True)
QKV_BIASES = switch("attention_bias", "attention_bias")
LATENT = Part(
    _read_latent,
    lambda args: (
        {"head_dim": args.latent.rope_dim} | entries_of(args.latent, _LATENT | _QUERY_RANK)
    ),
    ("latent", "latent attention"),
)
FURTHER = Part(lambda config: {}, lambda args: {"num_nextn_predict_layers": args.mtp_layers})


_SWITCHED_WINDOW = Part(
    lambda config: {
        "sliding_window": config.whole("sliding_window")
        if config.switch("use_sliding_window")
        else None
    },
    lambda args: {
        "use_sliding_window": args.sliding_window is not None,
        "sliding_window": args.sliding_window,
    },
)


def _read_minimax(config: Entries) -> Fields:
    kinds = config.content.get("attn_type_list")
    if kinds not in (None, [1] * config.whole("num_hidden_layers")):
        raise ConfigError(
            f"{config.file}: attn_type_list = {kinds!r} is not supported; it must be 1 for each layer"
        )
    return {"qk_norm": True, "qk_norm_of_all_heads": True}


def _read_olmoe(config: Entries) -> Fields:
    config.only("head_dim", config.whole("hidden_size") // config.whole("num_attention_heads"))
    return {"qk_norm": True, "qk_norm_of_all_heads": True}


_MIXTRAL_NAMES = {
    "feed_forward.router.gate": "block_sparse_moe.gate",
    "feed_forward.experts.w13": "block_sparse_moe.experts.{}.w1 block_sparse_moe.experts.{}.w3",
    "feed_forward.experts.w2": "block_sparse_moe.experts.{}.w2",
}
_NO_JITTER = only("router_jitter_noise", 0.0)
LOCAL = ("num_local_experts", "intermediate_size")
FAMILIES = {
    "qwen3_moe": HFDecoder(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        (
            always(qk_norm=True),
            BIASES,
            experts("num_experts", "moe_intermediate_size", NORMALISE),
            _SWITCHED_WINDOW,
            SPARSE_LAYERS,
        ),
    ),
    "gpt_oss": HFDecoder(
        "gpt_oss",
        "GptOssForCausalLM",
        (
            only("attention_bias", True, written=True),
            only("swiglu_alpha", 1.702),
            only("swiglu_limit", 7.0),
            always(attention_sinks=True, attention_bias=True, output_bias=True),
            experts(*LOCAL, biases=True, clamped=True),
            windows(2, 128),
        ),
        quantised=("mxfp4",),
        float32_in_float16=("input_layernorm", "post_attention_layernorm", "norm"),
    ),
    "mixtral": HFDecoder(
        "mixtral",
        "MixtralForCausalLM",
        (_NO_JITTER, experts(*LOCAL), WINDOW),
        names=_MIXTRAL_NAMES,
    ),
    "olmoe": HFDecoder(
        "olmoe",
        "OlmoeForCausalLM",
        (
            only("clip_qkv", None, written=True),
            Part(_read_olmoe),
            BIASES,
            experts("num_experts", "intermediate_size", NORMALISE),
        ),
    ),
    "qwen2_moe": HFDecoder(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        (
            SWITCHED_WINDOWS,
            SPARSE_LAYERS,
            experts(
                "num_experts", "moe_intermediate_size", NORMALISE | SHARED, shared_gate=True
            ),
            switch("qkv_bias", "attention_bias"),
        ),
    ),
    "glm4_moe": HFDecoder(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        (SIGMOID_EXPERTS, switch("use_qk_norm", "qk_norm"), QKV_BIASES, FURTHER),
        names=SIGMOID_NAMES,
        rotates_a_share=True,
        further=FURTHER_AS_LAYERS,
    ),
    "minimax_m2": HFDecoder(
        "minimax_m2",
        "MiniMaxM2ForCausalLM",
        (
            Part(_read_minimax, lambda args: {"rotary_dim": args.rotary_dim}),
            _NO_JITTER,
            experts(*LOCAL, sigmoid=True),
        ),
        names={**_MIXTRAL_NAMES, SELECTION_BIAS: "block_sparse_moe.e_score_correction_bias"},
        rotates_a_share=True,
    ),
    "deepseek_v3": HFDecoder(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        (PAIRS, SIGMOID_EXPERTS, NO_BIASES, LATENT, FURTHER),
        names=SIGMOID_NAMES,
        further=FURTHER_AS_LAYERS,
    ),
}
