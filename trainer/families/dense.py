"""Architectures of transformers without experts; sizes.toml has the sizes and their sources. Torch-free."""

from collections.abc import Sequence
from dataclasses import replace

from trainer.config.errors import ConfigError
from trainer.families.config_parts import (
    BIASES,
    SWITCHED_WINDOWS,
    WINDOW,
    Fields,
    Part,
    always,
    check_switched,
    full_every,
    number,
    only,
    read_experts,
    read_layer_types,
    read_windows,
    windows,
    with_local_tables,
    write_windows,
)
from trainer.families.decoder_args import TransformerArgs
from trainer.families.decoder_config_json import HFDecoder
from trainer.families.mixers import GlobalHeads
from trainer.families.rotary_entries import FULL, SLIDING, rotary_table, write_local_tables
from trainer.hugging_face.config_json import Entries, entries_of


def _read_smollm3(config: Entries) -> Fields:
    """Read the layers that rotate nothing, by default every fourth one.

    If windows are switched on and `layer_types` is missing, these layers have the window.
    """
    n_layers = config.whole("num_hidden_layers")
    step = config.whole("no_rope_layer_interval", 4)
    rotated = config.content.get("no_rope_layers")
    if rotated is None:
        rotated = [int((i + 1) % step != 0) for i in range(n_layers)]
    if (
        not isinstance(rotated, list)
        or len(rotated) < n_layers
        or any(x not in (0, 1) for x in rotated)
    ):
        raise ConfigError(
            f"{config.file}: no_rope_layers = {rotated!r} must have a 0 or a 1 for each of {n_layers} layers"
        )
    on = (
        config.switch("use_sliding_window") and config.content.get("sliding_window") is not None
    )
    fields = read_windows(
        config, [SLIDING if on and not rotated[i] else FULL for i in range(n_layers)]
    )
    check_switched(config, fields["sliding_window"], "use_sliding_window and sliding_window")
    fields["layers"]["rope"] = [bool(x) for x in rotated[:n_layers]]
    return fields


def _write_smollm3(args: TransformerArgs) -> Fields:
    return {
        "no_rope_layers": [int(kind.rope) for kind in args.kinds],
        "use_sliding_window": args.sliding_window is not None,
        **write_windows(args),
    }


SCALARS = (
    number("embedding_multiplier", "embedding_scale", 1.0),
    number("residual_multiplier", "residual_scale", 1.0),
    number("logits_scaling", "logits_divisor", 1.0),
    replace(
        number("attention_multiplier", "attention_scale", 1.0),
        write=lambda args: {"attention_multiplier": args.score_scale},
    ),
)
"""Factors of Granite."""


def _read_phi3(config: Entries) -> Fields:
    """Accept any scaling as LongRoPE, as transformers does."""
    table = rotary_table(config)
    table.only("rope_type" if "rope_type" in table.content else "type", "default", "longrope")
    return {}


def _write_phi3(args: TransformerArgs) -> Fields:
    """Write the original length, and the table as published if it gives the same model.

    transformers 4 accepts only three entries in this table, and computes the others.
    """
    long = args.rope_scaling
    if long is None:
        return {}
    entries = {"original_max_position_embeddings": long.original_max_seq_len}
    if long.attention_factor is None and args.max_seq_len <= round(
        long.factor * long.original_max_seq_len
    ):
        entries["rope_scaling"] = {
            "type": "longrope",
            "short_factor": [*long.short_factors],
            "long_factor": [*long.long_factors],
        }
    return entries


def _read_gemma(config: Entries) -> Fields:
    scalar = config.whole("query_pre_attn_scalar")
    return {
        "norm_place": "around",
        "norm_offset": True,
        "activation": "gelu_tanh",
        "embedding_scale": config.whole("hidden_size") ** 0.5,
        "attention_scale": None if scalar == config.whole("head_dim") else scalar**-0.5,
    }


def _write_gemma(args: TransformerArgs) -> Fields:
    scale = args.attention_scale
    return {"query_pre_attn_scalar": args.head_dim if scale is None else round(scale**-2)}


GEMMA = (
    only("use_bidirectional_attention", False),
    BIASES,
    Part(_read_gemma, _write_gemma),
    number("final_logit_softcapping", "logits_softcap"),
)


_GEMMA4_EXPERTS = {
    "num_experts": "number",
    "top_k_experts": "per_token",
    "moe_intermediate_size": "hidden_dim",
}


def _read_gemma4(config: Entries) -> Fields:
    """Read the kinds of layers and their fields. The last layer always sees all earlier tokens, as in transformers."""
    *kinds, _ = read_layer_types(config, (FULL, SLIDING), full_every(config, SLIDING, 6))
    kinds.append(FULL)
    fields = read_windows(replace(config, content={**config.content, "layer_types": kinds}), ())
    local = config.table("rope_parameters").table(SLIDING)
    local.only("rope_type", "default")
    theta = float(local.number("rope_theta", 10000.0))
    # Layers from number `first` on share the keys and values of an earlier layer of their kind.
    shared = 0
    if config.content.get("num_kv_shared_layers"):
        shared = config.whole("num_kv_shared_layers")
    first = len(kinds) - shared
    if first < 1 or {*kinds[:first]} != {*kinds}:
        raise ConfigError(
            f"{config.file}: num_kv_shared_layers = {shared} must leave a layer of each kind with keys and "
            "values of its own"
        )
    shares_keys = [i >= first for i in range(len(kinds))]
    factor = 1 + config.switch("use_double_wide_mlp")
    fields["layers"] |= {
        "rope_theta": [theta if kind == SLIDING else None for kind in kinds],
        "global_heads": [kind == FULL for kind in kinds],
        "shares_keys": shares_keys,
        "ffn_factor": [factor if shares else 1 for shares in shares_keys],
    }
    own = 0
    if config.content.get("hidden_size_per_layer_input"):
        own = config.whole("hidden_size_per_layer_input")
        config.only("vocab_size_per_layer_input", config.whole("vocab_size"))
    experts = None
    if config.switch("enable_moe_block"):
        config.only("use_double_wide_mlp", False)
        experts = read_experts(
            config,
            _GEMMA4_EXPERTS,
            shared_dim=config.whole("intermediate_size"),
            activation="gelu_tanh",
            beside_dense=True,
        )
    return fields | {
        "experts": experts,
        "per_layer_dim": own,
        "embedding_scale": config.whole("hidden_size") ** 0.5,
        "global_heads": _read_global_heads(config, kinds),
    }


def _read_global_heads(config: Entries, kinds: Sequence[str]) -> GlobalHeads:
    """Read the heads of layers without a window: from two entries, or since transformers 5.23 from a table by layer."""
    shared = config.switch("attention_k_eq_v")
    n_kv_heads = config.whole("num_key_value_heads")
    own = {"head_dim": config.whole("global_head_dim", 512)}
    if shared and config.content.get("num_global_key_value_heads") is not None:
        own["num_key_value_heads"] = config.whole("num_global_key_value_heads")
    table = config.table("per_layer_config").content
    if table:
        own = table.get(str(kinds.index(FULL)), {})
        if table != {str(i): own for i, kind in enumerate(kinds) if kind == FULL} or not {
            "head_dim",
            "num_key_value_heads",
        }.issuperset(own):
            raise ConfigError(
                f"{config.file}: per_layer_config = {table!r} is not supported; it must name the layers of full "
                "attention alone, with the same head_dim and num_key_value_heads; use another model"
            )
    heads = replace(config, content=own)
    n_kv_heads = heads.whole("num_key_value_heads", n_kv_heads)
    return GlobalHeads(heads.whole("head_dim", config.whole("head_dim")), n_kv_heads, shared)


def _write_gemma4(args: TransformerArgs) -> Fields:
    kinds = args.kinds
    heads = args.global_heads
    own = {"head_dim": heads.head_dim, "num_key_value_heads": heads.n_kv_heads}
    return write_windows(args, 512) | {
        "enable_moe_block": args.experts is not None,
        **entries_of(args.experts, _GEMMA4_EXPERTS),
        "num_kv_shared_layers": sum(kind.shares_keys for kind in kinds),
        "use_double_wide_mlp": any(kind.ffn_factor > 1 for kind in kinds),
        "hidden_size_per_layer_input": args.per_layer_dim,
        "vocab_size_per_layer_input": args.vocab_size,
        "attention_k_eq_v": heads.keys_are_values,
        "global_head_dim": heads.head_dim,
        "num_global_key_value_heads": heads.n_kv_heads,
        "per_layer_config": {str(i): own for i, kind in enumerate(kinds) if kind.global_heads},
        **write_local_tables(args, 10000.0),
    }


OLMO = always(norm_place="after", qk_norm=True, qk_norm_of_all_heads=True), BIASES
GELU = "hidden_activation", "gelu_pytorch_tanh"
NO_MLP_BIAS = only("mlp_bias", False, written=True)
_QKV, _GATES = "self_attn.qkv_proj", "mlp.gate_up_proj"
FAMILIES = {
    "llama3": HFDecoder(
        "llama", "LlamaForCausalLM", (NO_MLP_BIAS, only("sliding_window", None), BIASES)
    ),
    "qwen3": HFDecoder(
        "qwen3", "Qwen3ForCausalLM", (always(qk_norm=True), BIASES, SWITCHED_WINDOWS)
    ),
    # Queries, keys and values always have a bias.
    "qwen2": HFDecoder(
        "qwen2", "Qwen2ForCausalLM", (always(attention_bias=True), SWITCHED_WINDOWS)
    ),
    # Without the entry all layers have a window of 4,096 tokens; with null no layer has a window.
    "mistral": HFDecoder("mistral", "MistralForCausalLM", (only("layer_types", None), WINDOW)),
    "olmo2": HFDecoder("olmo2", "Olmo2ForCausalLM", OLMO),
    "olmo3": HFDecoder(
        "olmo3", "Olmo3ForCausalLM", (*OLMO, with_local_tables(windows(4, 4096), 500000.0))
    ),
    "smollm3": HFDecoder(
        "smollm3",
        "SmolLM3ForCausalLM",
        (NO_MLP_BIAS, BIASES, Part(_read_smollm3, _write_smollm3)),
    ),
    "granite": HFDecoder("granite", "GraniteForCausalLM", (NO_MLP_BIAS, BIASES, *SCALARS)),
    "phi3": HFDecoder(
        "phi3",
        "Phi3ForCausalLM",
        (
            only("resid_pdrop", 0.0),
            only("embd_pdrop", 0.0),
            Part(_read_phi3, _write_phi3),
            WINDOW,
        ),
        names={
            "attention.wq": _QKV,
            "attention.wk": _QKV,
            "attention.wv": _QKV,
            "feed_forward.w1": _GATES,
            "feed_forward.w3": _GATES,
        },
        rotates_a_share=True,
    ),
    "gemma2": HFDecoder(
        "gemma2",
        "Gemma2ForCausalLM",
        (*GEMMA, windows(2, 4096), number("attn_logit_softcapping", "attention_softcap")),
        activation=GELU,
    ),
    "gemma3": HFDecoder(
        "gemma3_text",
        "Gemma3ForCausalLM",
        (
            only("attn_logit_softcapping", None),
            always(qk_norm=True),
            *GEMMA,
            with_local_tables(
                windows(6, 4096, "sliding_window_pattern"), 10000.0, "rope_local_base_freq"
            ),
        ),
        activation=GELU,
    ),
    "gemma4": HFDecoder(
        "gemma4_text",
        "Gemma4ForCausalLM",
        (
            only("use_bidirectional_attention", None, "vision"),
            BIASES,
            always(
                norm_place="around",
                activation="gelu_tanh",
                attention_scale=1.0,
                qk_norm=True,
                value_norm=True,
                layer_scalar=True,
            ),
            number("final_logit_softcapping", "logits_softcap"),
            Part(
                _read_gemma4,
                _write_gemma4,
                ("global_heads", "heads of layers without a window"),
            ),
        ),
        names={
            "layer_scalar": "layer_scalar",
            "input_gate": "per_layer_input_gate",
            "input_projection": "per_layer_projection",
            "input_norm": "post_per_layer_input_norm",
            "feed_forward.router.gate": "router.proj",
            "feed_forward.router.input_norm.weight": "router.scale",
            "feed_forward.router.scales.weight": "router.per_expert_scale",
            "feed_forward.norm_before": "pre_feedforward_layernorm_2",
            "feed_forward.norm_after": "post_feedforward_layernorm_2",
            "feed_forward.shared_norm": "post_feedforward_layernorm_1",
            "feed_forward.experts.w13": "experts.gate_up_proj",
            "feed_forward.experts.w2": "experts.down_proj",
            "feed_forward.shared.w1": "mlp.gate_proj",
            "feed_forward.shared.w2": "mlp.down_proj",
            "feed_forward.shared.w3": "mlp.up_proj",
        },
        activation=GELU,
        rope_types=("proportional",),
        images_type="gemma4",
    ),
}
