"""Architectures of transformers that combine parts of the other ones; sizes.toml has the sizes. Torch-free."""

from trainer.config.errors import ConfigError
from trainer.families.config_parts import (
    BIASES,
    NORMALISE,
    Fields,
    Part,
    always,
    experts,
    full_every,
    number,
    only,
    read_windows,
    renamed,
    windows,
    write_windows,
)
from trainer.families.decoder_config_json import HFDecoder
from trainer.families.decoder_tensors import FURTHER_AS_LAYERS, SELECTION_BIAS
from trainer.families.dense import GELU, GEMMA, NO_MLP_BIAS, OLMO, SCALARS
from trainer.families.hybrid import GRANITE_NAMES, GRANITE_SHARED, GRANITE_SHARED_NAMES
from trainer.families.rotary_entries import FULL, SLIDING, rotary
from trainer.families.sparse import (
    FURTHER,
    LATENT,
    LOCAL,
    MLP_TYPES,
    NO_BIASES,
    PAIRS,
    QKV_BIASES,
    SIGMOID_EXPERTS,
    SIGMOID_NAMES,
)
from trainer.hugging_face.config_json import Entries

_FUSED_GATES = {"feed_forward.w1": "mlp.gate_up_proj", "feed_forward.w3": "mlp.gate_up_proj"}


def _read_from(config: Entries, first: int) -> Fields:
    """Read windows. Without `layer_types`, a window belongs to the layers from number `first` on, counted from 0."""
    has_window = config.content.get("sliding_window") is not None
    layers = range(config.whole("num_hidden_layers"))
    return read_windows(
        config, [SLIDING if has_window and layer >= first else FULL for layer in layers]
    )


def _read_cwm(config: Entries) -> Fields:
    layers = range(config.whole("num_hidden_layers"))
    return read_windows(config, [SLIDING if layer % 4 else FULL for layer in layers])


def _read_exaone(config: Entries) -> Fields:
    """Read windows. If a layer has a window, the layers without a window rotate nothing."""
    has_window = config.content.get("sliding_window") is not None
    every = config.whole("sliding_window_pattern", 4) if has_window else 1
    fields = read_windows(config, full_every(config, SLIDING, every))
    if has_window:
        fields["layers"]["rope"] = fields["layers"]["window"]
    return fields


def _read_thetas(config: Entries) -> Fields:
    """Read the base of each layer's frequencies. A layer with base 0 rotates nothing.

    If the list has another form than one number a layer, a ConfigError is raised.
    """
    n_layers = config.whole("num_hidden_layers")
    whole, _ = rotary(config)
    thetas = config.content.get("layer_rope_theta")
    thetas = [whole] * n_layers if thetas is None else thetas
    if (
        not isinstance(thetas, list)
        or len(thetas) != n_layers
        or not all(isinstance(theta, int | float) for theta in thetas)
    ):
        raise ConfigError(
            f"{config.file}: layer_rope_theta = {thetas!r} must have a number for each of {n_layers} layers"
        )
    own = [float(theta) if theta and theta != whole else None for theta in thetas]
    return {
        "attention_sinks": True,
        "layers": {"rope": [bool(theta) for theta in thetas], "rope_theta": own},
    }


_GRANITE_SWA = (
    BIASES,
    Part(_read_cwm, lambda args: write_windows(args, 128)),
    Part(
        _read_thetas,
        lambda args: {
            "layer_rope_theta": [
                (kind.rope_theta or args.rope_theta) if kind.rope else 0 for kind in args.kinds
            ]
        },
    ),
    *SCALARS,
)
_SHARED_LAYERS = {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"}
FAMILIES = {
    "gemma": HFDecoder(
        "gemma",
        "GemmaForCausalLM",
        (
            only("use_bidirectional_attention", False),
            BIASES,
            Part(
                lambda config: {
                    "norm_offset": True,
                    "activation": "gelu_tanh",
                    "embedding_scale": config.whole("hidden_size") ** 0.5,
                }
            ),
        ),
        activation=("hidden_act", GELU[1]),
    ),
    "vaultgemma": HFDecoder(
        "vaultgemma",
        "VaultGemmaForCausalLM",
        (
            *GEMMA,
            always(norm_place="before"),
            windows(2, 4096),
            number("attn_logit_softcapping", "attention_softcap"),
        ),
        names={"ffn_norm": "pre_feedforward_layernorm"},
        activation=GELU,
    ),
    "ministral": HFDecoder(
        "ministral",
        "MinistralForCausalLM",
        (Part(lambda config: _read_from(config, 0), write_windows),),
    ),
    "cwm": HFDecoder(
        "cwm",
        "CwmForCausalLM",
        (NO_MLP_BIAS, Part(_read_cwm, lambda args: write_windows(args, 8192))),
    ),
    "exaone4": HFDecoder(
        "exaone4",
        "Exaone4ForCausalLM",
        (always(norm_place="after", qk_norm=True), Part(_read_exaone, write_windows)),
    ),
    "iquestcoder": HFDecoder(
        "iquestcoder",
        "LlamaForCausalLM",
        (NO_MLP_BIAS, BIASES, only("clip_qkv", None)),
        other_classes=("IQuestCoderForCausalLM",),
    ),
    "glm": HFDecoder(
        "glm",
        "GlmForCausalLM",
        (QKV_BIASES,),
        names=_FUSED_GATES,
        rotates_a_share=True,
        adjacent_pairs=True,
    ),
    "glm4": HFDecoder(
        "glm4",
        "Glm4ForCausalLM",
        (QKV_BIASES, always(norm_place="around")),
        names={
            **_FUSED_GATES,
            "attention_post_norm": "post_self_attn_layernorm",
            "ffn_norm": "post_attention_layernorm",
            "ffn_post_norm": "post_mlp_layernorm",
        },
        rotates_a_share=True,
        adjacent_pairs=True,
    ),
    "helium": HFDecoder(
        "helium", "HeliumForCausalLM", (NO_MLP_BIAS, QKV_BIASES), adjacent_pairs=True
    ),
    "ernie4_5": HFDecoder(
        "ernie4_5",
        "Ernie4_5ForCausalLM",
        (only("use_bias", False, written=True),),
        adjacent_pairs=True,
    ),
    "youtu": HFDecoder("youtu", "YoutuForCausalLM", (PAIRS, NO_BIASES, LATENT)),
    "glm4_moe_lite": HFDecoder(
        "glm4_moe_lite",
        "Glm4MoeLiteForCausalLM",
        (PAIRS, SIGMOID_EXPERTS, MLP_TYPES, NO_BIASES, LATENT, FURTHER),
        names=SIGMOID_NAMES,
        further=FURTHER_AS_LAYERS,
    ),
    "solar_open": HFDecoder(
        "solar_open", "SolarOpenForCausalLM", (SIGMOID_EXPERTS, QKV_BIASES), names=SIGMOID_NAMES
    ),
    "dots1": HFDecoder(
        "dots1",
        "Dots1ForCausalLM",
        (
            always(qk_norm=True),
            BIASES,
            SIGMOID_EXPERTS,
            Part(
                lambda config: _read_from(config, config.whole("max_window_layers")),
                write_windows,
            ),
        ),
        names=SIGMOID_NAMES,
    ),
    "flex_olmo": HFDecoder(
        "flex_olmo",
        "FlexOlmoForCausalLM",
        (
            *OLMO,
            experts("num_experts", "intermediate_size", NORMALISE),
        ),
    ),
    "exaone_moe": HFDecoder(
        "exaone_moe",
        "ExaoneMoeForCausalLM",
        (
            always(qk_norm=True),
            Part(_read_exaone, write_windows),
            renamed(SIGMOID_EXPERTS, _SHARED_LAYERS),
            MLP_TYPES,
        ),
        names=SIGMOID_NAMES | {SELECTION_BIAS: "mlp.e_score_correction_bias"},
    ),
    "hy_v3": HFDecoder(
        "hy_v3",
        "HYV3ForCausalLM",
        (
            always(qk_norm=True),
            BIASES,
            NO_MLP_BIAS,
            renamed(
                SIGMOID_EXPERTS,
                _SHARED_LAYERS | {"router_scaling_factor": "routed_scaling_factor"},
            ),
            MLP_TYPES,
        ),
        names={
            SELECTION_BIAS: "mlp.expert_bias",
            "feed_forward.router.gate": "mlp.router.gate",
            "feed_forward.shared.w1": "mlp.shared_mlp.gate_proj",
            "feed_forward.shared.w2": "mlp.shared_mlp.down_proj",
            "feed_forward.shared.w3": "mlp.shared_mlp.up_proj",
        },
    ),
    "granite_swa": HFDecoder(
        "granite_swa", "GraniteSWAForCausalLM", (NO_MLP_BIAS, *_GRANITE_SWA)
    ),
    "granitemoe_swa": HFDecoder(
        "granitemoe_swa",
        "GraniteMoeSWAForCausalLM",
        (experts(*LOCAL, GRANITE_SHARED), *_GRANITE_SWA),
        names={
            **GRANITE_SHARED_NAMES,
            "feed_forward.router.gate": "block_sparse_moe.router",
            "feed_forward.experts.w13": "block_sparse_moe.experts.gate_up_proj",
            "feed_forward.experts.w2": "block_sparse_moe.experts.down_proj",
        },
    ),
    "granitemoeshared": HFDecoder(
        "granitemoeshared",
        "GraniteMoeSharedForCausalLM",
        (BIASES, experts(*LOCAL, GRANITE_SHARED), *SCALARS),
        names=GRANITE_SHARED_NAMES,
    ),
    "granitemoe": HFDecoder(
        "granitemoe",
        "GraniteMoeForCausalLM",
        (BIASES, experts(*LOCAL), *SCALARS),
        names=GRANITE_NAMES,
    ),
}
