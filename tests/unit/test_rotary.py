"""Laws of rotary positions: exact angles, both ways to rotate, scaled frequencies."""

import math
from dataclasses import replace

import pytest
import torch

from scripts.benchmarks.activation_checkpointing import Meter
from tests.unit.small_decoder import ARGS, build
from trainer.config.errors import ConfigError
from trainer.config.schema import Model
from trainer.families.layer_kinds import RopeScaling
from trainer.families.registry import MODELS
from trainer.models.rotary import (
    apply_rope,
    apply_rope_to_halves,
    freqs_cis_at,
    precompute_freqs_cis,
    rope_frequencies,
)


def test_angles_are_exact_at_a_million_tokens():
    """float32 angles would be off by 3e-2 there."""
    table = precompute_freqs_cis(2**20, 8, 5e5, None, torch.float32)
    position, frequencies = 2**20 - 1, rope_frequencies(8, 5e5, None)
    for pair, frequency in enumerate(frequencies.tolist()):
        wanted = math.cos(position * frequency), math.sin(position * frequency)
        assert table[position, pair].tolist() == pytest.approx(wanted, abs=1e-7)


def outer_table(length: int, scaling: RopeScaling | None, dtype: torch.dtype) -> torch.Tensor:
    """Rows of all positions in their order, by other operations."""
    angles = torch.outer(torch.arange(length, dtype=torch.float64), rope_frequencies(8, 5e5, scaling))
    magnitude = 1.0 if scaling is None else scaling.magnitude
    return (magnitude * torch.stack((angles.cos(), angles.sin()), dim=-1)).to(dtype)


@pytest.mark.parametrize("kind", [None, "linear", "llama3", "yarn"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_at_positions_are_bit_for_bit_those_of_the_whole_table(kind: str | None, dtype: torch.dtype) -> None:
    scaling = kind and RopeScaling(4.0, original_max_seq_len=16, kind=kind)
    table, frequencies = outer_table(1000, scaling, dtype), rope_frequencies(8, 5e5, scaling)
    for positions in (torch.arange(7, 1000, 13), torch.randint(1000, (3, 29)), torch.empty(0, dtype=torch.int64)):
        assert freqs_cis_at(positions, frequencies, scaling, dtype).equal(table[positions])
    assert precompute_freqs_cis(1000, 8, 5e5, scaling, dtype).equal(table)


def test_rows_take_two_tensors_of_angles_beside_them() -> None:
    positions, frequencies = torch.arange(512), rope_frequencies(64, 5e5, None)
    with Meter(positions, frequencies) as meter:
        table = freqs_cis_at(positions, frequencies, None, torch.float32)
    assert meter.peak == table.nbytes + 2 * 8 * 512 * 32


def test_a_model_has_no_row_for_each_position() -> None:
    for length in (64, 2**20):
        model = build(replace(ARGS, max_seq_len=length))
        assert sum(buffer.nbytes for buffer in model.buffers()) == 8 * ARGS.head_dim // 2


@pytest.mark.parametrize("rotate", [apply_rope, apply_rope_to_halves])
def test_rope_depends_on_distance_only(rotate):
    table = precompute_freqs_cis(64, 8, 5e5, None, torch.float64)
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    scores = [(rotate(q, table[i + 5 : i + 6]) * rotate(k, table[i : i + 1])).sum().item() for i in range(0, 50, 7)]
    assert scores == pytest.approx([scores[0]] * len(scores), rel=1e-12)


def rotation_and_gradient(x: torch.Tensor, table: torch.Tensor, weights: torch.Tensor) -> list[torch.Tensor]:
    x = x.detach().requires_grad_()
    rotated = apply_rope(x, table)
    return [rotated.detach(), *torch.autograd.grad(rotated, x, weights)]


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.float16, 0), (torch.bfloat16, 0)]
)
@pytest.mark.parametrize("rows", [None, 2], ids=["one table", "a table per row"])
def test_complex_and_real_rotation_agree(
    dtype: torch.dtype, tolerance: float, rows: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eager code multiplies complex numbers, compiled code real ones: the same values and gradients.

    Both round to half precision once, at the end.
    """
    generator = torch.Generator().manual_seed(0)
    table = precompute_freqs_cis(6, 8, 5e5, None, torch.promote_types(dtype, torch.float32))
    if rows is not None:
        table = table[torch.randint(6, (rows, 6), generator=generator)]
    x, weights = torch.randn(2, 2, 6, 3, 8, dtype=torch.float64, generator=generator).to(dtype)
    eager = rotation_and_gradient(x, table, weights)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    real = rotation_and_gradient(x, table, weights)
    for one, other in zip(eager, real, strict=True):
        assert one.dtype == other.dtype == dtype
        assert (one - other).norm() <= tolerance * other.norm()


def test_compiled_rotation_has_no_complex_numbers() -> None:
    """Inductor has no kernels for them."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    table, x = precompute_freqs_cis(4, 8, 5e5, None, torch.float32), torch.ones(1, 4, 2, 8)
    compiled = torch.compile(apply_rope, backend=backend, fullgraph=True)(x, table)
    torch.testing.assert_close(compiled, apply_rope(x, table))
    (graph,) = graphs
    values = [node.meta["example_value"] for node in graph.graph.nodes if "example_value" in node.meta]
    assert len(values) > 5
    assert not any(value.is_complex() for value in values if isinstance(value, torch.Tensor))


def test_rotation_has_second_derivatives() -> None:
    table = precompute_freqs_cis(3, 4, 5e5, None, torch.float64)
    x = torch.randn(1, 3, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: apply_rope(x, table).sin(), (x,))


def test_the_two_ways_to_pair_differ_by_the_order_of_channels():
    table = precompute_freqs_cis(4, 8, 5e5, None, torch.float64)
    x = torch.randn(2, 4, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    halves = torch.cat((torch.arange(0, 8, 2), torch.arange(1, 8, 2)))  # of adjacent pairs
    torch.testing.assert_close(apply_rope_to_halves(x[..., halves], table), apply_rope(x, table)[..., halves])


def test_rope_scaling_of_llama_3_1():
    """Short wavelengths are kept, long ones stretched by the factor, between them it changes monotonically."""
    plain, scaled = rope_frequencies(128, 500000.0, None), rope_frequencies(128, 500000.0, RopeScaling(8.0))
    wavelength = 2 * math.pi / plain
    ratio = plain / scaled
    torch.testing.assert_close(ratio[wavelength < 8192 / 4], torch.ones_like(ratio[wavelength < 8192 / 4]))
    torch.testing.assert_close(ratio[wavelength > 8192], torch.full_like(ratio[wavelength > 8192], 8.0))
    assert (ratio.diff() >= -1e-12).all()
    # The middle, from the formula of Llama 3.1's reference: smooth = (8192 / wavelength - 1) / 3
    middle = (wavelength > 8192 / 4) & (wavelength < 8192)
    assert middle.any()
    smooth = (8192 / wavelength[middle] - 1) / 3
    torch.testing.assert_close(scaled[middle], (1 - smooth) * plain[middle] / 8 + smooth * plain[middle])


def test_rotary_tables_stay_precise_beside_bfloat16():
    model = build(dtype=torch.bfloat16)
    assert model.frequencies.dtype == torch.float64
    assert model.rotary_dtype == torch.float32
    assert model(torch.zeros(1, 4, dtype=torch.int64)).dtype == torch.bfloat16
    assert build(dtype=torch.float64).rotary_dtype == torch.float64


def test_yarn_takes_its_original_length_from_key_flavor_or_scaling() -> None:
    settings = Model(rope_scaling=4.0, rope_scaling_type="yarn")
    scaling_of = lambda args, settings: args.configured(settings, vocab_size=1, max_seq_len=99).rope_scaling  # noqa: E731
    args = replace(ARGS, max_seq_len=64)
    assert scaling_of(args, settings) == RopeScaling(4.0, original_max_seq_len=64, kind="yarn")
    assert scaling_of(args, replace(settings, rope_original_seq_len=32)).original_max_seq_len == 32
    scaled = replace(args, rope_scaling=RopeScaling(2.0, original_max_seq_len=16))
    assert scaling_of(scaled, settings) == RopeScaling(4.0, original_max_seq_len=16, kind="yarn")
    assert scaling_of(scaled, Model()) == scaled.rope_scaling
    assert scaling_of(scaled, Model(rope_scaling=1.0)) is None
    assert scaling_of(args, Model(rope_scaling=8.0)) == RopeScaling(8.0)


@pytest.mark.parametrize(
    ("theta", "original"),
    [(10.0, 16), (10.0, 800), (10.0, 4096), (10000.0, 16), (10000.0, 4096), (10000.0, 10**8), (1e6, 4096)],
)
@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn", "yarn, not truncated"])
def test_scaled_frequencies_are_those_of_transformers(kind: str, theta: float, original: int) -> None:
    """In some cases, the ramp of YaRN begins before the first pair, or ends after the last pair."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    truncate = kind == "yarn"
    kind = kind.partition(",")[0]
    extra = {"llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0}, "yarn": {"truncate": truncate}}.get(kind, {})
    lengths = {} if kind == "linear" else {"original_max_position_embeddings": original}
    rope = {"rope_type": kind, "rope_theta": theta, "factor": 8.0, **lengths, **extra}
    config = LlamaConfig(head_dim=16, max_position_embeddings=8 * original, rope_parameters=rope)
    theirs, magnitude = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    scaling = RopeScaling(8.0, original_max_seq_len=original, kind=kind, truncate=truncate or kind != "yarn")
    ours = rope_frequencies(16, theta, scaling)
    assert (ours - theirs.double()).norm() < 1e-6 * theirs.norm()
    assert ((ours / theirs.double()) - 1).abs().max() < 1e-5
    assert scaling.magnitude == pytest.approx(magnitude)


@pytest.mark.parametrize(("longest", "attention_factor"), [(64, None), (65, None), (512, 1.25)])
def test_longrope_is_that_of_transformers(longest: int, attention_factor: float | None) -> None:
    """A model for more tokens than the original length has the long factors, whatever the sequence."""
    from transformers import Phi3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    short, long = (tuple(a + b * i for i in range(8)) for a, b in ((1.0, 0.1), (1.5, 3.0)))
    scaling = RopeScaling(8.0, original_max_seq_len=64, kind="longrope", short_factors=short, long_factors=long)
    scaling = replace(scaling, attention_factor=attention_factor)
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [*short], "long_factor": [*long]}
    rope |= {} if attention_factor is None else {"attention_factor": attention_factor}
    config = Phi3Config(
        hidden_size=64,
        num_attention_heads=4,
        max_position_embeddings=512,
        original_max_position_embeddings=64,
        rope_parameters=rope,
        pad_token_id=0,
    )
    theirs, magnitude = ROPE_INIT_FUNCTIONS["longrope"](config, torch.device("cpu"), seq_len=longest)
    ours = rope_frequencies(16, 10000.0, scaling, longest=longest)
    assert ((ours / theirs.double()) - 1).abs().max() < 1e-5
    assert scaling.magnitude == pytest.approx(magnitude)
    with pytest.raises(ConfigError, match=r"rope_scaling = 4\.0 is not for LongRoPE"):
        replace(ARGS, rope_scaling=scaling).configured(Model(rope_scaling=4.0), vocab_size=1, max_seq_len=99)


def test_another_factor_keeps_the_rest_of_the_flavors_scaling() -> None:
    scaling_of = lambda args, **keys: args.configured(Model(**keys), vocab_size=1, max_seq_len=99).rope_scaling  # noqa: E731
    yarn = MODELS["gpt_oss"].flavors["20b"]
    assert scaling_of(yarn, rope_scaling=64.0) == replace(yarn.rope_scaling, factor=64.0)
    assert scaling_of(yarn, rope_scaling=64.0, rope_scaling_type="llama3") == RopeScaling(
        64.0, original_max_seq_len=4096
    )
    linear = replace(ARGS, max_seq_len=64, rope_scaling=RopeScaling(2.0, kind="linear"))
    assert scaling_of(linear, rope_scaling=4.0) == RopeScaling(4.0, kind="linear")
    assert scaling_of(linear, rope_scaling=4.0, rope_scaling_type="yarn").original_max_seq_len == 64
