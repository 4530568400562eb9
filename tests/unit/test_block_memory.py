"""Laws of what a block holds while it is computed: copies exist of a part, and what has been used is freed."""

from collections import defaultdict
from collections.abc import Callable
from threading import get_ident
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from longshard.context.attention import context_parallel_attention
from longshard.context.attention_inputs import AttentionSettings
from longshard.context.execution import ulysses
from longshard.context.execution.stages import restore_shape
from longshard.context.execution.ulysses import HeadExchange
from longshard.context.live import LivePlan, flat_mesh, opened
from longshard.context.planning.options import ContextParallelOptions
from longshard.sharding import tensors
from longshard.sharding.exchange import Pending
from scripts.benchmarks.activation_checkpointing import Meter
from tests.distributed.attention_cases import random
from tests.thread_attention import SCALE
from tests.thread_ranks import ThreadMesh, run_ranks
from trainer.models import experts, rotary
from trainer.models.feed_forward import ACTIVATIONS, gated
from trainer.models.norms import OffsetNorm
from trainer.models.rotary import apply_rope, apply_rope_to_halves, precompute_freqs_cis

ROWS, HEADS, HEAD_DIM = 256, 8, 16
ONE = 8 * ROWS * HEADS * HEAD_DIM
"""Bytes of a rank's queries in float64."""


@pytest.mark.parametrize("rotate", [apply_rope, apply_rope_to_halves])
@pytest.mark.parametrize("batched", [False, True])
def test_a_rotation_in_parts_is_the_whole_one(rotate: Callable[..., torch.Tensor], batched: bool) -> None:
    table = precompute_freqs_cis(7, 4, 5e5, None, torch.float64)
    table = table[torch.tensor([[3, 1, 4], [2, 6, 5]])] if batched else table[:3]
    x, weights = random(2, 3, 1, 4).requires_grad_(), random(2, 3, 1, 4, seed=1)
    results = []
    for part in (rotary._PART, 13, 1):
        with mock.patch.object(rotary, "_PART", part):
            out = rotate(x, table)
            results.append((out, *torch.autograd.grad(out, x, weights)))
            assert torch.autograd.gradgradcheck(lambda x: rotate(x, table).sin(), (x,))
    for one, *others in zip(*results, strict=True):
        for other in others:
            torch.testing.assert_close(one, other, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("backward", [False, True])
def test_a_rotation_copies_a_part_to_the_type_of_the_angles(backward: bool) -> None:
    table = precompute_freqs_cis(ROWS, HEAD_DIM, 5e5, None, torch.float32)
    x = random(1, ROWS, HEADS, HEAD_DIM).bfloat16().requires_grad_()
    size, out = x.nbytes, apply_rope(x, table)
    with mock.patch.object(rotary, "_PART", x.numel() // 8), Meter(x, table, out) as meter:
        torch.autograd.grad(apply_rope(x, table), x, out)
    # output, gradient, negative angles, and the copies of a part
    assert 2 * size <= meter.peak < 3.6 * size


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_a_gate_has_the_gradients_of_its_formula_and_keeps_its_inputs_alone(name: str) -> None:
    gate, up = (random(ROWS, 2 * HEADS, seed=seed).requires_grad_() for seed in (0, 1))
    weights, kept = random(ROWS, 2 * HEADS, seed=2), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.data_ptr()) or x, lambda x: x):
        out = gated(name, gate, up)
    formula = ACTIVATIONS[name].function(gate) * up
    assert kept == [gate.data_ptr(), up.data_ptr()]
    assert out.equal(formula)
    for gradient, expected in zip(*(torch.autograd.grad(x, (gate, up), weights) for x in (out, formula)), strict=True):
        assert gradient.equal(expected)


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_norm_that_computes_in_float32_keeps_no_copy_of_its_input(is_frozen: bool) -> None:
    norm, wide = (OffsetNorm(HEAD_DIM, eps=1e-6) for _ in range(2))
    for each in (norm, wide):
        nn.init.normal_(each.weight, generator=torch.Generator().manual_seed(0))
        each.weight.requires_grad_(not is_frozen)
    x, weights, kept = random(ROWS, HEAD_DIM).bfloat16().requires_grad_(), random(ROWS, HEAD_DIM, seed=1).bfloat16(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.data_ptr()) or x, lambda x: x):
        out = norm(x)
    assert kept == [x.data_ptr(), norm.weight.data_ptr()]
    copy = x.detach().float().requires_grad_()
    out_of_copy = wide(copy).bfloat16()
    out.backward(weights)
    out_of_copy.backward(weights)
    assert out.equal(out_of_copy)
    assert x.grad.equal(copy.grad.bfloat16())
    assert norm.weight.grad is None if is_frozen else norm.weight.grad.equal(wide.weight.grad)


@pytest.mark.parametrize("wide", [False, True])
def test_rows_of_experts_are_weighted_and_added_in_parts(wide: bool) -> None:
    rows, dout = random(4 * ROWS, HEAD_DIM).bfloat16().requires_grad_(), random(ROWS, HEAD_DIM, seed=2).bfloat16()
    weights = random(4 * ROWS, seed=1).to(torch.float32 if wide else torch.bfloat16).requires_grad_()
    token = torch.randint(ROWS, (4 * ROWS,), generator=torch.Generator().manual_seed(0))
    products = (rows * weights.unsqueeze(1)).float()
    formula = torch.zeros(ROWS, HEAD_DIM).index_add(0, token, products).bfloat16()
    expected, peaks = torch.autograd.grad(formula, (rows, weights), dout), []
    for part in (tensors._PART, 7 * HEAD_DIM):
        with mock.patch.object(tensors, "_PART", part), Meter(rows, weights, token, dout) as meter:
            out = experts._WeightedSums.apply(rows, weights, token, ROWS)
            peaks.append(meter.peak)
            gradients = torch.autograd.grad(out, (rows, weights), dout)
        assert out.equal(formula)
        assert all(one.equal(other) for one, other in zip(gradients, expected, strict=True))
    assert peaks[1] < 0.6 * peaks[0]


def attended(rank: int, mesh: ThreadMesh, kv_heads: int, query_heads: int) -> None:
    options = ContextParallelOptions("all_to_all", query_heads_per_pass=query_heads)
    flat, groups = flat_mesh(mesh, options)
    layout = options.layout(ROWS * mesh.size(), mesh.size())
    heads = HEADS, kv_heads, kv_heads, HEADS
    *leaves, cotangent = (random(1, ROWS, n, HEAD_DIM, seed=i).transpose(1, 2) for i, n in enumerate(heads))
    leaves = [x.requires_grad_() for x in leaves]
    with opened(LivePlan(flat, layout, None, options, groups=groups), 1) as handle:
        out, *_ = context_parallel_attention(*leaves, handle, AttentionSettings(SCALE))
        torch.autograd.grad(out, leaves, cotangent)


def message_memory(direction: str, kv_heads: int = HEADS, query_heads: int = 0) -> dict[str, list[float]]:
    """Kind of a message -> the bytes of a rank beyond inputs when it is sent, in queries of a rank; and the most bytes.

    Messages have no values.
    """
    units: dict[str, list[float]] = defaultdict(list)
    real, meters = getattr(HeadExchange, direction), {}

    def metered(self: HeadExchange, *arguments: object, **options: object) -> object:
        meters[get_ident()] = meter = Meter(*(x for x in tree_leaves(arguments) if isinstance(x, torch.Tensor)))
        with meter:
            result = real(self, *arguments, **options)
        units["most"].append(meter.peak / ONE)
        return result

    def all_to_all(sent: torch.Tensor, _to: object, sizes: list[int], *_: object, kind: str) -> tuple:
        if get_ident() in meters:
            units[kind].append(meters[get_ident()].alive() / ONE)
        return sent.new_zeros(sum(sizes)), Pending([], [sent])

    with mock.patch.object(HeadExchange, direction, metered), mock.patch.object(ulysses, "all_to_all", all_to_all):
        run_ranks(2, attended, kv_heads, query_heads)
    return units


def test_exchanged_tensors_are_freed_after_their_use() -> None:
    """While a message is sent, only the message is alive. A message and the received tensor are alive together."""
    lse = 1 / HEAD_DIM
    units = message_memory("forward")
    assert (units["qkv"], units["out"]) == ([3, 3], [1 + lse, 1 + lse])
    assert max(units["most"]) < 6.1
    units = message_memory("backward")
    assert (units["qkv_dout"], units["dqkv"]) == ([5 + lse, 5 + lse], [3, 3])
    assert max(units["most"]) < 11.1  # and one copy of the kernel


def test_passes_of_query_heads_take_less_memory() -> None:
    """Two ranks have one key/value head each; four query heads share it."""
    whole, passes = (message_memory("backward", kv_heads=2, query_heads=queries)["most"] for queries in (0, 1))
    assert max(passes) < 0.85 * min(whole)


def test_a_gradient_in_the_memory_order_of_its_input_is_returned_itself() -> None:
    like = torch.randn(1, 6, 4, 2).transpose(1, 2)
    gradient = torch.randn(1, 6, 4, 2).transpose(1, 2)
    with Meter(like, gradient) as meter:
        assert restore_shape(gradient, like).data_ptr() == gradient.data_ptr()
        assert meter.peak == 0
        copied = restore_shape(gradient.contiguous(), like)
    assert copied.stride() == like.stride()
    assert copied.equal(gradient)
