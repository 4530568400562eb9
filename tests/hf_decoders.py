"""Decoders of transformers: a random model of the same shape as one of ours, and its own arithmetic in float64."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3

from trainer.models.common.decoder_args import TransformerArgs
from trainer.models.common.rotary import rope_frequencies
from trainer.models.common.shapes import RopeScaling

THERE = {
    "llama3": ("Llama", modeling_llama),
    "qwen3": ("Qwen3", modeling_qwen3),
    "qwen2": ("Qwen2", modeling_qwen2),
    "mistral": ("Mistral", modeling_mistral),
}


def hf_model(family: str, args: TransformerArgs) -> PreTrainedModel:
    """A random model of the same shape, in float64; its norms and biases are random, too."""
    name, _ = THERE[family]
    config = getattr(transformers, f"{name}Config")(
        vocab_size=args.vocab_size,
        hidden_size=args.dim,
        intermediate_size=args.ffn_hidden_dim,
        num_hidden_layers=args.n_layers,
        num_attention_heads=args.n_heads,
        num_key_value_heads=args.n_kv_heads,
        head_dim=args.head_dim,
        max_position_embeddings=args.max_seq_len,
        rms_norm_eps=args.norm_eps,
        rope_parameters={"rope_theta": args.rope_theta, **rope_entries(args.rope_scaling)},
        tie_word_embeddings=args.tie_embeddings,
        attn_implementation="sdpa",
        **_entries_of_family(family, args),
    )
    torch.manual_seed(1)
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(torch.float64)
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.5 if parameter.ndim == 1 else 0.0, 0.3)
    return model


def rope_entries(scaling: RopeScaling | None) -> dict[str, Any]:
    if scaling is None:
        return {"rope_type": "default"}
    entries = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind != "linear":
        entries["original_max_position_embeddings"] = scaling.original_max_seq_len
    if scaling.kind == "llama3":
        entries |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    if scaling.kind == "yarn":
        entries |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
        entries |= {} if scaling.truncate else {"truncate": False}
        entries |= {} if scaling.attention_factor is None else {"attention_factor": scaling.attention_factor}
    return entries


def _entries_of_family(family: str, args: TransformerArgs) -> dict[str, Any]:
    if family == "mistral":
        return {"sliding_window": args.sliding_window}
    entries = {} if family == "qwen2" else {"attention_bias": args.attention_bias}
    if family == "llama3":
        return entries
    kinds = ["full_attention" if args.window_of_layer(i) is None else "sliding_attention" for i in range(args.n_layers)]
    entries |= {"use_sliding_window": args.sliding_window is not None, "sliding_window": args.sliding_window}
    return entries | {"layer_types": kinds, "max_window_layers": args.n_layers if args.sliding_window is None else 0}


@contextmanager
def in_float64(family: str, args: TransformerArgs, length: int) -> Iterator[None]:
    """Inside, the model of transformers also normalises and rotates in float64, where it says float32 of itself.

    length: tokens of a sequence.
    """

    def normalise(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.variance_epsilon)

    name, module = THERE[family]
    frequencies = rope_frequencies(args.head_dim, args.rope_theta, args.rope_scaling)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), torch.cat((frequencies, frequencies)))
    magnitude = 1.0 if args.rope_scaling is None else args.rope_scaling.magnitude
    table = magnitude * angles.cos()[None], magnitude * angles.sin()[None]
    with (
        mock.patch.object(getattr(module, f"{name}RMSNorm"), "forward", normalise),
        mock.patch.object(getattr(module, f"{name}RotaryEmbedding"), "forward", return_value=table),
    ):
        yield
