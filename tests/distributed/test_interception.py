"""Law: an intercepted call of F.scaled_dot_product_attention computes what one process computes, or is refused.

The law holds for every way to run backward, under activation checkpointing and for compiled models.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from longshard.context.planning.options import ContextParallelError
from longshard.context.regions import Region, context_parallel
from longshard.integrations.interception import intercept_sdpa
from scripts.gpu_blocks.block import largest
from tests.distributed.other_models import RANKS, Attention, data, ranks, relative
from tests.distributed.pool import WorkerPool


@contextmanager
def intercepted(mesh: DeviceMesh, x: torch.Tensor, **settings: Any) -> Iterator[Region]:
    with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1], intercept=intercept_sdpa(), **settings) as cp:
        yield cp


CALLS = ({}, {"is_causal": True}, {"is_causal": True, "scale": 0.2, "dropout_p": 0.0})


def backward_case(how: str) -> list[float]:
    """Errors of the weights' gradients by one way to run backward, with activation checkpointing."""
    with ranks() as mesh, torch.device(mesh.device_type):
        wanted, model, x = Attention(), Attention(), data()
        for settings in CALLS:
            wanted(x, **settings).pow(2).sum().backward()
        totals = [torch.zeros_like(p) for p in model.parameters()]
        with intercepted(mesh, x) as cp:
            for settings in CALLS:
                with torch.no_grad():
                    seen = model(x, **settings)
                hidden = (x * 1).requires_grad_()
                out = checkpoint(model, hidden, **settings, use_reentrant=False)
                torch.testing.assert_close(out, seen, rtol=0, atol=0)
                for total, part in zip(totals, run_backward(how, model, hidden, out), strict=True):
                    total += part
            assert cp.live.calls == 3 * len(CALLS)
        for total in totals:
            dist.all_reduce(total, group=mesh.get_group())
        return [relative(total, p.grad) for total, p in zip(totals, wanted.parameters(), strict=True)]


def run_backward(how: str, model: nn.Module, hidden: torch.Tensor, out: torch.Tensor) -> Sequence[torch.Tensor]:
    """Gradients of the model's parameters of sum(out ** 2)."""
    parameters = list(model.parameters())
    loss = out.pow(2).sum()
    if how == "grad":
        return torch.autograd.grad(loss, parameters, torch.ones_like(loss))
    if how == "grad, materialized":
        unused = torch.ones(1, requires_grad=True)
        *gradients, zero = torch.autograd.grad(loss, [*parameters, unused], materialize_grads=True)
        assert zero.item() == 0
        return gradients
    if how == "backward of several":
        torch.autograd.backward([out, loss * 0], [2 * out.detach(), None])
    elif how == "backward of inputs":
        squares = out * 1
        squares.pow(2).sum().backward(inputs=[squares, *parameters])
        torch.testing.assert_close(squares.grad, 2 * out, rtol=0, atol=0)  # not a leaf
        assert hidden.grad is None
    else:
        loss.backward()
    gradients = [p.grad for p in parameters]
    model.zero_grad()
    return gradients


@pytest.mark.parametrize("how", ["backward", "backward of several", "backward of inputs", "grad", "grad, materialized"])
def test_every_way_to_run_backward(pool: WorkerPool, how: str) -> None:
    """Causal and full attention; forward without gradients is the same forward."""
    for errors in pool.run(RANKS, backward_case, how):
        assert largest(*errors) < 1e-12


def test_recomputation_on_one_rank(pool: WorkerPool) -> None:
    """With `--device cuda` backward runs in threads of its own: the mode must be in force there too."""
    ((*errors,),) = pool.run(1, backward_case, "backward")
    assert largest(*errors) < 1e-12


def compiled_case() -> list[float | str]:
    """A compiled model: compiled before the context too, and without breaks."""
    results = []
    with ranks() as mesh:
        wanted, x = (part.to(mesh.device_type) for part in (Attention(), data()))
        wanted(x, is_causal=True).pow(2).sum().backward()
        for is_warm, fullgraph in ((False, False), (True, False), (True, True)):
            torch._dynamo.reset()
            model, x = (part.to(mesh.device_type) for part in (Attention(), data()))
            compiled = torch.compile(model, backend="eager", fullgraph=fullgraph)
            if is_warm:
                compiled(x, is_causal=True)
            try:
                with intercepted(mesh, x) as cp:
                    compiled(x, is_causal=True).pow(2).sum().backward()
                    assert cp.live.calls == 1
            except Exception as error:
                results.append(str(error))
                continue
            for p in model.parameters():
                dist.all_reduce(p.grad, group=mesh.get_group())
            pairs = zip(model.parameters(), wanted.parameters(), strict=True)
            results.append(max(relative(a.grad, b.grad) for a, b in pairs))
    return results


def test_a_compiled_model_runs_as_it_is(pool: WorkerPool) -> None:
    """The model runs uncompiled inside the context. If compilation is required, an error says so."""
    for *errors, message in pool.run(RANKS, compiled_case):
        assert largest(*errors) < 1e-12
        assert "cannot be compiled" in message


def compiled_function_case() -> bool:
    """A function that is first compiled inside the context, whose attention call then comes from a graph break."""
    with ranks() as mesh:
        layer, x = nn.Linear(8, 24).double(), torch.randn(1, 16, 8, dtype=torch.float64)

        def attend(x: torch.Tensor) -> torch.Tensor:
            q, k, v = layer(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        torch._dynamo.reset()
        compiled, results = torch.compile(attend, backend="eager"), []
        for function in (compiled, attend):
            with intercepted(mesh, x) as cp:
                results.append(function(x))
                assert cp.live.calls == 1
        return torch.equal(*results)


def test_a_compiled_function_does_not_wait_for_ever(pool: WorkerPool) -> None:
    assert pool.run(1, compiled_function_case, timeout=60) == [True]


def refused_calls_case() -> list[str]:
    """The messages of calls that cannot be honoured; nothing of a context is left after any of them."""
    messages = []
    with ranks() as mesh, torch.device(mesh.device_type):
        model, x = Attention(), data()
        for call in calls_to_refuse(model, x):
            before = x.clone()
            with pytest.raises(ContextParallelError) as error, intercepted(mesh, x):
                call()
            messages.append(str(error.value))
            assert torch.equal(x, before)
        for seq_len in (2, 3):
            with pytest.raises(ContextParallelError) as error, intercepted(mesh, short := data(seq_len)):
                model(short)
            messages.append(str(error.value))
        with intercepted(mesh, short := data(4)):
            model(short)
        alone = init_device_mesh(mesh.device_type, (RANKS, 1), mesh_dim_names=("a", "b"))["b"]
        with (
            pytest.raises(ContextParallelError) as error,
            intercepted(mesh, x),
            intercepted(alone, data()),
        ):
            pass
        messages.append(str(error.value))
        with intercepted(mesh, x):
            loss = model(x).sum()
        with pytest.raises(ContextParallelError) as error:
            loss.backward()
        messages.append(str(error.value))
        # Attention outside runs on one process again.
        assert model(x).shape == x.shape
        with pytest.raises(ZeroDivisionError), intercepted(mesh, x):
            raise ZeroDivisionError
        assert model(x, attn_mask=torch.ones(13, 13, dtype=torch.bool)).shape == x.shape
    return messages


def calls_to_refuse(model: nn.Module, x: torch.Tensor) -> list[Callable[[], Any]]:
    q = torch.zeros(1, 4, 7, 4)
    part = {name: torch.zeros(1, 2, 7, 4) for name in ("key", "value")}
    return [
        lambda: model(x, attn_mask=torch.ones(7, 7, dtype=torch.bool)),
        lambda: model(x, attn_mask=torch.zeros(7, 7, dtype=torch.float64)),
        lambda: model(x, dropout_p=0.1),
        lambda: F.scaled_dot_product_attention(q, **part),
        lambda: F.scaled_dot_product_attention(q, **(part | {"key": torch.zeros(1, 2, 7, 2)}), enable_gqa=True),
        lambda: F.scaled_dot_product_attention(q[:, :3], **part, enable_gqa=True),
        lambda: F.scaled_dot_product_attention(q[0], q[0], q[0]),
        lambda: nn.MultiheadAttention(8, 2, dtype=torch.float64)(x, x, x, need_weights=False),
        lambda: F.scaled_dot_product_attention(q.repeat(1, 1, 2, 1), q, q),
    ]


REFUSED = [
    "a mask of shape (7, 7)",
    "a mask of shape (7, 7)",
    "dropout 0.1",
    "4 query heads and 2 key/value heads need enable_gqa=True",
    "queries of size 4 do not fit keys of size 2",
    "2 key/value heads do not divide 3 query heads",
    "of shapes (4, 7, 4)",
    "multi_head_attention_forward attends inside of one call",
    "got 14 rows of the sequence",
    "2 tokens leaves a rank 1",
    "3 tokens leaves a rank 1",
    "in force already",
    "outside its context",
]


def test_calls_that_cannot_be_honoured_are_refused(pool: WorkerPool) -> None:
    for messages in pool.run(RANKS, refused_calls_case):
        assert len(messages) == len(REFUSED)
        for message, words in zip(messages, REFUSED, strict=True):
            assert words in message
            assert len(message.splitlines()) == 1
