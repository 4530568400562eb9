"""Kimi Linear: Kimi Delta Attention in three of four layers, latent attention without rotation in the others.

sizes.toml has the sizes and their sources. Torch-free.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trainer.config.errors import ConfigError
from trainer.families.decoder_args import TransformerArgs, sizes
from trainer.families.decoder_config_json import FULL, HFDecoder, layer_kinds, read_layer_types
from trainer.families.decoder_tensors import FURTHER_AS_LAYERS
from trainer.families.deepseek_v3 import LATENT_NAMES, read_latent, write_latent
from trainer.families.linear_args import KimiDeltaArgs
from trainer.families.sigmoid_experts import NAMES, read_sigmoid_experts, write_sigmoid_experts
from trainer.hugging_face.config_json import Entries
from trainer.hugging_face.tensors import HFTensor

if TYPE_CHECKING:
    import torch

FLAVORS = sizes("kimi_linear")
_KEYS = {
    "num_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "num_expert_group": "n_group",
    "moe_renormalize": "norm_topk_prob",
    "model_max_length": "max_position_embeddings",
}
"""Names there -> those of DeepSeek-V3."""
_LINEAR = "linear_attention"


def _linear_layers(config: Entries) -> tuple[KimiDeltaArgs, list[bool]]:
    """Return the arguments of linear layers, and which layers are: listed and counted from one, or by `layer_types`.

    Raises:
        ConfigError: a layer is named twice, or not at all.
    """
    n_layers, table = config.whole("num_hidden_layers"), config.table("linear_attn_config")
    names = {"num_heads": "num_heads", "head_dim": "head_dim", "short_conv_kernel_size": "conv_kernel_dim"}
    sizes = (table.whole(key, config.whole(f"linear_{other}")) for key, other in names.items())
    args = KimiDeltaArgs(*sizes)
    if table.content:
        full, linear = (table.content.get(key) for key in ("full_attn_layers", "kda_layers"))
        numbers = [*range(1, n_layers + 1)]
        if not (isinstance(full, list) and isinstance(linear, list) and sorted(full + linear) == numbers):
            raise ConfigError(
                f"{config.file}: full_attn_layers = {full!r} and kda_layers = {linear!r} of linear_attn_config must "
                f"name each of {n_layers} layers once, the first one as 1"
            )
        return args, [number in linear for number in numbers]
    assumed = [FULL if i and i % 4 == 0 else _LINEAR for i in range(n_layers)]
    return args, [kind == _LINEAR for kind in read_layer_types(config, (FULL, _LINEAR), assumed)]


def _read(config: Entries) -> dict[str, Any]:
    content = config.content | {ours: config.content[key] for key, ours in _KEYS.items() if key in config.content}
    config = replace(config, content=content)
    for key, value in (("mla_use_nope", True), ("moe_router_activation_func", "sigmoid"), ("moe_layer_freq", 1)):
        config.only(key, value)
    args, linear = _linear_layers(config)
    experts, sparse = read_sigmoid_experts(config)
    if (kinds := config.content.get("mlp_layer_types")) is not None:
        if not isinstance(kinds, list) or len(kinds) != len(sparse) or not {"dense", "sparse"}.issuperset(kinds):
            raise ConfigError(
                f"{config.file}: mlp_layer_types = {kinds!r} is not supported; it must be 'dense' or 'sparse' for each "
                f"of {len(sparse)} layers"
            )
        sparse = [kind == "sparse" for kind in kinds]
    return {
        **read_latent(config),
        "max_seq_len": config.whole("max_position_embeddings"),
        "linear": args,
        "experts": experts,
        **layer_kinds(len(sparse), linear=linear, rope=[False] * len(sparse), experts=sparse),
    }


def _write(args: TransformerArgs) -> dict[str, Any]:
    if (linear := args.linear) is None:
        raise ConfigError(f"{HF.architecture} of Hugging Face's transformers needs linear attention, and this has none")
    entries, known = write_sigmoid_experts(args, HF.architecture), {ours: key for key, ours in _KEYS.items()}
    kinds = [args.layer(layer).linear for layer in range(args.n_layers)]
    return {
        **write_latent(args, HF.architecture),
        **{known.get(key, key): value for key, value in entries.items()},
        "model_max_length": args.max_seq_len,
        "mla_use_nope": True,
        "moe_router_activation_func": "sigmoid",
        "moe_layer_freq": 1,
        "linear_attn_config": {
            "full_attn_layers": [i + 1 for i, is_linear in enumerate(kinds) if not is_linear],
            "kda_layers": [i + 1 for i, is_linear in enumerate(kinds) if is_linear],
            "num_heads": linear.heads,
            "head_dim": linear.head_dim,
            "short_conv_kernel_size": linear.kernel,
        },
        "layer_types": [_LINEAR if is_linear else FULL for is_linear in kinds],
        "mlp_layer_types": ["sparse" if args.layer(layer).experts else "dense" for layer in range(args.n_layers)],
    }


class _KimiLinear(HFDecoder):
    def tensor(self, args: TransformerArgs, name: str) -> HFTensor | None:
        """Return Hugging Face's tensor for a parameter; that of decays has dimensions of one."""
        found = super().tensor(args, name)
        if not name.endswith("decay.a_log.weight"):
            return found
        return replace(found, to_hf=_in_four_dimensions, from_hf=_in_one_dimension)


def _in_four_dimensions(x: "torch.Tensor") -> "torch.Tensor":
    return x.view(1, 1, -1, 1)


def _in_one_dimension(x: "torch.Tensor") -> "torch.Tensor":
    return x.flatten()


_OF_LINEAR = {"wb": "b_proj", "f_a": "f_a_proj", "f_b": "f_b_proj", "g_a": "g_a_proj", "g_b": "g_b_proj"}
_EXPERT = "block_sparse_moe.experts.{}"
HF = _KimiLinear(
    "kimi_linear",
    "KimiLinearForCausalLM",
    _read,
    _write,
    names={
        **LATENT_NAMES,
        **{f"attention.{ours}": f"self_attn.{theirs}" for ours, theirs in _OF_LINEAR.items()},
        **{f"attention.{part}_conv": f"self_attn.{part}_conv1d" for part in "qkv"},
        "attention.decay.a_log.weight": "self_attn.A_log",
        "attention.decay.dt_bias.weight": "self_attn.dt_bias",
        "attention.norm": "self_attn.o_norm",
        "linear.wo": "self_attn.o_proj",
        **{ours: theirs.replace("mlp.", "block_sparse_moe.") for ours, theirs in NAMES.items()},
        "feed_forward.router.gate": "block_sparse_moe.gate",
        "feed_forward.experts.w13": f"{_EXPERT}.w1 {_EXPERT}.w3",
        "feed_forward.experts.w2": f"{_EXPERT}.w2",
    },
    further=FURTHER_AS_LAYERS,
)
