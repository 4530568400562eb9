"""Models of transformers that compute wholly in float64, and small arguments of each family."""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.hf_combinations import COMBINATIONS
from tests.hf_shapes import EXPERTS as _EXPERTS
from tests.hf_shapes import LATENT as _LATENT
from tests.hf_shapes import LLAMA
from tests.hf_shapes import SIGMOID as _SIGMOID
from tests.hf_shapes import WINDOWS as _WINDOWS
from tests.hf_shapes import YARN as _YARN
from tests.hf_shapes import YARN_V3 as _YARN_V3
from trainer.families.decoder_args import TransformerArgs
from trainer.families.feed_forward_args import ExpertArgs
from trainer.families.layer_kinds import LayerKind, RopeScaling
from trainer.families.linear_args import GatedDeltaArgs, KimiDeltaArgs, MambaArgs
from trainer.families.mixers import GlobalHeads, LatentArgs
from trainer.families.registry import hf_config

_OLMO = replace(LLAMA, norm_place="after", qk_norm=True, qk_norm_of_all_heads=True)
_GEMMA = replace(
    LLAMA,
    tie_embeddings=True,
    head_size=16,
    norm_place="around",
    norm_offset=True,
    activation="gelu_tanh",
    embedding_scale=32**0.5,
    attention_scale=24**-0.5,
    logits_softcap=3.0,
    sliding_window=5,
)
_LONGROPE = RopeScaling(
    4.0, original_max_seq_len=16, kind="longrope", short_factors=(1.0, 1.1, 1.3), long_factors=(1.5, 2.0, 5.0)
)
_PROPORTIONAL = RopeScaling(1.0, kind="proportional", share=0.25)
_LOCAL = LayerKind(rope_theta=10000.0)
_GEMMA4 = replace(
    LLAMA,
    n_layers=4,
    n_kv_heads=4,
    tie_embeddings=True,
    head_size=12,
    global_heads=GlobalHeads(16, 2, keys_are_values=True),
    norm_place="around",
    activation="gelu_tanh",
    embedding_scale=32**0.5,
    attention_scale=1.0,
    logits_softcap=3.0,
    qk_norm=True,
    value_norm=True,
    layer_scalar=True,
    rope_theta=1e6,
    rope_scaling=_PROPORTIONAL,
    sliding_window=5,
    layers=(_LOCAL, LayerKind(window=False, global_heads=True)),
)
_SHARING = [replace(kind, shares_keys=True, ffn_factor=2) for kind in (_LOCAL, _GEMMA4.layers[1])]
GEMMA4_SHARED = replace(
    _GEMMA4,
    n_layers=6,
    global_heads=GlobalHeads(16, 2),
    per_layer_dim=6,
    layers=(_LOCAL, _GEMMA4.layers[1], _LOCAL, _SHARING[1], _SHARING[0], _SHARING[1]),
)
GEMMA4_EXPERTS = replace(
    _GEMMA4,
    experts=ExpertArgs(6, 2, 24, shared_dim=48, activation="gelu_tanh", beside_dense=True),
)
MODELS: dict[str, tuple[str, TransformerArgs]] = {
    "qwen3, windows from a layer on": ("qwen3", replace(LLAMA, qk_norm=True, sliding_window=5, layers=_WINDOWS)),
    "qwen3_moe, dense layers, a window": (
        "qwen3_moe",
        replace(
            _EXPERTS,
            qk_norm=True,
            sliding_window=5,
            attention_bias=True,
            output_bias=True,
            ffn_hidden_dim=40,
            layers=(LayerKind(), LayerKind(experts=False)),
        ),
    ),
    "olmo2": ("olmo2", _OLMO),
    "olmo2, biases": ("olmo2", replace(_OLMO, attention_bias=True, output_bias=True, n_kv_heads=4)),
    "olmo3": (
        "olmo3",
        replace(
            _OLMO,
            n_layers=4,
            rope_scaling=_YARN,
            sliding_window=5,
            layers=(*(LayerKind(rope_theta=10000.0),) * 3, LayerKind(window=False)),
        ),
    ),
    "olmo3, no scaling": (
        "olmo3",
        replace(_OLMO, n_layers=4, sliding_window=5, layers=(*(LayerKind(),) * 3, LayerKind(window=False))),
    ),
    "smollm3": (
        "smollm3",
        replace(LLAMA, tie_embeddings=True, n_layers=4, layers=(*(LayerKind(),) * 3, LayerKind(rope=False))),
    ),
    "smollm3, windows": (
        "smollm3",
        replace(LLAMA, sliding_window=5, layers=(LayerKind(window=False), LayerKind(rope=False), LayerKind())),
    ),
    "granite": (
        "granite",
        replace(
            LLAMA,
            tie_embeddings=True,
            embedding_scale=12.0,
            residual_scale=0.22,
            logits_divisor=8.0,
            attention_scale=0.0625,
        ),
    ),
    "phi3": ("phi3", LLAMA),
    "phi3, a window, heads rotated in part": ("phi3", replace(LLAMA, sliding_window=5, rope_share=0.75)),
    "phi3, LongRoPE": ("phi3", replace(LLAMA, rope_share=0.75, rope_scaling=_LONGROPE)),
    "phi3, LongRoPE, a factor of attention": (
        "phi3",
        replace(LLAMA, rope_share=0.75, rope_scaling=replace(_LONGROPE, attention_factor=1.3)),
    ),
    "gemma2": (
        "gemma2",
        replace(_GEMMA, attention_softcap=2.0, layers=(LayerKind(), LayerKind(window=False))),
    ),
    "gemma3": (
        "gemma3",
        replace(
            _GEMMA,
            qk_norm=True,
            rope_theta=1e6,
            rope_scaling=RopeScaling(8.0, kind="linear"),
            logits_softcap=None,
            attention_scale=None,
            layers=(LayerKind(rope_theta=10000.0), LayerKind(rope_theta=10000.0), LayerKind(window=False)),
        ),
    ),
    "gemma4": ("gemma4", _GEMMA4),
    "gemma4-shared": ("gemma4", GEMMA4_SHARED),
    "gemma4-experts": ("gemma4", GEMMA4_EXPERTS),
    "gemma4-biased": (
        "gemma4",
        replace(
            _GEMMA4,
            n_layers=2,
            attention_bias=True,
            output_bias=True,
            sliding_window=None,
            layers=(LayerKind(global_heads=True),),
            global_heads=GlobalHeads(24, 2),
            rope_scaling=replace(_PROPORTIONAL, factor=2.0, share=0.5),
            logits_softcap=None,
        ),
    ),
    "mixtral": ("mixtral", _EXPERTS),
    "olmoe": (
        "olmoe",
        replace(_EXPERTS, qk_norm=True, qk_norm_of_all_heads=True, experts=replace(_EXPERTS.experts, normalise=False)),
    ),
    "qwen2_moe": (
        "qwen2_moe",
        replace(
            _EXPERTS,
            attention_bias=True,
            ffn_hidden_dim=40,
            experts=replace(_EXPERTS.experts, shared_dim=20, shared_gate=True, normalise=False),
            layers=(LayerKind(), LayerKind(experts=False)),
        ),
    ),
    "glm4_moe": (
        "glm4_moe",
        replace(
            _EXPERTS,
            head_size=16,
            rope_share=0.5,
            ffn_hidden_dim=40,
            attention_bias=True,
            qk_norm=True,
            experts=replace(_SIGMOID, groups=3, groups_per_token=2, scale=2.5, shared_dim=48),
            layers=(LayerKind(experts=False), LayerKind(), LayerKind()),
        ),
    ),
    "glm4_moe-plain": (
        "glm4_moe",
        replace(_EXPERTS, head_size=16, rope_scaling=_YARN, rope_share=0.5, experts=replace(_SIGMOID, shared_dim=24)),
    ),
    "qwen3_next": (
        "qwen3_next",
        replace(
            _EXPERTS,
            n_layers=4,
            head_size=16,
            rope_share=0.5,
            ffn_hidden_dim=40,
            qk_norm=True,
            norm_offset=True,
            attention_gate=True,
            linear=GatedDeltaArgs(2, 4, 8, 6),
            experts=replace(_EXPERTS.experts, shared_dim=20, shared_gate=True),
            layers=(LayerKind(linear=True), LayerKind(linear=True, experts=False), LayerKind()),
        ),
    ),
    "qwen3_5": (
        "qwen3_5",
        replace(
            LLAMA,
            n_layers=4,
            head_size=16,
            rope_share=0.5,
            qk_norm=True,
            norm_offset=True,
            attention_gate=True,
            tie_embeddings=True,
            linear=GatedDeltaArgs(2, 4, 8, 6, by_head=False),
            layers=(LayerKind(linear=True), LayerKind(linear=True), LayerKind()),
        ),
    ),
    "qwen3_5_moe": (
        "qwen3_5_moe",
        replace(
            _EXPERTS,
            n_layers=4,
            head_size=16,
            rope_share=0.25,
            qk_norm=True,
            norm_offset=True,
            attention_gate=True,
            linear=GatedDeltaArgs(2, 2, 6, 8, kernel=3, by_head=False),
            experts=replace(_EXPERTS.experts, shared_dim=20, shared_gate=True),
            layers=(LayerKind(linear=True), LayerKind()),
        ),
    ),
    "deepseek_v3": (
        "deepseek_v3",
        replace(
            _LATENT,
            ffn_hidden_dim=40,
            rope_scaling=_YARN_V3,
            experts=replace(_SIGMOID, groups=3, groups_per_token=2, scale=2.5, shared_dim=24),
            layers=(LayerKind(experts=False), LayerKind(), LayerKind()),
        ),
    ),
    "deepseek_v3, whole queries": (
        "deepseek_v3",
        replace(_LATENT, latent=LatentArgs(12, 8, 4, 12), experts=replace(_SIGMOID, shared_dim=24)),
    ),
    "kimi_linear": (
        "kimi_linear",
        replace(
            _LATENT,
            n_layers=4,
            latent=LatentArgs(10, 6, 4, 8),
            linear=KimiDeltaArgs(4, 6),
            ffn_hidden_dim=40,
            experts=replace(_SIGMOID, shared_dim=24),
            layers=(
                LayerKind(linear=True, rope=False, experts=False),
                LayerKind(linear=True, rope=False),
                LayerKind(rope=False),
                LayerKind(linear=True, rope=False),
            ),
        ),
    ),
    "granitemoehybrid": (
        "granitemoehybrid",
        replace(
            _EXPERTS,
            n_layers=4,
            tie_embeddings=True,
            embedding_scale=12.0,
            residual_scale=0.22,
            logits_divisor=8.0,
            attention_scale=0.0625,
            linear=MambaArgs(8, 8, 6),
            experts=replace(_EXPERTS.experts, shared_dim=20),
            layers=(LayerKind(linear=True, rope=False), LayerKind(rope=False)),
        ),
    ),
    "granitemoehybrid, dense, groups": (
        "granitemoehybrid",
        replace(
            LLAMA,
            attention_scale=0.25,
            linear=MambaArgs(4, 16, 6, groups=2, convolution_bias=False),
            layers=(LayerKind(linear=True), LayerKind()),
        ),
    ),
    "minimax_m2": (
        "minimax_m2",
        replace(_EXPERTS, head_size=16, rope_share=0.5, qk_norm=True, qk_norm_of_all_heads=True, experts=_SIGMOID),
    ),
}
MODELS |= COMBINATIONS


@contextmanager
def in_double() -> Iterator[None]:
    """Inside, transformers builds and computes in float64, also where it says float32 of itself."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    names = {"float32": torch.float64, "float": torch.float64}
    try:
        with ExitStack() as patches:
            for name, dtype in names.items():
                patches.enter_context(mock.patch.object(torch, name, dtype))
            patches.enter_context(mock.patch.object(torch.Tensor, "float", torch.Tensor.double))
            yield
    finally:
        torch.set_default_dtype(before)


def hf_decoder(family: str, args: TransformerArgs) -> nn.Module:
    """A random model of the same shape, in float64; norms, biases, sinks and biases for the choice are random, too.

    Call it, and the model, inside `in_double`.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    config = transformers.AutoConfig.for_model(**hf_config(family).write(args), pad_token_id=0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").double()
    if args.experts is not None:
        model.set_experts_implementation("eager")  # the other ones know no float64
    generator = torch.Generator().manual_seed(1)
    tensors = [
        *model.named_parameters(),
        *((n, x) for n, x in model.named_buffers() if "correction" in n or "scalar" in n),
    ]
    for name, x in tensors:
        one = 1.0 if "scalar" in name or name.endswith("scale") or ("norm" in name and not args.norm_offset) else 0.0
        nn.init.normal_(x, one, 0.5 if x.ndim == 1 else 0.2, generator=generator)
    if family == "kimi_linear":
        model.save_pretrained = partial(_save_as_published, model.save_pretrained)
    return model.eval()


_DENSE = re.compile(r"\.block_sparse_moe\.(gate|up|down)_proj\.")


def _save_as_published(save: Callable[..., None], folder: Path, **settings: Any) -> None:
    """Save, with dense layers under their published names: transformers 5.23 gives them the names of experts."""
    save(folder, **settings)
    for file in folder.glob("*.safetensors"):
        tensors = {_DENSE.sub(r".mlp.\1_proj.", name): x for name, x in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})
    for index in folder.glob("*.index.json"):
        index.write_text(_DENSE.sub(r".mlp.\1_proj.", index.read_text()))
