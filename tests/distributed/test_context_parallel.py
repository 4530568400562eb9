"""Context-parallel attention against attention of one process, with random cotangents; and the context's promises."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.distributed.pool import WorkerPool
from trainer.config.loader import parse_command_line
from trainer.distributed import exchange
from trainer.distributed.context_parallel.attention import (
    ContextParallelAttention,
    ContextParallelError,
    LivePlan,
    close_plan,
    context_parallel_attention,
    open_plan,
)
from trainer.distributed.context_parallel.context import ContextParallelOptions, context_parallel
from trainer.distributed.context_parallel.plan import ring_plan
from trainer.distributed.layout import head_tail
from trainer.distributed.process_group import Process, process_group
from trainer.models.llama3.model import InnerAttention

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def relative(a: torch.Tensor, b: torch.Tensor, whole: torch.Tensor | None = None) -> float:
    """Euclidean error of a against b, as a share of b, or of the `whole` of which both are a part."""
    return ((a.double() - b.double()).norm() / (b if whole is None else whole).double().norm()).item()


def mesh_of_all(process: Process) -> DeviceMesh:
    return init_device_mesh(process.device.type, (process.world_size,), mesh_dim_names=("cp",))


def random_inputs(seq_len: int, heads: tuple[int, int], head_dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k, v and a cotangent of the output, the same on every rank."""
    generator = torch.Generator().manual_seed(seq_len + head_dim)
    shapes = [(2, h, seq_len, head_dim) for h in (heads[0], heads[1], heads[1], heads[0])]
    return [torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes]


def oracle(q, k, v, cotangent, scale):
    """Attention by its definition in float64: out, dq, dk, dv."""
    q, k, v = (x.detach().to(torch.float64, copy=True).requires_grad_() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).transpose(-1, -2) * scale
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    out = scores.masked_fill(later, -torch.inf).softmax(-1) @ v.repeat_interleave(group, 1)
    return out, *torch.autograd.grad(out, (q, k, v), cotangent.double())


def attention_case(cases: list[tuple]) -> list[dict]:
    """On each rank, for each case: relative errors of out, dq, dk, dv on its shard, and what was sent."""
    process = Process.from_environment()
    results = []
    with process_group(process, parse_command_line([]).config.comm):
        mesh = mesh_of_all(process)
        module = InnerAttention()
        ContextParallelAttention()._apply(module, mesh)
        for seq_len, heads, head_dim, dtype, balancer in cases:
            q, k, v, cotangent = random_inputs(seq_len, heads, head_dim, dtype)
            wanted = oracle(q, k, v, cotangent, 0.3)
            exchange.bytes_sent.clear()
            with context_parallel(
                mesh,
                buffers=[q, k, v, cotangent],
                buffer_seq_dims=[2, 2, 2, -2],
                options=ContextParallelOptions(load_balancer=balancer),
            ) as cp:
                shards = [x.clone().requires_grad_() for x in (q, k, v)]
                out = module(*shards, scale=0.3, plan=cp.attention_plan)
                grads = torch.autograd.grad(out, shards, cotangent.clone())
                mine = torch.from_numpy(cp.layout.indices(process.rank))
                assert cp.attention_calls == 1
            errors = [relative(got, whole[:, :, mine], whole) for got, whole in zip((out, *grads), wanted, strict=True)]
            row = 2 * 2 * heads[1] * head_dim
            size, acc = dtype.itemsize, max(dtype.itemsize, 4)
            planned = ring_plan(cp.layout, process.rank).rows_sent(process.rank)
            results.append(
                {
                    "errors": errors,
                    "sent": {kind: size for kind, size in exchange.bytes_sent.items() if size},
                    "planned": {
                        "ring_kv": (planned["forward"] + planned["backward"]) * row * size,
                        "ring_dkv": planned["home"] * row * acc,
                    },
                    "restored": relative(q, random_inputs(seq_len, heads, head_dim, dtype)[0]),
                }
            )
    return results


CASES = [
    (seq_len, heads, 8, torch.float64, balancer)
    for balancer in ("head_tail", "contiguous")
    for seq_len in (48, 37, 5, 2)
    for heads in ((4, 4), (4, 2), (4, 1))
] + [(64, (4, 2), head_dim, dtype, "head_tail") for head_dim in (4, 64) for dtype in (torch.float32, torch.bfloat16)]


@pytest.mark.parametrize("degree", [1, 2, 3, 4, 8])
def test_ring_equals_one_process(pool: WorkerPool, degree: int) -> None:
    """Every length, also fewer tokens than ranks; grouped heads; both layouts; and what is sent is what was planned."""
    for rank, results in enumerate(pool.run(degree, attention_case, CASES)):
        for case, result in zip(CASES, results, strict=True):
            tolerance = TOLERANCE[case[3]]
            assert all(error <= tolerance for error in result["errors"]), (rank, case, result["errors"])
            assert result["sent"] == {kind: size for kind, size in result["planned"].items() if size}, (rank, case)
            assert result["restored"] == 0


def bfloat16_error_case(seq_len: int) -> tuple[list[float], list[float]]:
    """Errors against float64 of context parallel bfloat16, and of the plain bfloat16 kernel on one process."""
    process = Process.from_environment()
    heads, head_dim = (4, 2), 64
    with process_group(process, parse_command_line([]).config.comm):
        mesh = mesh_of_all(process)
        module = InnerAttention()
        q, k, v, cotangent = random_inputs(seq_len, heads, head_dim, torch.bfloat16)
        wanted = oracle(q, k, v, cotangent, head_dim**-0.5)
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        plain = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
        plain = (plain, *torch.autograd.grad(plain, leaves, cotangent))
        ContextParallelAttention()._apply(module, mesh)
        with context_parallel(mesh, buffers=[q, k, v, cotangent], buffer_seq_dims=[2] * 4) as cp:
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            out = module(*leaves, plan=cp.attention_plan)
            got = (out, *torch.autograd.grad(out, leaves, cotangent.clone()))
            mine = torch.from_numpy(cp.layout.indices(process.rank))
        ours = [relative(a, b[:, :, mine]) for a, b in zip(got, wanted, strict=True)]
        return ours, [relative(a[:, :, mine], b[:, :, mine]) for a, b in zip(plain, wanted, strict=True)]


def test_bfloat16_is_as_exact_as_the_plain_kernel(pool: WorkerPool) -> None:
    for ours, plain in pool.run(4, bfloat16_error_case, 256):
        assert all(mine <= 2 * theirs for mine, theirs in zip(ours, plain, strict=True)), (ours, plain)


def guards_case() -> list[str]:
    """Each misuse and its message."""
    process = Process.from_environment()
    messages = []

    def refused(act) -> None:
        with pytest.raises(ContextParallelError) as error:
            act()
        messages.append(str(error.value))

    with process_group(process, parse_command_line([]).config.comm):
        mesh = mesh_of_all(process)
        module = InnerAttention()
        ContextParallelAttention()._apply(module, mesh)
        x = torch.randn(1, 2, 8, 4)
        tokens, table = torch.arange(8).reshape(1, 8), torch.randn(10, 2)
        enter = {"buffers": [tokens, table], "buffer_seq_dims": [1, 0]}

        refused(lambda: module(x, x, x))  # no plan

        with context_parallel(mesh, **enter) as cp:
            assert tokens.shape == (1, 4)
            assert table.shape == (4, 2)
            handle = cp.attention_plan
            shard = x[:, :, :4]
            module(shard, shard, shard, plan=handle)
            refused(lambda: module(x, x, x, plan=handle))  # inputs that were not cut

            def nest() -> None:
                with context_parallel(mesh, **enter):
                    pass

            refused(nest)
        assert tokens.tolist() == [list(range(8))]
        assert table.shape == (10, 2)
        refused(lambda: module(shard, shard, shard, plan=handle))  # outside

        def without_attention() -> None:
            with context_parallel(mesh, **enter):
                pass

        refused(without_attention)

        def body_raises() -> None:
            with context_parallel(mesh, **enter):
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):  # and nothing else on top of it
            body_raises()
        assert tokens.tolist() == [list(range(8))]

        for buffers, dims in (
            ([tokens, torch.zeros(3)], [1, 0]),
            ([nn.Parameter(torch.zeros(8))], [0]),
            ([tokens], []),
        ):

            def wrong(buffers=buffers, dims=dims) -> None:
                with context_parallel(mesh, buffers=buffers, buffer_seq_dims=dims):
                    pass

            refused(wrong)

        refused(lambda: ContextParallelOptions(method="all_gather"))
        refused(lambda: ContextParallelOptions(load_balancer="zigzag"))
        with context_parallel(
            mesh, buffers=[tokens, tokens, table], buffer_seq_dims=[1, 1, 0], no_restore_buffers=[table]
        ) as cp:
            assert tokens.shape == (1, 4)
            module(shard, shard, shard, plan=cp.attention_plan)
        assert tokens.shape == (1, 8)
        assert table.shape == (4, 2)
    return messages


def test_guards(pool: WorkerPool) -> None:
    for messages in pool.run(2, guards_case):
        words = ["got no plan", "got 8 rows", "open already", "outside its context", "none of the 1", "has 3 rows"]
        words += ["requires gradients", "1 buffers and 0", "'all_gather' is none of 'ring'", "'zigzag' is none of"]
        assert len(messages) == len(words)
        for message, word in zip(messages, words, strict=True):
            assert word in message
            assert len(message.splitlines()) == 1


def operator_case() -> dict[str, str]:
    """PyTorch's own checks of the operator: schema, autograd registration, shapes and strides without data, tracing."""
    process = Process.from_environment()
    with process_group(process, parse_command_line([]).config.comm):
        mesh = mesh_of_all(process)
        live = LivePlan(ring_plan(head_tail(16, 1), 0), mesh, 16)
        number = open_plan(live)
        q = torch.randn(2, 16, 4, 8).transpose(1, 2).requires_grad_()
        k = torch.randn(2, 16, 2, 8).transpose(1, 2).requires_grad_()
        v = torch.randn(2, 2, 16, 8, requires_grad=True)
        result = torch.library.opcheck(context_parallel_attention, (q, k, v, torch.full((2,), number), 0.3))
        close_plan(number)
    return result


def test_the_operator_keeps_the_rules_of_operators(pool: WorkerPool) -> None:
    (result,) = pool.run(1, operator_case)
    assert result
    assert set(result.values()) == {"SUCCESS"}
