"""Names and layouts of Llama's tensors at Hugging Face (`LlamaForCausalLM`)."""

from functools import partial

import torch

from trainer.models.llama3.args import TransformerArgs
from trainer.models.llama3.hf_config import check_features
from trainer.models.model_spec import Counterpart

_MODULES = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
_MODULES_OF_LAYER = {
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}


def counterpart(args: TransformerArgs, name: str) -> Counterpart:
    """Return Hugging Face's counterpart of a parameter.

    The two rows of a rotary pair are adjacent here, and half a head apart there.

    Raises:
        ConfigError: a feature that `LlamaForCausalLM` does not have.
    """
    check_features(args)
    module = name.removesuffix(".weight")
    if module in _MODULES:
        return Counterpart(f"{_MODULES[module]}.weight")
    _, layer, part = module.split(".", 2)
    there, pairs = f"model.layers.{layer}.{_MODULES_OF_LAYER[part]}.weight", args.head_dim // 2
    if part in ("attention.wq", "attention.wk"):
        there_and_back = partial(_swap, sizes=(-1, pairs, 2)), partial(_swap, sizes=(-1, 2, pairs))
        return Counterpart(there, *there_and_back, moves_rows=True)
    return Counterpart(there)


def _swap(rows: torch.Tensor, sizes: tuple[int, int, int]) -> torch.Tensor:
    """Transpose the last two of three dimensions, of such sizes, into which the rows are divided."""
    return rows.unflatten(0, sizes).transpose(1, 2).flatten(0, 2)
