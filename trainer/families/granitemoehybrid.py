"""Granite 4: Mamba-2 in nine of ten layers, with experts or without; sizes.toml has the sizes and their sources.

Torch-free.
"""

from typing import Any

from trainer.config.errors import ConfigError
from trainer.families.args import ExpertArgs
from trainer.families.decoder_args import TransformerArgs, sizes
from trainer.families.decoder_config_json import FULL, HFDecoder, layer_kinds, read_balance, read_layer_types
from trainer.families.granite import read_scalars, write_scalars
from trainer.families.linear_args import MambaArgs
from trainer.hugging_face.config_json import Entries

FLAVORS = sizes("granitemoehybrid")
_MAMBA = "mamba", "linear_attention"
_INFINITE = float("inf"), "Infinity", {"__float__": "Infinity"}  # as JSON has it, or does not


def _read(config: Entries) -> dict[str, Any]:
    """A model without experts has what others call the shared expert as its feed-forward network."""
    n_layers = config.whole("num_hidden_layers")
    assumed = config.content.get("layers_block_type") or [_MAMBA[0]] * n_layers
    kinds = read_layer_types(config, (*_MAMBA, "attention", FULL), assumed)
    config.only("attention_bias", False)
    config.only("mamba_proj_bias", False)
    config.only("time_step_limit", None, *([0.0, infinite] for infinite in _INFINITE))
    heads = config.whole("mamba_n_heads")
    inner = config.whole("mamba_expand") * config.whole("hidden_size")
    if inner % heads or heads % config.whole("mamba_n_groups"):
        raise ConfigError(
            f"{config.file}: mamba_n_heads = {heads} must divide mamba_expand * hidden_size = {inner}, and be a "
            f"multiple of mamba_n_groups = {config.whole('mamba_n_groups')}"
        )
    linear = MambaArgs(
        heads,
        inner // heads,
        config.whole("mamba_d_state"),
        config.whole("mamba_n_groups"),
        config.whole("mamba_d_conv"),
        config.switch("mamba_conv_bias"),
    )
    rotates = config.only("position_embedding_type", "nope", "rope") == "rope"
    shared, experts = config.whole("shared_intermediate_size"), None
    if config.content.get("num_local_experts"):
        numbers = (config.whole(key) for key in ("num_local_experts", "num_experts_per_tok", "intermediate_size"))
        experts = ExpertArgs(*numbers, shared_dim=shared)
    return {
        "ffn_hidden_dim": shared if experts is None else config.whole("intermediate_size"),
        "linear": linear if any(kind in _MAMBA for kind in kinds) else None,
        "experts": experts,
        "router_aux_loss_coef": read_balance(config) if experts else 0.0,
        **read_scalars(config),
        **layer_kinds(n_layers, linear=[kind in _MAMBA for kind in kinds], rope=[rotates] * n_layers),
    }


def _write(args: TransformerArgs) -> dict[str, Any]:
    linear, experts = args.linear or MambaArgs(args.n_heads, 2 * args.dim // args.n_heads, 128), args.experts
    expand = linear.heads * linear.head_dim // args.dim
    kinds = [args.layer(layer).linear for layer in range(args.n_layers)]
    rotates = {args.layer(layer).rope for layer, is_linear in enumerate(kinds) if not is_linear}
    return {
        **write_scalars(args),
        "attention_bias": False,
        "layer_types": [_MAMBA[1] if is_linear else FULL for is_linear in kinds],
        "position_embedding_type": "rope" if True in rotates else None,
        "mamba_n_heads": linear.heads,
        "mamba_d_head": linear.head_dim,
        "mamba_expand": max(expand, 1),
        "mamba_d_state": linear.state_dim,
        "mamba_n_groups": linear.groups,
        "mamba_d_conv": linear.kernel,
        "mamba_conv_bias": linear.convolution_bias,
        "mamba_proj_bias": False,
        "num_local_experts": 0 if experts is None else experts.number,
        "num_experts_per_tok": 0 if experts is None else experts.per_token,
        "intermediate_size": args.ffn_hidden_dim if experts is None else experts.hidden_dim,
        "shared_intermediate_size": args.ffn_hidden_dim if experts is None else experts.shared_dim,
        "router_aux_loss_coef": args.router_aux_loss_coef,
    }


_DENSE = {"w1": "shared_mlp.input_linear", "w3": "shared_mlp.input_linear", "w2": "shared_mlp.output_linear"}
HF = HFDecoder(
    "granitemoehybrid",
    "GraniteMoeHybridForCausalLM",
    _read,
    _write,
    names={
        **{f"attention.in_{part}": "mamba.in_proj" for part in ("z", "x", "b", "c", "dt")},
        **{f"attention.{part}_conv": "mamba.conv1d" for part in "xbc"},
        **{f"attention.{part}_bias.weight": "mamba.conv1d.bias" for part in "xbc"},
        "attention.decay.a_log.weight": "mamba.A_log",
        "attention.decay.dt_bias.weight": "mamba.dt_bias",
        "attention.skip.weight": "mamba.D",
        "attention.norm": "mamba.norm",
        "linear.wo": "mamba.out_proj",
        "feed_forward.router.gate": "block_sparse_moe.router.layer",
        "feed_forward.experts.w13": "block_sparse_moe.input_linear",
        "feed_forward.experts.w2": "block_sparse_moe.output_linear",
        **{f"feed_forward.{ours}": there for ours, there in _DENSE.items()},
        **{f"feed_forward.shared.{ours}": there for ours, there in _DENSE.items()},
    },
)
