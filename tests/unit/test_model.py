"""The Llama 3 decoder against its definition, written out here in the plainest way."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from longshard.sharding.random_bits import parameter_seed
from tests.unit.small_decoder import ARGS, build
from trainer.config.schema import Model
from trainer.families.decoder_args import LLAMA3 as FLAVORS
from trainer.families.layer_kinds import RopeScaling
from trainer.families.registry import MODELS
from trainer.models.decoder import Transformer
from trainer.models.rotary import (
    rope_frequencies,
)


def reference_logits(model: Transformer, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """One row at a time, one head at a time, rotation by complex numbers, softmax written out."""
    args, w = model.args, dict(model.named_parameters())
    group = args.n_heads // args.n_kv_heads
    angles = positions[:, None].double() * rope_frequencies(args.head_dim, args.rope_theta, args.rope_scaling)

    def rotate(x: torch.Tensor) -> torch.Tensor:  # (S, D)
        pairs = torch.view_as_complex(x.reshape(len(x), -1, 2)) * torch.polar(torch.ones_like(angles), angles)
        return torch.view_as_real(pairs).flatten(1)

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + args.norm_eps).sqrt() * weight

    rows = []
    for row in tokens:
        x = w["tok_embeddings.weight"][row]
        for i in range(args.n_layers):
            layer = f"layers.{i}."
            a = norm(x, w[layer + "attention_norm.weight"])
            q, k, v = (a @ w[f"{layer}attention.{name}.weight"].T for name in ("wq", "wk", "wv"))
            heads = []
            for h in range(args.n_heads):
                own_columns = slice(h * args.head_dim, (h + 1) * args.head_dim)
                shared = slice(h // group * args.head_dim, (h // group + 1) * args.head_dim)
                scores = rotate(q[:, own_columns]) @ rotate(k[:, shared]).T / math.sqrt(args.head_dim)
                scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf)
                heads.append(scores.softmax(-1) @ v[:, shared])
            x = x + torch.cat(heads, -1) @ w[layer + "attention.wo.weight"].T
            f = norm(x, w[layer + "ffn_norm.weight"])
            gate, up = (f @ w[f"{layer}feed_forward.{name}.weight"].T for name in ("w1", "w3"))
            x = x + (F.silu(gate) * up) @ w[layer + "feed_forward.w2.weight"].T
        rows.append(norm(x, w["norm.weight"]) @ w["output.weight"].T)
    return torch.stack(rows)


@pytest.mark.parametrize("scaling", [None, RopeScaling(8.0, original_max_seq_len=64)])
def test_logits_are_the_definition(scaling: RopeScaling | None):
    model = build(replace(ARGS, rope_scaling=scaling))
    tokens = torch.randint(50, (2, 16), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        model.output(model(tokens)), reference_logits(model, tokens, torch.arange(16)), rtol=1e-10, atol=1e-12
    )


def test_explicit_positions():
    model = build()
    tokens = torch.randint(50, (2, 16), generator=torch.Generator().manual_seed(0))
    counted = torch.arange(16).expand(2, -1)
    torch.testing.assert_close(model(tokens, counted), model(tokens), rtol=0, atol=0)
    mixed = torch.stack((torch.arange(16), torch.cat((torch.arange(6), torch.arange(10)))))
    logits = model.output(model(tokens, mixed))
    for row in range(2):
        wanted = reference_logits(model, tokens[row : row + 1], mixed[row])
        torch.testing.assert_close(logits[row : row + 1], wanted, rtol=1e-10, atol=1e-12)
    assert (logits[1] - model.output(model(tokens))[1]).norm() > 1e-3


def test_causality():
    """A token changes nothing before it, and something after it."""
    model = build()
    tokens = torch.randint(50, (1, 16), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 50
    difference = (model(changed) - model(tokens)).abs().sum(-1)[0]
    assert (difference[:7] == 0).all()
    assert (difference[7:] > 0).all()


@pytest.mark.parametrize("norm_type", ["rmsnorm", "layernorm", "np_layernorm"])
def test_norms_have_the_parameters_they_should(norm_type: str):
    args = replace(ARGS, norm_type=norm_type)
    model = build(args)
    names = [name for name, _ in model.named_parameters() if "norm" in name]
    assert len(names) == (0 if norm_type == "np_layernorm" else 2 * args.n_layers + 1)
    assert sum(p.numel() for p in model.parameters()) == args.n_params()


@pytest.mark.parametrize("flavor", FLAVORS)
def test_flavors_have_the_published_size(flavor: str):
    published = {
        "7B": 6.74e9,
        "1B": 1.24e9,
        "3B": 3.21e9,
        "8B": 8.03e9,
        "70B": 70.6e9,
        "405B": 405.9e9,
        "debugmodel": 4.6e6,
    }
    args = FLAVORS[flavor] if flavor != "debugmodel" else replace(FLAVORS[flavor], vocab_size=4352)
    with torch.device("meta"):
        model = Transformer(args)
    assert sum(p.numel() for p in model.parameters()) == args.n_params()
    assert args.n_params() == pytest.approx(published[flavor], rel=0.005)


def test_flops_per_token_of_the_8b():
    """6 per weight of a product (8.03e9 less the 0.525e9 of the look-up) + 12 * 32 layers * 4096 * 8192."""
    full, causal = FLAVORS["8B"].flops_per_token(8192)
    assert full == pytest.approx(6 * 7.504e9 + 12 * 32 * 4096 * 8192, rel=1e-3)
    assert full - causal == pytest.approx(12 * 32 * 4096 * 8191 / 2)


def test_tied_embeddings_are_one_parameter():
    model = build(replace(ARGS, tie_embeddings=True))
    assert model.output.weight is model.tok_embeddings.weight
    assert "output.weight" not in dict(model.named_parameters())
    hidden = model(torch.zeros(1, 4, dtype=torch.int64))
    model.output(hidden).sum().backward()
    assert model.tok_embeddings.weight.grad is not None


def test_initial_weights_depend_on_seed_and_name_only():
    one, same, other = build(), build(), build(seed=1)
    weights = dict(one.named_parameters())
    for name, weight in same.named_parameters():
        assert torch.equal(weight, weights[name])
    assert not torch.equal(one.output.weight, other.output.weight)
    q0, q1 = (one.layers[i].attention.wq.weight for i in ("0", "1"))
    assert not torch.equal(q0, q1)
    assert not torch.equal(q0[0], q0[1])
    assert len({parameter_seed(0, name) for name in weights}) == len(weights)


def test_initial_loss_is_that_of_a_guess():
    model = build(replace(FLAVORS["debugmodel"], vocab_size=4352, max_seq_len=64), torch.float32)
    tokens = torch.randint(4352, (2, 64), generator=torch.Generator().manual_seed(0))
    logits = model.output(model(tokens))
    assert F.cross_entropy(logits.flatten(0, 1), tokens.flatten()).item() == pytest.approx(math.log(4352), abs=0.1)


PUBLISHED = {
    ("qwen3", "0.6B"): 596_049_920,
    ("qwen3", "1.7B"): 1_720_574_976,
    ("qwen3", "4B"): 4_022_468_096,
    ("qwen3", "8B"): 8_190_735_360,
    ("qwen3", "14B"): 14_768_307_200,
    ("qwen3", "32B"): 32_762_123_264,
    ("qwen2", "0.5B"): 494_032_768,
    ("qwen2", "1.5B"): 1_543_714_304,
    ("qwen2", "7B"): 7_615_616_512,
    ("mistral", "7B"): 7_241_732_096,
}


@pytest.mark.parametrize(("family", "flavor"), PUBLISHED)
def test_flavors_have_the_published_number_of_parameters(family: str, flavor: str) -> None:
    args = MODELS[family].flavors[flavor]
    with torch.device("meta"):
        model = Transformer(replace(args, max_seq_len=8))
    assert args.n_params() == sum(p.numel() for p in model.parameters()) == PUBLISHED[family, flavor]


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "mistral"])
def test_norms_and_biases_of_heads_start_as_nothing(family: str) -> None:
    model = build(replace(MODELS[family].flavors["debugmodel"], vocab_size=50, max_seq_len=16))
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            assert (parameter == (0.0 if name.endswith("bias") else 1.0)).all()


def test_a_window_of_the_flavor_holds_until_a_key_sets_another() -> None:
    args = MODELS["mistral"].flavors["debugmodel"]
    for settings, windows in ((Model(), [128, 128]), (Model(sliding_window=9, sliding_window_every=2), [9, None])):
        configured = args.configured(settings, vocab_size=1, max_seq_len=64)
        assert [configured.window_of_layer(layer) for layer in range(2)] == windows
