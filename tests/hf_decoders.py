"""Decoders of transformers: a random model of the same shape as one of ours, its folder, its arithmetic in float64."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
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

from trainer.families.decoder_args import TransformerArgs
from trainer.families.layer_kinds import LayerKind, RopeScaling
from trainer.models.rotary import rope_frequencies

EVERY_SECOND = (LayerKind(), LayerKind(window=False))
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


# ---- folders

# The shipped tokenizer has 4,352 tokens, which the program asks the model to have room for.
LLAMA = TransformerArgs(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_hidden_dim=48, vocab_size=4354, max_seq_len=64)
SHAPES = {
    "grouped heads": LLAMA,
    "as many key/value heads": replace(LLAMA, n_kv_heads=4, norm_eps=1e-6, rope_theta=10000.0),
    "tied, scaled": replace(
        LLAMA, n_kv_heads=1, tie_embeddings=True, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8), max_seq_len=64
    ),
}

QWEN3, QWEN2 = replace(LLAMA, qk_norm=True, head_size=128), replace(LLAMA, attention_bias=True, tie_embeddings=True)
YARN = RopeScaling(4.0, kind="yarn", original_max_seq_len=16)
CONFIGS = {("llama3", shape): args for shape, args in SHAPES.items()} | {
    ("llama3", "heads of their own size, biases"): replace(LLAMA, head_size=6, attention_bias=True, output_bias=True),
    ("llama3", "linear"): replace(LLAMA, rope_scaling=RopeScaling(4.0, kind="linear")),
    ("qwen3", "plain"): QWEN3,
    ("qwen3", "biases, yarn"): replace(QWEN3, attention_bias=True, output_bias=True, rope_scaling=YARN),
    ("qwen3", "windows"): replace(QWEN3, head_size=16, sliding_window=5, layers=EVERY_SECOND),
    ("qwen2", "plain"): QWEN2,
    ("qwen2", "a window, yarn"): replace(
        QWEN2, sliding_window=5, rope_scaling=replace(YARN, beta_fast=16.0, attention_factor=1.5)
    ),
    ("mistral", "a window"): replace(LLAMA, sliding_window=5),
    ("mistral", "none"): replace(LLAMA, head_size=16),
}


def saved(
    folder: Path,
    args: TransformerArgs,
    dtype: torch.dtype = torch.float32,
    *,
    shard: str = "20KB",
    family: str = "llama3",
) -> Path:
    """A random model of transformers, saved by itself, in several files."""
    hf_model(family, args).to(dtype).save_pretrained(folder, max_shard_size=shard)
    return folder


def changed(folder: Path, **entries: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))
