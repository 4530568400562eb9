"""Laws of the records of layers: what a record says of its sizes is what its module has."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from trainer.families.decoder_args import TransformerArgs
from trainer.families.feed_forward_args import DenseArgs, ExpertArgs
from trainer.families.layers import Layer, NormArgs
from trainer.families.mixers import AttentionArgs, LatentArgs, LatentAttentionArgs, visible_keys
from trainer.families.registry import MODELS
from trainer.models.block import MIXERS
from trainer.models.decoder import Transformer

pytestmark = pytest.mark.about("trainer/families/args.py", "trainer/families/layers.py", "trainer/families/mixers.py")
FAMILIES = [name for name, family in MODELS.items() if isinstance(family.flavors.get("debugmodel"), TransformerArgs)]


def built(args: TransformerArgs) -> Transformer:
    with torch.device("meta"):
        return Transformer(args)


@pytest.mark.parametrize("mtp_layers", [0, 2])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_record_counts_the_parameters_of_its_block(name: str, mtp_layers: int) -> None:
    args = replace(MODELS[name].flavors["debugmodel"], vocab_size=96, mtp_layers=mtp_layers)
    model = built(args)
    for number, block in model.layers.items():
        layer = args.layer(int(number))
        assert layer.predicts_further == (int(number) >= args.n_layers)
        assert isinstance(block.attention, MIXERS[type(layer.mixer)])
        assert layer.parameters(args.dim) == sum(p.numel() for p in block.parameters()), number
    assert args.n_params() == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", FAMILIES)
def test_a_record_has_the_shapes_of_its_linear_modules(name: str) -> None:
    args = replace(MODELS[name].flavors["debugmodel"], vocab_size=96)
    modules = built(args).named_modules()
    shapes = {name: tuple(x.weight.shape) for name, x in modules if isinstance(x, nn.Linear)}
    assert args.linear_shapes() == shapes


def test_a_gate_is_a_second_row_for_each_channel_of_queries() -> None:
    plain, gated = (AttentionArgs(4, 2, 8, gate=gate, bias=True) for gate in (False, True))
    assert plain.linear_shapes(32)["wq"] == (32, 32)
    assert gated.linear_shapes(32)["wq"] == (64, 32)
    assert gated.vectors(32) - plain.vectors(32) == 32


def test_flops_count_the_keys_that_a_query_sees() -> None:
    assert visible_keys(None, 5) == sum(range(1, 6)) / 5
    assert visible_keys(2, 5) == (1 + 4 * 2) / 5
    assert visible_keys(9, 5) == visible_keys(None, 5)
    attention = AttentionArgs(4, 2, 8, window=2)
    latent = LatentAttentionArgs(4, LatentArgs(16, 6, 2, 4), scale=1.0, window=2)
    assert attention.flops(5) == (12 * 4 * 8 * 5, 12 * 4 * 8 * visible_keys(2, 5))
    assert latent.flops(5) == (6 * 4 * (8 + 4) * 5, 6 * 4 * (8 + 4) * visible_keys(2, 5))


def test_a_token_meets_the_experts_that_it_chooses() -> None:
    """The weights of the router count for every token."""
    mixer, experts = AttentionArgs(4, 4, 8), ExpertArgs(number=8, per_token=2, hidden_dim=16)
    sparse, dense = (Layer(mixer, x, NormArgs()) for x in (experts, DenseArgs(2 * 16)))
    router = 8 * 32
    assert sparse.flops(32, 1)[0] == dense.flops(32, 1)[0] + 6 * router
    assert sparse.parameters(32) == dense.parameters(32) + router + 6 * 3 * 32 * 16


def test_norms_around_a_branch_are_two() -> None:
    mixer, dense = AttentionArgs(4, 4, 8), DenseArgs(16)
    sizes = [Layer(mixer, dense, NormArgs(place=place)).parameters(32) for place in ("before", "after", "around")]
    assert sizes[0] == sizes[1] == sizes[2] - 2 * 32
    assert Layer(mixer, dense, NormArgs("np_layernorm")).parameters(32) == sizes[0] - 2 * 32
