"""Names and layouts of the decoder's tensors at Hugging Face, which are those of Llama in all families. Torch-free.

Of experts, Qwen has a tensor for each expert and matrix. gpt-oss has stacked and transposed ones, with the rows of
gates and of what they multiply in turn.
"""

from functools import partial
from typing import TYPE_CHECKING

from trainer.families.args import ExpertArgs
from trainer.families.decoder_args import TransformerArgs
from trainer.hugging_face.tensors import HFTensor

if TYPE_CHECKING:
    import torch

_MODULES = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
_OF_LAYER = {
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}
_ROTATED = ("attention.wq", "attention.wk", "attention.q_norm", "attention.k_norm")


def hf_tensor(args: TransformerArgs, name: str) -> HFTensor | None:
    """Return Hugging Face's tensor for a parameter; None: a buffer of routers, which it does not have.

    The two rows of a rotary pair are adjacent here, and half a head apart there.
    """
    module, kind = name.rsplit(".", 1)
    if module in _MODULES:
        return HFTensor(f"{_MODULES[module]}.{kind}")
    _, layer, part = name.split(".", 2)
    if args.experts is not None and part.startswith("feed_forward."):
        return _of_experts(args.experts, f"model.layers.{layer}.mlp", part.removeprefix("feed_forward."))
    if part == "attention.sinks.weight":
        return HFTensor(f"model.layers.{layer}.self_attn.sinks")
    part, pairs = part.rpartition(".")[0], args.head_dim // 2
    there = f"model.layers.{layer}.{_OF_LAYER[part]}.{kind}"
    if part in _ROTATED:
        there_and_back = partial(_swap, sizes=(-1, pairs, 2)), partial(_swap, sizes=(-1, 2, pairs))
        return HFTensor(there, *there_and_back, moves_rows=True)
    return HFTensor(there)


def _of_experts(experts: ExpertArgs, mlp: str, part: str) -> HFTensor | None:
    """Return the tensor or tensors for one of `MoE`, such as `experts.w13`."""
    if part in ("router.load", "router.selection_bias"):
        return None
    if part.startswith("router.gate."):
        return HFTensor(f"{mlp}.{'router' if experts.biases else 'gate'}.{part.removeprefix('router.gate.')}")
    if experts.biases:
        name, *layout = _OF_GPT_OSS[part]
        return HFTensor(f"{mlp}.experts.{name}", *layout, keeps_rows=bool(layout))
    names = {"experts.w13": ("gate_proj", "up_proj"), "experts.w2": ("down_proj",)}[part]
    rows = (tuple(f"{mlp}.experts.{expert}.{name}.weight" for name in names) for expert in range(experts.number))
    return HFTensor(stacked=tuple(rows))


def _swap(rows: "torch.Tensor", sizes: tuple[int, int, int]) -> "torch.Tensor":
    """Transpose the last two of three dimensions, of such sizes, into which the rows are divided."""
    return rows.unflatten(0, sizes).transpose(1, 2).flatten(0, 2)


def _in_turn(x: "torch.Tensor") -> "torch.Tensor":
    """(E, 2 * hidden, ...): rows of the first and of the second half in turn."""
    return x.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)


def _in_halves(x: "torch.Tensor") -> "torch.Tensor":
    """Undo `_in_turn`."""
    return x.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)


_OF_GPT_OSS = {
    "experts.w13": ("gate_up_proj", lambda x: _in_turn(x).mT, lambda x: _in_halves(x.mT)),
    "experts.b13": ("gate_up_proj_bias", _in_turn, _in_halves),
    "experts.w2": ("down_proj", lambda x: x.mT, lambda x: x.mT),
    "experts.b2": ("down_proj_bias",),
}
