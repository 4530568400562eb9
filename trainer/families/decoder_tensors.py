"""Names and layouts of the decoder's tensors at Hugging Face; most families use the names of Llama. Torch-free.

Most families have a tensor for each expert and matrix. gpt-oss has stacked and transposed tensors, where rows of gates
and rows of the up projection alternate. Phi has one tensor for all matrices with the same input.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from trainer.families.decoder_args import TransformerArgs
from trainer.families.layers import Layer
from trainer.families.mixers import AttentionArgs
from trainer.hugging_face.pairs import HFTensor

if TYPE_CHECKING:
    import torch

_MODULES = {
    "tok_embeddings": "model.embed_tokens",
    "layer_embeddings": "model.embed_tokens_per_layer",
    "layer_projection": "model.per_layer_model_projection",
    "layer_projection_norm": "model.per_layer_projection_norm",
    "norm": "model.norm",
    "output": "lm_head",
}
_ROTATED = ("attention.wq", "attention.wk", "attention.q_norm", "attention.k_norm")
_FUSED = (
    ("attention.wq", "attention.wk", "attention.wv"),
    ("attention.in_z", "attention.in_x", "attention.in_b", "attention.in_c", "attention.in_dt"),
    ("attention.in_q", "attention.in_k", "attention.in_v"),
    ("feed_forward.w1", "feed_forward.w3"),
    ("feed_forward.shared.w1", "feed_forward.shared.w3"),
)
STACKED = {"w13": "gate_up_proj", "w2": "down_proj"}
"""Weights of all experts, and their names in transformers' modules."""
SELECTION_BIAS = "feed_forward.router.selection_bias"
FURTHER_AS_LAYERS: Mapping[str, str] = {
    "": "model.layers.{}.",
    "embedding_norm": "model.layers.{}.enorm",
    "hidden_norm": "model.layers.{}.hnorm",
    "projection": "model.layers.{}.eh_proj",
    "mtp_norms": "model.layers.{}.shared_head.norm",
}
"""`HFDecoder.further` of DeepSeek-V3 and of later families."""


def hf_tensor(
    args: TransformerArgs,
    name: str,
    names: Mapping[str, str | None] | None = None,
    layers: str = "model.layers.{}.",
) -> HFTensor | None:
    """Return Hugging Face's tensor for a parameter. None for a buffer of routers without a counterpart.

    Each expert has `stacked` names; `other_form` is one tensor for all experts. If the experts' name there lacks {},
    only the one tensor exists. Modules with the same name there share a tensor, see `first_row`. The two rows of a
    rotary pair are adjacent here, and half of the rotated share of a head apart there.

    Args:
        args: The arguments of the model.
        name: Name of the parameter.
        names: Modules of a layer, or their parameters -> names there that differ from the layer's record.
        layers: Name prefix of a layer.
    """
    module, kind = name.rsplit(".", 1)
    if module in _MODULES:
        return HFTensor(f"{_MODULES[module]}.{kind}")
    _, number, part = name.split(".", 2)
    prefix = layers.format(number)
    layer = args.layer(int(number))
    table = {**layer.names, **(names or {})}
    if part in ("feed_forward.router.load", SELECTION_BIAS):
        there = table.get(part)
        return None if there is None else HFTensor(prefix + there)
    if args.experts is not None and args.experts.biases and part.startswith("feed_forward."):
        return _gpt_oss_tensor(f"{prefix}mlp", part.removeprefix("feed_forward."))
    if part.startswith("feed_forward.experts.") and "{}" in table[part]:
        templates = [f"{prefix}{template}.weight" for template in table[part].split()]
        numbers = range(args.experts.number)
        stacked = tuple(tuple(there.format(i) for there in templates) for i in numbers)
        one = f"{prefix}mlp.experts.{STACKED[part.rpartition('.')[2]]}"
        return HFTensor(stacked=stacked, other_form=HFTensor(one))
    own = part.rpartition(".")[0]
    place = _place(layer, args.dim, own, table)
    if part in table:
        return HFTensor(prefix + table[part], **place)
    there = HFTensor(f"{prefix}{table[own]}.{kind}", **place)
    mixer = layer.mixer
    if own not in _ROTATED or not isinstance(mixer, AttentionArgs) or mixer.keys_are_values:
        return there  # other mixers have adjacent pairs there, too, and keys that are values have halves here
    doubled = 2 if mixer.gate and own == "attention.wq" else 1
    sizes = mixer.head_dim * doubled, args.rotary_sizes(mixer.rope_theta)[0]
    to_hf, from_hf = (partial(_swap, *sizes, order) for order in ((-1, 2), (2, -1)))
    return replace(there, to_hf=to_hf, from_hf=from_hf, moves_rows=True)


def _place(layer: Layer, dim: int, part: str, table: Mapping[str, str]) -> dict[str, int]:
    """Return `first_row` and `all_rows` of a module in a tensor there that several modules share; {} if none share one.

    part: name of the module in its layer. table: names of modules -> names there.
    """
    groups = []
    if layer.mixer.is_recurrent:
        groups += [
            {f"attention.{name}_{kind}": rows for name, rows in layer.mixer.convolved().items()}
            for kind in ("conv", "bias")
        ]
    groups += [
        {each: layer.linear_shapes(dim)[each][0] for each in parts}
        for parts in _FUSED
        if part in parts and table.get(parts[-1]) == table.get(part)
    ]
    for group in groups:
        shared = {table.get(each, table.get(f"{each}.weight")) for each in group}
        if part in group and len(shared) == 1:
            before = list(group)[: list(group).index(part)]
            return {
                "first_row": sum(group[each] for each in before),
                "all_rows": sum(group.values()),
            }
    return {}


def _gpt_oss_tensor(mlp: str, part: str) -> HFTensor:
    """Return the tensor there for a parameter of `MoE`, such as `experts.w13`.

    mlp: prefix of the name there. part: our name of the parameter in `MoE`.
    """
    if part.startswith("router.gate."):
        return HFTensor(f"{mlp}.router.{part.removeprefix('router.gate.')}")
    name, *layout = _OF_GPT_OSS[part]
    return HFTensor(f"{mlp}.experts.{name}", *layout, keeps_rows=bool(layout))


def _swap(
    head_dim: int, rotary_dim: int, sizes: tuple[int, int], rows: "torch.Tensor"
) -> "torch.Tensor":
    """Divide the rotated rows of each head into two dimensions of these sizes, and transpose them.

    (-1, 2): from adjacent rotary pairs to pairs that are half of the rotated rows apart; (2, -1): back.
    """
    heads = rows.unflatten(0, (-1, head_dim)).clone()
    heads[:, :rotary_dim] = _turned(heads[:, :rotary_dim], sizes).clone()
    return heads.flatten(0, 1)


def _turned(x: "torch.Tensor", sizes: tuple[int, int]) -> "torch.Tensor":
    """Divide dim 1 into two dimensions of these sizes, and transpose them."""
    return x.unflatten(1, sizes).transpose(1, 2).flatten(1, 2)


# Rows of gates and of the up projection: two halves of (E, 2 * hidden, ...) here, alternating there.
_in_turn = partial(_turned, sizes=(2, -1))
_in_halves = partial(_turned, sizes=(-1, 2))
_OF_GPT_OSS = {
    "experts.w13": ("gate_up_proj", lambda x: _in_turn(x).mT, lambda x: _in_halves(x.mT)),
    "experts.b13": ("gate_up_proj_bias", _in_turn, _in_halves),
    "experts.w2": ("down_proj", lambda x: x.mT, lambda x: x.mT),
    "experts.b2": ("down_proj_bias",),
}
