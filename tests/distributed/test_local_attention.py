"""Law: inside a context, attention over the rows of one rank alone is an error, or was asked for with a word."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.flex_attention import flex_attention

from longshard import context_parallel, head_tail, intercept_sdpa, region
from tests.distributed.pool import WorkerPool
from tests.distributed.test_context_guards import Refusals, on_all_ranks, parallel_attention

QKV = (2, 2, 16, 4)  # (B, H, S, D)


class FlashKernel(torch.autograd.Function):
    """Attention as packages of kernels call it: an operator of their own in the forward of a function."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.flash_attn_3.fwd_of_test(x)


def rows() -> torch.Tensor:
    return torch.randn(QKV, generator=torch.Generator().manual_seed(0))


def call_of_module(x: torch.Tensor) -> torch.Tensor:
    return nn.MultiheadAttention(4, 2, batch_first=True)(x[0], x[0], x[0])[0]


def softmax_by_hand(x: torch.Tensor) -> torch.Tensor:
    return (x @ x.mT).softmax(-1) @ x


SEEN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "scaled_dot_product_attention": lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
    "scaled_dot_product_attention.default": lambda x: torch.ops.aten.scaled_dot_product_attention.default(x, x, x),
    "_scaled_dot_product_flash_attention_for_cpu": lambda x: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        x, x, x
    )[0],
    "fwd_of_test": FlashKernel.apply,
    "multi_head_attention_forward": call_of_module,
}


def opened(mesh: DeviceMesh, kind: str, **settings):
    """Open a context or a region over 32 tokens: 16 on each of two ranks."""
    if kind == "region":
        return region(mesh, head_tail(32, mesh.size()), **settings)
    return context_parallel(mesh, buffers=[torch.arange(32)], buffer_seq_dims=[0], **settings)


def run(mesh: DeviceMesh, kind: str, attention: Callable[[torch.Tensor], torch.Tensor], **settings) -> torch.Tensor:
    with opened(mesh, kind, **settings):
        return attention(rows())


def calls_body(mesh: DeviceMesh, refused: Refusals) -> None:
    library = torch.library.Library("flash_attn_3", "FRAGMENT")
    library.define("fwd_of_test(Tensor x) -> Tensor")
    library.impl("fwd_of_test", torch.clone, "CPU")
    for kind in ("context", "region"):
        for name, attention in SEEN.items():
            words = f"{name} was called inside a context over 2 ranks"
            refused(words, partial(run, mesh, kind, attention))
            local = run(mesh, kind, attention, local_attention=True)
            assert local.numel() > 0
        # What no mode sees, such as a kernel that a package calls by a function in C, ran over no plan.
        refused("no attention ran over them", partial(run, mesh, kind, softmax_by_hand))
        run(mesh, kind, softmax_by_hand, local_attention=True)
        # It compiles itself, so that the compiler's error has this sentence inside.
        with pytest.raises(Exception, match="flex_attention was called inside a context over 2 ranks"):
            run(mesh, kind, lambda x: flex_attention(x, x, x))


def second_model_body(mesh: DeviceMesh, refused: Refusals) -> None:
    """One model has the style, and the other one does not."""
    module = parallel_attention(mesh)
    attention = SEEN["scaled_dot_product_attention"]

    def both(**settings) -> None:
        with opened(mesh, "context", **settings) as cp:
            module(rows(), rows(), rows(), plan=cp.attention_plan)
            attention(rows())

    refused("scaled_dot_product_attention was called inside", both)
    both(local_attention=True)
    both(intercept=intercept_sdpa())  # over the plan, too


def test_attention_of_one_rank_alone_is_refused(pool: WorkerPool) -> None:
    count = 2 * (len(SEEN) + 1)
    assert pool.run(2, on_all_ranks, calls_body) == [(count, [])] * 2


def test_a_second_model_in_the_context_is_seen(pool: WorkerPool) -> None:
    assert pool.run(2, on_all_ranks, second_model_body) == [(1, [])] * 2


def compiled_body(mesh: DeviceMesh, refused: Refusals) -> None:
    """The refusal costs a compiled block no break of its graph, and one graph serves all contexts."""
    module, graphs = parallel_attention(mesh), []

    def backend(graph: torch.fx.GraphModule, _: list) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    @torch.compile(fullgraph=True, backend=backend)
    def block(x: torch.Tensor, plan: torch.Tensor) -> torch.Tensor:
        return module(x.sin(), x, x, plan=plan).cos()

    for _ in range(3):
        x = rows().requires_grad_()
        with opened(mesh, "context", sequences=2) as cp:
            block(x, cp.attention_plan).sum().backward()
        assert x.grad.abs().sum() > 0
    assert len(graphs) == 1


def test_a_compiled_block_keeps_its_one_graph(pool: WorkerPool) -> None:
    assert pool.run(2, on_all_ranks, compiled_body) == [(0, [])] * 2
