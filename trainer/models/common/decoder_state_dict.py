"""Names and layouts of the decoder's tensors at Hugging Face, which are those of Llama in all families."""

from functools import partial

import torch

from trainer.models.common.decoder_args import TransformerArgs
from trainer.models.common.decoder_hf_names import MODULES, MODULES_OF_LAYER
from trainer.models.common.expert_state_dict import expert_counterpart
from trainer.models.model_spec import Counterpart

_ROTATED = ("attention.wq", "attention.wk", "attention.q_norm", "attention.k_norm")


def counterpart(args: TransformerArgs, name: str) -> Counterpart | None:
    """Return Hugging Face's counterpart of a parameter; None: a buffer of routers, which there is not.

    The two rows of a rotary pair are adjacent here, and half a head apart there.
    """
    module, kind = name.rsplit(".", 1)
    if args.experts is not None and ".feed_forward." in name:
        return expert_counterpart(args.experts, *name.removeprefix("layers.").split(".feed_forward."))
    if module in MODULES:
        return Counterpart(f"{MODULES[module]}.{kind}")
    _, layer, part = module.split(".", 2)
    if part == "attention.sinks":
        return Counterpart(f"model.layers.{layer}.self_attn.sinks")
    there, pairs = f"model.layers.{layer}.{MODULES_OF_LAYER[part]}.{kind}", args.head_dim // 2
    if part in _ROTATED:
        there_and_back = partial(_swap, sizes=(-1, pairs, 2)), partial(_swap, sizes=(-1, 2, pairs))
        return Counterpart(there, *there_and_back, moves_rows=True)
    return Counterpart(there)


def _swap(rows: torch.Tensor, sizes: tuple[int, int, int]) -> torch.Tensor:
    """Transpose the last two of three dimensions, of such sizes, into which the rows are divided."""
    return rows.unflatten(0, sizes).transpose(1, 2).flatten(0, 2)
