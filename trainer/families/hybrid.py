"""Architectures of transformers with linear attention; sizes.toml has the sizes and their sources. Torch-free."""

from dataclasses import replace
from functools import partial

from trainer.config.errors import ConfigError
from trainer.families.config_parts import (
    NORMALISE,
    SHARED,
    SPARSE_LAYERS,
    Fields,
    Part,
    always,
    expert_keys,
    experts,
    full_every,
    only,
    read_balance,
    read_layer_types,
    renamed,
)
from trainer.families.decoder_args import TransformerArgs
from trainer.families.decoder_config_json import HFDecoder
from trainer.families.decoder_tensors import FURTHER_AS_LAYERS, SELECTION_BIAS
from trainer.families.dense import SCALARS
from trainer.families.feed_forward_args import ExpertArgs
from trainer.families.linear_args import GatedDeltaArgs, KimiDeltaArgs, MambaArgs
from trainer.families.rotary_entries import FULL
from trainer.families.sparse import (
    LATENT,
    LOCAL,
    MLP_TYPES,
    NO_BIASES,
    SIGMOID_EXPERTS,
)
from trainer.hugging_face.config_json import Entries, entries_of
from trainer.hugging_face.pairs import HFTensor

_LINEAR = "linear_attention"
_MAMBA = ("mamba", "linear_attention")
_NEEDS = "linear", "linear attention"
_INFINITE = float("inf"), "Infinity", {"__float__": "Infinity"}  # forms in JSON files


def _types(args: TransformerArgs) -> list[str]:
    return [_LINEAR if kind.linear else FULL for kind in args.kinds]


# ---- Qwen3-Next


_QWEN = {
    "linear_num_key_heads": "key_heads",
    "linear_num_value_heads": "value_heads",
    "linear_key_head_dim": "key_dim",
    "linear_value_head_dim": "value_dim",
    "linear_conv_kernel_dim": "kernel",
}


def _read_qwen(config: Entries, *, by_head: bool) -> Fields:
    kinds = read_layer_types(
        config,
        (FULL, _LINEAR),
        full_every(config, _LINEAR, config.whole("full_attention_interval", 4)),
    )
    linear = GatedDeltaArgs(**config.wholes(_QWEN), by_head=by_head)
    if linear.value_heads % linear.key_heads:
        raise ConfigError(
            f"{config.file}: linear_num_value_heads = {linear.value_heads} must be a multiple of "
            f"linear_num_key_heads = {linear.key_heads}"
        )
    return {"linear": linear, "layers": {"linear": [kind == _LINEAR for kind in kinds]}}


def _write_qwen(args: TransformerArgs) -> Fields:
    return {"layer_types": _types(args), **entries_of(args.linear, _QWEN)}


# Full attention has gates, and norms of queries and keys; all norms of the hidden size count from one.
_QWEN_ALWAYS = always(qk_norm=True, norm_offset=True, attention_gate=True)
_QWEN_FURTHER = {
    "": "mtp.layers.0.",
    "embedding_norm": "mtp.pre_fc_norm_embedding",
    "hidden_norm": "mtp.pre_fc_norm_hidden",
    "projection": "mtp.fc",
    "mtp_norms": "mtp.norm",
}


def _qwen3_5(kind: str, architecture: str, *parts: Part) -> HFDecoder:
    """Return the decoder of a Qwen3.5 model.

    kind: Model type of the published folders, which read images, too; the decoder's own type is `{kind}_text`.
    architecture: Name of the decoder's class in transformers.
    parts: What the decoder has beyond the dense model, such as experts.
    """
    linear = Part(partial(_read_qwen, by_head=False), _write_qwen, _NEEDS)
    return HFDecoder(
        f"{kind}_text",
        architecture,
        (_QWEN_ALWAYS, linear, NO_BIASES, *parts),
        rotates_a_share=True,
        further=_QWEN_FURTHER,
        images_type=kind,
    )


# ---- Kimi Linear: Kimi Delta Attention in three of four layers, latent attention without rotation in the others

_KEYS = {
    "num_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "num_expert_group": "n_group",
    "moe_renormalize": "norm_topk_prob",
    "model_max_length": "max_position_embeddings",
}
"""Names there -> names of DeepSeek-V3."""


def _read_kimi_layers(config: Entries) -> Fields:
    """Read linear layers: a table names all layers once, counted from 1. Without a table, `layer_types` names them."""
    n_layers = config.whole("num_hidden_layers")
    table = config.table("linear_attn_config")
    linear = KimiDeltaArgs(
        table.whole("num_heads", config.whole("linear_num_heads")),
        table.whole("head_dim", config.whole("linear_head_dim")),
        table.whole("short_conv_kernel_size", config.whole("linear_conv_kernel_dim")),
    )
    if table.content:
        full, others = (table.content.get(key) for key in ("full_attn_layers", "kda_layers"))
        numbers = [*range(1, n_layers + 1)]
        if not (
            isinstance(full, list)
            and isinstance(others, list)
            and sorted(full + others, key=str) == sorted(numbers, key=str)
        ):
            raise ConfigError(
                f"{config.file}: full_attn_layers = {full!r} and kda_layers = {others!r} of linear_attn_config must "
                f"name each of {n_layers} layers once, the first one as 1"
            )
        are_linear = [number in others for number in numbers]
    else:
        assumed = [FULL if i and i % 4 == 0 else _LINEAR for i in range(n_layers)]
        are_linear = [
            kind == _LINEAR for kind in read_layer_types(config, (FULL, _LINEAR), assumed)
        ]
    return {"linear": linear, "layers": {"linear": are_linear, "rope": [False] * n_layers}}


def _write_kimi_layers(args: TransformerArgs) -> Fields:
    numbered = list(enumerate(args.kinds, 1))
    return {
        "linear_attn_config": {
            "full_attn_layers": [number for number, kind in numbered if not kind.linear],
            "kda_layers": [number for number, kind in numbered if kind.linear],
            "num_heads": args.linear.heads,
            "head_dim": args.linear.head_dim,
            "short_conv_kernel_size": args.linear.kernel,
        },
        "layer_types": _types(args),
    }


_KIMI_LENGTH = Part(
    lambda config: {"max_seq_len": config.whole("max_position_embeddings")},
    lambda args: {"max_position_embeddings": args.max_seq_len},
)


class _KimiLinear(HFDecoder):
    def tensor(self, args: TransformerArgs, name: str) -> HFTensor | None:
        """Return Hugging Face's tensor for a parameter; the tensor of decays has dimensions of one.

        None if there is none.

        Args:
            args: The arguments of the model.
            name: Name of the parameter.
        """
        hf = super().tensor(args, name)
        if not name.endswith("decay.a_log.weight"):
            return hf
        return replace(hf, to_hf=lambda x: x.view(1, 1, -1, 1), from_hf=lambda x: x.flatten())


# ---- Granite 4: Mamba-2 in nine of ten layers, with experts or without


_MAMBA_SIZES = {
    "mamba_n_heads": "heads",
    "mamba_d_state": "state_dim",
    "mamba_n_groups": "groups",
    "mamba_d_conv": "kernel",
}


def _read_mamba(config: Entries) -> Fields:
    n_layers = config.whole("num_hidden_layers")
    assumed = config.content.get("layers_block_type") or [_MAMBA[0]] * n_layers
    kinds = read_layer_types(config, (*_MAMBA, "attention", FULL), assumed)
    config.only("mamba_proj_bias", False)
    config.only("time_step_limit", None, *([0.0, infinite] for infinite in _INFINITE))
    heads = config.whole("mamba_n_heads")
    inner = config.whole("mamba_expand") * config.whole("hidden_size")
    biases = config.switch("mamba_conv_bias")
    linear = MambaArgs(
        head_dim=inner // heads, convolution_bias=biases, **config.wholes(_MAMBA_SIZES)
    )
    if inner % heads or heads % linear.groups:
        raise ConfigError(
            f"{config.file}: mamba_n_heads = {heads} must divide mamba_expand * hidden_size = {inner}, and be a "
            f"multiple of mamba_n_groups = {linear.groups}"
        )
    rotates = config.only("position_embedding_type", "nope", "rope") == "rope"
    are_linear = [kind in _MAMBA for kind in kinds]
    return {
        "linear": linear if any(are_linear) else None,
        "layers": {"linear": are_linear, "rope": [rotates] * n_layers},
    }


def _write_mamba(args: TransformerArgs) -> Fields:
    linear = args.linear or MambaArgs(args.n_heads, 2 * args.dim // args.n_heads, 128)
    rotates = {kind.rope for kind in args.kinds if not kind.linear}
    return {
        "layer_types": _types(args),
        "position_embedding_type": "rope" if True in rotates else None,
        **entries_of(linear, _MAMBA_SIZES),
        "mamba_d_head": linear.head_dim,
        "mamba_expand": max(linear.heads * linear.head_dim // args.dim, 1),
        "mamba_conv_bias": linear.convolution_bias,
        "mamba_proj_bias": False,
    }


GRANITE_SHARED = {"shared_intermediate_size": "shared_dim"}
_GRANITE = expert_keys(*LOCAL) | GRANITE_SHARED


def _read_granite_experts(config: Entries) -> Fields:
    """Read the experts. In a model without experts, the entry of the shared expert is the feed-forward network."""
    shared = config.whole("shared_intermediate_size")
    if not config.content.get("num_local_experts"):
        return {"ffn_hidden_dim": shared}
    return {"experts": ExpertArgs(**config.wholes(_GRANITE)), **read_balance(config)}


def _write_granite_experts(args: TransformerArgs) -> Fields:
    of = args.experts or ExpertArgs(0, 0, args.ffn_hidden_dim, shared_dim=args.ffn_hidden_dim)
    return entries_of(of, _GRANITE) | {"router_aux_loss_coef": args.router_aux_loss_coef}


GRANITE_NAMES = {
    "feed_forward.router.gate": "block_sparse_moe.router.layer",
    "feed_forward.experts.w13": "block_sparse_moe.input_linear.weight",
    "feed_forward.experts.w2": "block_sparse_moe.output_linear.weight",
}
_EXPERT = "block_sparse_moe.experts.{}"
GRANITE_SHARED_NAMES = {
    **GRANITE_NAMES,
    "feed_forward.shared.w1": "shared_mlp.input_linear",
    "feed_forward.shared.w3": "shared_mlp.input_linear",
    "feed_forward.shared.w2": "shared_mlp.output_linear",
}
FAMILIES = {
    "qwen3_next": HFDecoder(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        (
            _QWEN_ALWAYS,
            experts(
                "num_experts", "moe_intermediate_size", NORMALISE | SHARED, shared_gate=True
            ),
            Part(partial(_read_qwen, by_head=True), _write_qwen, _NEEDS),
            NO_BIASES,
            SPARSE_LAYERS,
        ),
        rotates_a_share=True,
        further=_QWEN_FURTHER,
    ),
    "qwen3_5": _qwen3_5("qwen3_5", "Qwen3_5ForCausalLM"),
    "qwen3_5_moe": _qwen3_5(
        "qwen3_5_moe",
        "Qwen3_5MoeForCausalLM",
        experts("num_experts", "moe_intermediate_size", SHARED, shared_gate=True),
    ),
    "kimi_linear": _KimiLinear(
        "kimi_linear",
        "KimiLinearForCausalLM",
        (
            only("mla_use_nope", True, written=True),
            only("moe_router_activation_func", "sigmoid", written=True),
            only("moe_layer_freq", 1, written=True),
            Part(_read_kimi_layers, _write_kimi_layers, _NEEDS),
            renamed(SIGMOID_EXPERTS, _KEYS),
            renamed(_KIMI_LENGTH, _KEYS),
            MLP_TYPES,
            NO_BIASES,
            LATENT,
        ),
        names={
            SELECTION_BIAS: "block_sparse_moe.gate.e_score_correction_bias",
            "feed_forward.shared.w1": "block_sparse_moe.shared_experts.gate_proj",
            "feed_forward.shared.w2": "block_sparse_moe.shared_experts.down_proj",
            "feed_forward.shared.w3": "block_sparse_moe.shared_experts.up_proj",
            "feed_forward.router.gate": "block_sparse_moe.gate",
            "feed_forward.experts.w13": f"{_EXPERT}.w1 {_EXPERT}.w3",
            "feed_forward.experts.w2": f"{_EXPERT}.w2",
        },
        further=FURTHER_AS_LAYERS,
    ),
    "granitemoehybrid": HFDecoder(
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        (
            NO_BIASES,
            Part(_read_mamba, _write_mamba),
            Part(_read_granite_experts, _write_granite_experts),
            *SCALARS,
        ),
        names={
            **GRANITE_SHARED_NAMES,
            "feed_forward.w1": "shared_mlp.input_linear",
            "feed_forward.w3": "shared_mlp.input_linear",
            "feed_forward.w2": "shared_mlp.output_linear",
        },
    ),
}
