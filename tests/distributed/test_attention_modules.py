"""Law: a module of attention inside a context is exact, keeps every token's place, and keeps documents apart."""

import dataclasses
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from longshard.context.attention import ContextParallelAttention
from longshard.context.planning.balance import LOAD_BALANCERS
from longshard.context.planning.mask import Mask, causal, documents, documents_of, full
from longshard.context.planning.options import ContextParallelOptions
from longshard.context.regions import context_parallel
from longshard.sharding.layout import AxisLayout
from longshard.sharding.placement import rows_on
from scripts.gpu_blocks.block import largest
from tests.distributed.attention_cases import Case, mesh_of_all, oracle, relative
from tests.distributed.harness import TINY
from tests.distributed.pool import WorkerPool
from tests.masks import dense
from trainer.config.loader import parse_command_line
from trainer.models.attention import InnerAttention
from trainer.models.decoder import Transformer
from trainer.runtime.process_group import Process, process_group


def bfloat16_error_case(method: str, seq_len: int) -> tuple[list[float], list[float]]:
    """Errors against float64 of context parallel bfloat16, and of the plain bfloat16 kernel on one process."""
    process = Process.from_environment()
    case = Case(seq_len, (4, 2), 64, torch.bfloat16)
    scale = 64**-0.5
    with process_group(process, parse_command_line([]).config.comm):
        mesh = mesh_of_all(process)
        module = InnerAttention()
        *inputs, cotangent = case.inputs()
        wanted = oracle(case, scale)
        leaves = [x.clone().requires_grad_() for x in inputs]
        plain = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
        plain = (plain, *torch.autograd.grad(plain, leaves, cotangent))
        ContextParallelAttention()._apply(module, mesh)
        buffers = [*inputs, cotangent]
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4, method=method) as cp:
            leaves = [x.clone().requires_grad_() for x in inputs]
            out = module(*leaves, plan=cp.attention_plan)
            got = (out, *torch.autograd.grad(out, leaves, cotangent.clone()))
            own_rows = torch.from_numpy(cp.layout.indices(process.rank))
            assert cp.live.calls == 1
        ours = [relative(a, b[:, :, own_rows]) for a, b in zip(got, wanted, strict=True)]
        return ours, [relative(a[:, :, own_rows], b[:, :, own_rows]) for a, b in zip(plain, wanted, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ring", "all_gather", "all_to_all"])
def test_bfloat16_is_as_exact_as_the_plain_kernel(pool: WorkerPool, method: str) -> None:
    for ours, plain in pool.run(4, bfloat16_error_case, method, 256):
        assert all(error <= 2 * plain_error for error, plain_error in zip(ours, plain, strict=True)), (ours, plain)


def exact_case(method: str, cases: list[tuple[str, Mask]], swap: bool) -> list[list[str]]:
    """Return the misplaced outputs of a position-wise model, for each (load balancer, mask)."""
    process = Process.from_environment()
    with process_group(process, parse_command_line([]).config.comm):
        mesh = mesh_of_all(process)
        module = InnerAttention()
        ContextParallelAttention()._apply(module, mesh)
        rows_on.cache_clear()  # this process may have run other cases
        with mock.patch.object(AxisLayout, "indices", _swapped if swap else AxisLayout.indices):
            wrong = [_misplaced(mesh, module, ContextParallelOptions(method, name), mask) for name, mask in cases]
        rows_on.cache_clear()
        return wrong


_indices = AxisLayout.indices


def _swapped(layout: AxisLayout, rank: int) -> np.ndarray:
    indices = _indices(layout, rank).copy()
    if rank == 1:
        indices[[3, 4]] = indices[[4, 3]]
    return indices


def _misplaced(mesh: DeviceMesh, module: nn.Module, options: ContextParallelOptions, mask: Mask) -> list[str]:
    """Return the tokens for which attention sees too much or too little.

    Each token is its own unit vector, and queries are zero. So a token's output is the mean over the visible tokens:
    its non-zero elements are exactly these tokens. The non-zero elements of dV of a unit cotangent are exactly the
    tokens that see it.
    """
    seq_len, rows = mask.q_len, max(mask.sequences, 2)
    tokens = torch.arange(seq_len).repeat(rows, 1)
    labels, positions = tokens + 1000, tokens.clone()
    table = torch.arange(seq_len + 5, dtype=torch.float64).unsqueeze(1)
    buffers = [tokens, labels, positions, table]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1, 1, 1, 0], mask=mask, options=options) as cp:
        own_tokens = torch.from_numpy(_indices(cp.layout, mesh.get_local_rank()))
        pairs = [
            ("tokens", tokens[0], own_tokens),
            ("labels", labels[1], own_tokens + 1000),
            ("positions", positions[0], own_tokens),
        ]
        pairs.append(("table", table[:, 0], own_tokens.double()))
        wrong = [name for name, x, expected in pairs if not torch.equal(x, expected)]
        v = F.one_hot(tokens, seq_len).double().unsqueeze(1).repeat(1, mesh.size(), 1, 1).requires_grad_()
        k = torch.randn_like(v).detach()
        out = module(torch.zeros_like(k), k, v, plan=cp.attention_plan)
        visible = torch.from_numpy(dense((causal(seq_len) & mask).repeated(rows)))
        counts = visible.sum(2, keepdim=True).double()
        if not torch.allclose(out[:, 0] * counts[:, own_tokens], visible[:, own_tokens].double(), rtol=0, atol=1e-9):
            wrong.append("output")
        cotangent = (F.one_hot(tokens, seq_len) * counts[:, own_tokens].clamp(min=1)).unsqueeze(1).expand_as(out)
        (dv,) = torch.autograd.grad(out, v, cotangent)
        if not torch.allclose(dv[:, 0], visible.transpose(1, 2)[:, own_tokens].double(), rtol=0, atol=1e-9):
            wrong.append("gradient")
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("method", ["all_to_all", "ring", "all_gather"])
def test_a_position_wise_model_shows_any_permutation(pool: WorkerPool, method: str) -> None:
    masks = [full(29), documents([10, 3, 16]), documents_of(np.array([[0] * 5 + [1] * 24, [0] * 20 + [1] * 9]))]
    cases = [(balancer, mask) for balancer in LOAD_BALANCERS for mask in masks]
    assert pool.run(3, exact_case, method, cases, False) == [[[]] * len(cases)] * 3
    # Two tokens of one rank change places: whatever is cut by position shows it.
    broken = pool.run(3, exact_case, method, [("head_tail", masks[0])], True)
    assert set(broken[1][0]) == {"tokens", "labels", "positions", "table", "output", "gradient"}


class DenseAttention(InnerAttention):
    """Attention by a dense mask, (S, S): the oracle of windows and sinks, which the model has in its plan only."""

    def forward(self, q, k, v, *, scale=None, sinks=None, plan=None):
        visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        if self.sliding_window is not None:
            visible = visible.triu(1 - self.sliding_window)
        mask = torch.zeros_like(visible, dtype=q.dtype).masked_fill(~visible, -torch.inf)
        if sinks is not None:  # one more key and value, zeros, first in line
            k, v = (F.pad(x, (0, 0, 1, 0)) for x in (k, v))
            column = sinks.to(q.dtype)[:, None, None].expand(-1, q.shape[2], 1)
            mask = torch.cat((column, mask.expand(q.shape[1], -1, -1)), dim=2)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


def documents_apart_case(window: int | None, sinks: bool) -> list[float]:
    """Differences of hidden states and gradients: a packed row by plan, and its documents one by one, without any."""
    process = Process.from_environment()
    lengths = [7, 1, 12, 4]
    shape = dataclasses.replace(TINY, vocab_size=64, max_seq_len=24, sliding_window=window, attention_sinks=sinks)
    packed, alone = (Transformer(shape).double() for _ in range(2))
    for layer in packed.layers.values() if sinks else ():
        nn.init.normal_(layer.attention.sinks.weight)
    alone.load_state_dict(packed.state_dict())
    for layer in alone.layers.values():
        layer.attention.inner_attention = DenseAttention(window)
    for model in (packed, alone):
        model.init_buffers(torch.device("cpu"))
    tokens = torch.randint(64, (1, 24), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(n) for n in lengths]).unsqueeze(0)
    cotangent = torch.randn(1, 24, shape.dim, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    with process_group(process, parse_command_line([]).config.comm):
        mesh = mesh_of_all(process)
        for layer in packed.layers.values():
            ContextParallelAttention(sliding_window=window)._apply(layer.attention.inner_attention, mesh)
        mask = documents(lengths)
        with context_parallel(mesh, buffers=[tokens, positions], buffer_seq_dims=[1, 1], mask=mask) as cp:
            hidden = packed(tokens, positions, attention_plan=cp.attention_plan)
            hidden.backward(cotangent)
    parts = [alone(part) for part in tokens.split(lengths, dim=1)]  # each from position 0
    torch.cat(parts, dim=1).backward(cotangent)
    pairs = zip(packed.parameters(), alone.parameters(), strict=True)
    return [
        relative(hidden, torch.cat(parts, dim=1)),
        *(relative(a.grad, b.grad) for a, b in pairs if b.grad is not None),
    ]


@pytest.mark.parametrize(("window", "sinks"), [(None, False), (3, False), (None, True), (3, True)])
def test_packed_documents_are_as_if_each_were_alone(pool: WorkerPool, window: int | None, sinks: bool) -> None:
    """The parity of whole models rests on this law. The oracle is PyTorch's own attention under a dense mask."""
    (errors,) = pool.run(1, documents_apart_case, window, sinks)
    assert len(errors) > 10
    assert largest(*errors) < 1e-12
