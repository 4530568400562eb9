"""Law: a family's tensors become Hugging Face's and come back bit for bit, and compute the same there and here."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from examples.toy_family import spec as toy
from examples.toy_family.args import FLAVORS
from lct_inference.generation_cache import GenerationCache
from tests.hf_decoders import EVERY_SECOND, hf_model, in_float64
from tests.hf_tensors import from_hf, to_hf
from trainer.config.errors import ConfigError
from trainer.families.decoder_args import TransformerArgs
from trainer.families.layer_kinds import RopeScaling
from trainer.families.registry import hf_config
from trainer.models.initialization import initialize
from trainer.models.model_spec import ModelSpec, model_spec
from trainer.models.rotary import rope_frequencies

LLAMA = TransformerArgs(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_hidden_dim=48, vocab_size=50, max_seq_len=16)
TOY = replace(FLAVORS["toy"], vocab_size=32, max_seq_len=8)
SCALING = RopeScaling(8.0, original_max_seq_len=8)
ONE_RANK = SimpleNamespace(size=lambda: 1, get_local_rank=lambda: 0)  # a mesh, outside of a process group


def build(spec: ModelSpec, args: object) -> nn.Module:
    with torch.device("meta"):
        model = spec.build(args).to(torch.float64)
    initialize(model, seed=0, device=torch.device("cpu"))
    return model


YARN = RopeScaling(4.0, kind="yarn", original_max_seq_len=64)
QWEN3 = replace(LLAMA, qk_norm=True, head_size=16, rope_theta=1e6)
QWEN2 = replace(LLAMA, attention_bias=True, tie_embeddings=True)
SHAPES = {
    "grouped heads": ("llama3", LLAMA),
    "as many key/value heads": ("llama3", replace(LLAMA, n_kv_heads=4)),
    "one key/value head, tied, scaled": (
        "llama3",
        replace(LLAMA, n_kv_heads=1, tie_embeddings=True, rope_scaling=SCALING),
    ),
    "heads of their own size, biases": ("llama3", replace(LLAMA, head_size=6, attention_bias=True, output_bias=True)),
    "linear": ("llama3", replace(LLAMA, rope_scaling=RopeScaling(4.0, kind="linear"))),
    "yarn": ("llama3", replace(LLAMA, head_size=16, rope_scaling=YARN)),
    "yarn as of gpt-oss": ("qwen3", replace(QWEN3, rope_scaling=replace(YARN, truncate=False, beta_fast=8.0))),
    "yarn with its own factor": ("qwen2", replace(QWEN2, rope_scaling=replace(YARN, attention_factor=0.7))),
    "qwen3": ("qwen3", QWEN3),
    "qwen3, tied, biases": ("qwen3", replace(QWEN3, tie_embeddings=True, attention_bias=True, output_bias=True)),
    "qwen3, windows": ("qwen3", replace(QWEN3, sliding_window=5, layers=EVERY_SECOND)),
    "qwen2": ("qwen2", QWEN2),
    "qwen2, a window": ("qwen2", replace(QWEN2, sliding_window=5)),
    "mistral": ("mistral", replace(LLAMA, sliding_window=5)),
    "mistral, no window": ("mistral", replace(LLAMA, head_size=16)),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_model_of_transformers_computes_the_same_here_and_goes_back_bit_for_bit(shape: str) -> None:
    family, args = SHAPES[shape]
    spec = model_spec(family)
    theirs, ours = hf_model(family, args), build(spec, args)
    weights = dict(theirs.named_parameters())
    missing, surplus = ours.load_state_dict(from_hf(spec, args, weights), strict=False)
    assert (missing, surplus) == (["output.weight"] if args.tie_embeddings else [], [])
    tokens = torch.randint(args.vocab_size, (2, 16), generator=torch.Generator().manual_seed(2))
    # Its frequencies are computed in float32 for any data type. Ours are near them, and both models take ours.
    frequencies = rope_frequencies(args.head_dim, args.rope_theta, args.rope_scaling)
    torch.testing.assert_close(theirs.model.rotary_emb.inv_freq, frequencies, rtol=1e-6, atol=0)
    magnitude = 1.0 if args.rope_scaling is None else args.rope_scaling.magnitude
    assert theirs.model.rotary_emb.attention_scaling == pytest.approx(magnitude, rel=1e-12)
    with torch.no_grad(), in_float64(family, args, 16):
        wanted, got = theirs(tokens).logits, computed(ours, tokens)
    assert ((got - wanted).norm() / wanted.norm()).item() < 1e-10
    back = to_hf(spec, args, ours.named_parameters())
    assert back.keys() == weights.keys()
    assert [name for name, x in weights.items() if not torch.equal(back[name], x)] == []


def computed(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Logits by the cache of generation, which also has windows on one rank without a plan."""
    cache = GenerationCache(torch.zeros(len(tokens), dtype=torch.int64), tokens.shape[1], cp=ONE_RANK, tp=ONE_RANK)
    return model.output(cache.run(model, tokens))


@pytest.mark.parametrize("name", ["attention.q_norm", "attention.wk"])
def test_the_test_sees_rows_of_a_rotary_pair_in_their_order(name: str) -> None:
    """Without the change of order, logits differ, for the norms of queries and keys too."""
    spec, theirs = model_spec("qwen3"), hf_model("qwen3", QWEN3)
    ours = build(spec, QWEN3)
    ours.load_state_dict(from_hf(spec, QWEN3, dict(theirs.named_parameters())))
    hf = spec.state_dict_adapter(QWEN3, f"layers.0.{name}.weight").name
    with torch.no_grad(), in_float64("qwen3", QWEN3, 16):
        ours.get_parameter(f"layers.0.{name}.weight").copy_(theirs.get_parameter(hf))
        tokens = torch.arange(16)[None]
        wanted, got = theirs(tokens).logits, computed(ours, tokens)
    assert ((got - wanted).norm() / wanted.norm()).item() > 1e-3


@pytest.mark.parametrize(
    "change", [{"truncate": False}, {"beta_fast": 2.0}, {"beta_slow": 0.1}, {"original_max_seq_len": 32}]
)
def test_what_yarn_is_given_changes_its_frequencies(change: dict) -> None:
    one, other = (rope_frequencies(16, 1e4, scaling) for scaling in (YARN, replace(YARN, **change)))
    assert not torch.allclose(one, other, rtol=1e-4)


def test_a_family_brings_its_own_names_and_layouts() -> None:
    """Buffers that are part of a checkpoint too; shapes may differ."""
    model = build(toy.SPEC, TOY)
    state = model.state_dict()
    there = to_hf(toy.SPEC, TOY, state.items())
    wq = "layers.0.attention.wq.weight"
    assert torch.equal(there[f"toy.{wq}"], state[wq].t())
    assert there[f"toy.{wq}"].shape != state[wq].shape
    assert "toy.layers.1.bias" in there
    back = from_hf(toy.SPEC, TOY, there)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], x) for name, x in state.items())


@pytest.mark.parametrize(
    "args", [{"norm_type": "layernorm"}, {"sliding_window": 4}, {"attention_sinks": True}, {"short_conv_kernel": 4}]
)
def test_what_their_llama_cannot_compute_is_refused(args: dict) -> None:
    with pytest.raises(ConfigError, match=f"LlamaForCausalLM of .* leave out model.{next(iter(args))}"):
        hf_config("llama3").check_start(replace(LLAMA, **args))


def test_a_family_without_a_counterpart_says_so() -> None:
    with pytest.raises(ConfigError, match="this family has no counterpart"):
        from_hf(replace(toy.SPEC, state_dict_adapter=None), TOY, {})
