"""Law: a family's tensors become Hugging Face's and come back bit for bit, and compute the same there and here."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.hf_llama import hf_llama, in_float64
from tests.toy_family import spec as toy
from tests.toy_family.args import FLAVORS
from trainer.config.errors import ConfigError
from trainer.models.common.decoder_args import TransformerArgs
from trainer.models.common.rotary import rope_frequencies
from trainer.models.common.shapes import RopeScaling
from trainer.models.initialization import initialize
from trainer.models.llama3 import spec as llama3
from trainer.models.model_spec import ModelSpec
from trainer.models.state_dict import from_hf, to_hf

LLAMA = TransformerArgs(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_hidden_dim=48, vocab_size=50, max_seq_len=16)
TOY = replace(FLAVORS["toy"], vocab_size=32, max_seq_len=8)
SCALING = RopeScaling(8.0, original_max_seq_len=8)


def build(spec: ModelSpec, args: object) -> nn.Module:
    with torch.device("meta"):
        model = spec.build(args).to(torch.float64)
    initialize(model, seed=0, device=torch.device("cpu"))
    return model


SHAPES = {
    "grouped heads": LLAMA,
    "as many key/value heads": replace(LLAMA, n_kv_heads=4),
    "one key/value head, tied, scaled": replace(LLAMA, n_kv_heads=1, tie_embeddings=True, rope_scaling=SCALING),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_llama_of_transformers_computes_the_same_here_and_goes_back_bit_for_bit(shape: str) -> None:
    args = SHAPES[shape]
    theirs, ours = hf_llama(args), build(llama3.SPEC, args)
    given = dict(theirs.named_parameters())
    missing, surplus = ours.load_state_dict(dict(from_hf(llama3.SPEC, args, given.items())), strict=False)
    assert (missing, surplus) == (["output.weight"] if args.tie_embeddings else [], [])
    tokens = torch.randint(args.vocab_size, (2, 16), generator=torch.Generator().manual_seed(2))
    # Its frequencies are those of float32 in any data type: ours are near them, and both models take them.
    frequencies = theirs.model.rotary_emb.inv_freq
    ours_of_float64 = rope_frequencies(args.head_dim, args.rope_theta, args.rope_scaling)
    torch.testing.assert_close(frequencies, ours_of_float64, rtol=1e-6, atol=0)
    angles = torch.outer(torch.arange(16, dtype=torch.float64), frequencies)
    ours.freqs_cis = torch.stack((angles.cos(), angles.sin()), -1)
    with torch.no_grad(), in_float64(torch.cat((angles, angles), -1)):
        wanted, got = theirs(tokens).logits, ours.output(ours(tokens))
    assert ((got - wanted).norm() / wanted.norm()).item() < 1e-10
    back = dict(to_hf(llama3.SPEC, args, ours.named_parameters()))
    assert back.keys() == given.keys()
    assert [name for name, x in given.items() if not torch.equal(back[name], x)] == []


def test_a_family_brings_its_own_names_and_layouts() -> None:
    """Buffers that are part of a checkpoint too; shapes may differ."""
    model = build(toy.SPEC, TOY)
    state = model.state_dict()
    there = dict(to_hf(toy.SPEC, TOY, state.items()))
    wq = "layers.0.attention.wq.weight"
    assert torch.equal(there[f"toy.{wq}"], state[wq].t())
    assert there[f"toy.{wq}"].shape != state[wq].shape
    assert "toy.layers.1.bias" in there
    back = dict(from_hf(toy.SPEC, TOY, reversed(there.items())))  # in any order
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], x) for name, x in state.items())


def test_tensors_are_converted_one_by_one() -> None:
    """What comes next is not asked for before the last one is taken: a checkpoint can be streamed."""
    model, asked = build(llama3.SPEC, LLAMA), []
    tensors = (asked.append(name) or (name, x) for name, x in model.named_parameters())
    converted = to_hf(llama3.SPEC, LLAMA, tensors)
    assert asked == []
    assert next(converted)[0] == "model.embed_tokens.weight"
    assert asked == ["tok_embeddings.weight"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.pop("model.norm.weight"), "1 tensors of this model are missing, the first of them model.norm"),
        (
            lambda x: x.update({"model.norm.wait": x["model.norm.weight"]}),
            "model.norm.wait is no tensor of this model, or came twice",
        ),
        (
            lambda x: x.update({"model.layers.1.mlp.up_proj.weight": torch.zeros(47, 32)}),
            "model.layers.1.mlp.up_proj.weight has the shape (47, 32), and this model's has (48, 32)",
        ),
    ],
)
def test_a_surplus_missing_or_misshapen_tensor_is_named(change, message: str) -> None:
    there = dict(to_hf(llama3.SPEC, LLAMA, build(llama3.SPEC, LLAMA).named_parameters()))
    change(there)
    with pytest.raises(ConfigError) as error:
        dict(from_hf(llama3.SPEC, LLAMA, there.items()))
    assert message in str(error.value)


def test_ours_are_checked_alike() -> None:
    ours = dict(build(llama3.SPEC, LLAMA).named_parameters())
    wq = "layers.0.attention.wq.weight"
    for tensors, message in (
        ([(wq, ours[wq]), (wq, ours[wq])], f"{wq} is no tensor of this model, or came twice"),
        ([(wq, ours[wq][:-1])], f"{wq} has the shape (31, 32)"),
        ([(wq, ours[wq])], "20 tensors of this model are missing, the first of them tok_embeddings.weight"),
    ):
        with pytest.raises(ConfigError) as error:
            dict(to_hf(llama3.SPEC, LLAMA, tensors))
        assert message in str(error.value)


@pytest.mark.parametrize(
    "args", [{"norm_type": "layernorm"}, {"sliding_window": 4}, {"attention_sinks": True}, {"short_conv_kernel": 4}]
)
def test_what_their_llama_cannot_compute_is_refused(args: dict) -> None:
    with pytest.raises(ConfigError, match=f"LlamaForCausalLM of .* leave out model.{next(iter(args))}"):
        to_hf(llama3.SPEC, replace(LLAMA, **args), [])


def test_a_family_without_a_counterpart_says_so() -> None:
    with pytest.raises(ConfigError, match="'toy' has no counterpart"):
        from_hf(replace(toy.SPEC, state_dict_adapter=None), TOY, [])
