"""Each refusal of the context, the operator and the style is one sentence, and similar valid uses work."""

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from longshard import (
    ContextParallelAttention,
    ContextParallelError,
    ContextParallelOptions,
    Mask,
    by_sequence,
    causal,
    context_parallel,
    documents,
    head_tail,
)
from longshard.context.live import parallelised_modules
from longshard.context.planning.lowering import lower
from longshard.context.planning.methods import _plan
from longshard.sharding.errors import OptionError
from tests.distributed.attention_cases import mesh_of_all
from tests.distributed.pool import WorkerPool
from tests.masks import dense
from trainer.config import parse_command_line
from trainer.models.attention import InnerAttention
from trainer.runtime.process_group import Process, process_group


class Refusals:
    """Collects calls that must be refused with some words, and were not."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.count = 0

    def __call__(self, words: str, act: Callable[[], object], kind: type[Exception] = ContextParallelError) -> None:
        self.count += 1
        try:
            act()
        except kind as error:
            message = str(error)
            if words not in message or len(message.splitlines()) != 1:
                self.problems.append(f"wanted {words!r}, got {message!r}")
        else:
            self.problems.append(f"wanted {words!r}, and nothing was refused")


def on_all_ranks(body: Callable[[DeviceMesh, Refusals], None]) -> tuple[int, list[str]]:
    """Run a body of refusals in a process group; return the number of calls, and the wrong ones."""
    process, refused = Process.from_environment(), Refusals()
    with process_group(process, parse_command_line([]).config.comm):
        body(mesh_of_all(process), refused)
    return refused.count, refused.problems


def parallel_attention(mesh: DeviceMesh) -> InnerAttention:
    return ContextParallelAttention()._apply(InnerAttention(), mesh)


def sequence() -> dict:
    """Buffers of 8 tokens and a rotary table of 10 rows, as arguments of `context_parallel`."""
    return {"buffers": [torch.arange(8).reshape(1, 8), torch.randn(10, 2)], "buffer_seq_dims": [1, 0]}


def entering(mesh: DeviceMesh, **settings) -> Callable[[], None]:
    def act() -> None:
        with context_parallel(mesh, **(sequence() | settings)):
            pass

    return act


def context_body(mesh: DeviceMesh, refused: Refusals) -> None:
    module, enter = parallel_attention(mesh), sequence()
    (tokens, table), x = enter["buffers"], torch.randn(1, 2, 8, 4)
    refused("got no plan", lambda: module(x, x, x))
    with context_parallel(mesh, **enter) as cp:
        assert tokens.shape == (1, 4)
        assert table.shape == (4, 2)
        handle, shard = cp.attention_plan, x[:, :, :4]
        module(shard, shard, shard, plan=handle)
        refused("got 8 rows", lambda: module(x, x, x, plan=handle))
        refused("open already", entering(mesh))
    assert tokens.tolist() == [list(range(8))]
    assert table.shape == (10, 2)
    refused("outside its context", lambda: module(shard, shard, shard, plan=handle))
    with context_parallel(mesh, **enter) as cp:
        refused("belongs to a context that is closed", lambda: module(shard, shard, shard, plan=handle))
        module(shard, shard, shard, plan=cp.attention_plan)
    refused("none of the 1", entering(mesh))

    def body_raises() -> None:
        with context_parallel(mesh, **enter):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):  # and nothing else on top of it
        body_raises()
    assert tokens.tolist() == [list(range(8))]
    buffers = [tokens, tokens, table]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1, 1, 0], no_restore_buffers=[table]) as cp:
        assert tokens.shape == (1, 4)
        module(shard, shard, shard, plan=cp.attention_plan)
    assert tokens.shape == (1, 8)
    assert table.shape == (4, 2)


def settings_body(mesh: DeviceMesh, refused: Refusals) -> None:
    tokens, x = torch.arange(8).reshape(1, 8), torch.randn(1, 2, 8, 4)
    with torch.inference_mode():
        inferred = torch.arange(8).reshape(1, 8)
    refused("has 3 rows", entering(mesh, buffers=[tokens, torch.zeros(3)]))
    refused("requires gradients", entering(mesh, buffers=[nn.Parameter(torch.zeros(8))], buffer_seq_dims=[0]))
    refused("made under `torch.inference_mode()`", entering(mesh, buffers=[inferred], buffer_seq_dims=[1]))
    refused("2 buffers and 0", entering(mesh, buffer_seq_dims=[]))
    refused("of shape (1, 8), cannot be cut in dimension 3", entering(mesh, buffer_seq_dims=[3, 0]))
    refused("cannot be cut in dimension 0", entering(mesh, buffers=[tokens, tokens], buffer_seq_dims=[1, 0]))
    refused("none of its buffers", entering(mesh, no_restore_buffers=[x]))
    refused("is for 1 x 9 queries", entering(mesh, mask=causal(9)))
    refused("is for 3 x 8 queries", entering(mesh, mask=by_sequence([causal(8)] * 3), sequences=1))
    refused("for 8 tokens on 3 ranks", entering(mesh, load_balancer=head_tail(8, 3)))
    refused("'zigzag' is none of 'auto', 'head_tail'", entering(mesh, load_balancer="zigzag"))
    refused("is none of 'ring', 'all_gather', 'all_to_all', 'hybrid'", entering(mesh, method="megatron"))
    refused("heads_per_pass = 2", lambda: ContextParallelOptions(heads_per_pass=2))
    refused("kernel = 'flashy' is none of 'auto', 'cpu_flash'", lambda: ContextParallelOptions(kernel="flashy"))
    refused("sliding_window = 0 shows nothing", lambda: ContextParallelAttention(sliding_window=0))
    with_dropout = InnerAttention()
    with_dropout.dropout_p = 0.1
    refused("dropout 0.1", lambda: ContextParallelAttention()._apply(with_dropout, mesh))
    refused("dropout 0.2", lambda: ContextParallelAttention()._apply(nn.Sequential(nn.Dropout(0.2)), mesh))
    ContextParallelAttention()._apply(nn.Sequential(nn.Dropout(0.0)), mesh)


def calls_body(mesh: DeviceMesh, refused: Refusals) -> None:
    module, x = parallel_attention(mesh), torch.randn(1, 2, 4, 4)

    def call(options: ContextParallelOptions, heads: int, scale: float | None = None) -> torch.Tensor:
        with context_parallel(mesh, **sequence(), options=options) as cp:
            q = torch.randn(1, heads, 4, 4)
            return module(q, q, q, scale=scale, plan=cp.attention_plan)

    all_to_all = ContextParallelOptions("all_to_all")
    refused("'all_to_all' over 2 ranks cannot divide 3 query heads", lambda: call(all_to_all, 3))
    refused("'cudnn' cannot do tensors on cpu", lambda: call(ContextParallelOptions(kernel="cudnn"), 2), OptionError)
    for scale in (float("nan"), float("inf"), 0.0, -1.0):
        refused(f"got scale = {scale}; it must be a number above 0", lambda s=scale: call(all_to_all, 2, s))
    call(all_to_all, heads=4)
    call(ContextParallelOptions(kernel="math"), heads=2)

    with context_parallel(mesh, **sequence()) as cp:

        def attend(q: torch.Tensor) -> torch.Tensor:
            return module(q, q, q, plan=cp.attention_plan)

        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, x)
            refused("no forward-mode derivative", lambda: attend(dual))
        refused("no forward-mode derivative", lambda: torch.func.jvp(attend, (x,), (x,)))
        attend(x)


def hybrid_body(mesh: DeviceMesh, refused: Refusals) -> None:
    """Unequal heads of a hybrid name the method that was asked for."""
    hybrid = init_device_mesh(mesh.device_type, (2, 2), mesh_dim_names=("ring", "a2a"))
    module = ContextParallelAttention()._apply(InnerAttention(), hybrid._flatten("cp"))
    options = ContextParallelOptions("hybrid", hybrid_degrees=(2, 2))
    with context_parallel(hybrid, **sequence(), options=options) as cp:
        q, even = torch.randn(1, 3, 2, 4), torch.randn(1, 2, 2, 4)
        refused("'hybrid' over 2 ranks cannot divide 3 query heads", lambda: module(q, q, q, plan=cp.attention_plan))
        module(even, even, even, plan=cp.attention_plan)


def sequences_body(mesh: DeviceMesh, refused: Refusals) -> None:
    """Masks of each sequence, whatever the place of the sequence's dimension and of the batch's."""
    module, rank = parallel_attention(mesh), mesh.get_local_rank()
    two, shard = torch.arange(16).reshape(2, 8), torch.randn(1, 2, 4, 4)
    mask = by_sequence([causal(8), documents([3, 5])])  # the module attends causally
    with context_parallel(mesh, buffers=[two], buffer_seq_dims=[1], mask=mask) as cp:
        handle, pair = cp.attention_plan, torch.randn(2, 2, 4, 4)
        refused("got 1 sequences and a plan for 2", lambda: module(shard, shard, shard, plan=handle))
        whole = module(pair, pair, pair, plan=handle)
        some, three, short = pair[:1], torch.randn(2, 3, 4, 4), pair[:, :, :3]
        refused("q (2, 2, 4, 4), k (1, 2, 4, 4)", lambda: module(pair, some, some, plan=handle))
        refused("k (2, 3, 4, 4)", lambda: module(torch.randn(2, 4, 4, 4), three, three, plan=handle))
        refused("v (2, 2, 3, 4)", lambda: module(pair, pair, short, plan=handle))
        other = torch.cat([handle[:1], handle[:1] + (1 << 20)])
        refused("names 2 plans", lambda: module(pair, pair, pair, plan=other))
        # A part of the batch takes its part of the handle along.
        last = module(pair[1:], pair[1:], pair[1:], plan=handle[1:])
        assert torch.allclose(last, whole[1:])
    both = torch.arange(32).reshape(2, 16)
    views = [both[:, :8], both[:, 8:]]  # tokens and labels of one storage
    with context_parallel(mesh, buffers=views, buffer_seq_dims=[1, 1]) as cp:
        own_rows = torch.from_numpy(cp.layout.indices(rank))
        for part, x in enumerate(views):
            assert torch.equal(x, torch.stack([own_rows, own_rows + 16]) + 8 * part)
        module(pair, pair, pair, plan=cp.attention_plan)
    assert torch.equal(torch.cat(views, dim=1), torch.arange(32).reshape(2, 16))


@pytest.mark.parametrize(
    ("body", "degree", "count"),
    [
        (context_body, 2, 6),
        (settings_body, 2, 17),
        (calls_body, 2, 8),
        (hybrid_body, 4, 1),
        (sequences_body, 2, 5),
    ],
)
def test_what_would_be_silently_wrong_is_one_sentence(
    pool: WorkerPool, body: Callable, degree: int, count: int
) -> None:
    assert pool.run(degree, on_all_ranks, body) == [(count, [])] * degree


def rows_case(order: str) -> float:
    """Return the error of attention with a mask for each sequence, buffers of another order, and a rotary table."""
    process = Process.from_environment()
    masks = [documents([3, 5], is_causal=True), causal(8), documents([8, 0])]
    q = torch.randn(3, 2, 8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    visible = torch.from_numpy(dense(by_sequence(masks) & causal(8))).unsqueeze(1)
    wanted = F.scaled_dot_product_attention(q, q, q, attn_mask=visible)
    table = torch.arange(20.0).reshape(10, 2)
    with process_group(process, parse_command_line([]).config.comm):
        mesh = mesh_of_all(process)
        module = parallel_attention(mesh)
        buffers, dims = {
            "sequence first": ([q.permute(2, 0, 1, 3).contiguous(), table], [0, 0]),
            "heads first": ([q.clone(), table], [2, 0]),
            "rotary first": ([table[:8].clone(), q.clone()], [0, 2]),
        }[order]
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=dims, mask=by_sequence(masks), sequences=3) as cp:
            own_rows = torch.from_numpy(cp.layout.indices(process.rank))
            part = q[:, :, own_rows]
            assert any(torch.equal(x, part) or torch.equal(x, part.permute(2, 0, 1, 3)) for x in buffers)
            out = module(part, part, part, plan=cp.attention_plan)
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=dims, mask=by_sequence(masks)) as cp:
            assert len(cp.attention_plan) == 3  # the different rows of the mask
            module(part, part, part, plan=cp.attention_plan)
    return ((out - wanted[:, :, own_rows]).norm() / wanted.norm()).item()


@pytest.mark.parametrize("order", ["sequence first", "heads first", "rotary first"])
def test_masks_of_each_sequence_for_any_order_of_dimensions(pool: WorkerPool, order: str) -> None:
    assert max(pool.run(2, rows_case, order)) < 1e-12


def copies_case() -> list[bool]:
    """Whether copies of a parallelised module attend as it does, and are counted where they run over its group."""
    process = Process.from_environment()
    with process_group(process, parse_command_line([]).config.comm):
        mesh = mesh_of_all(process)
        model, file = nn.Sequential(parallel_attention(mesh)), io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        copied = copy.deepcopy(model)
        copies = [copied, pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)]
        counted = parallelised_modules(mesh) == 2  # a group cannot be saved
        x = torch.randn(1, 2, 4, 4)
        with context_parallel(mesh, **sequence()) as cp:
            same = [
                torch.equal(m[0](x, x, x, plan=cp.attention_plan), model[0](x, x, x, plan=cp.attention_plan))
                for m in copies
            ]
        return [counted, *same]


def test_a_parallelised_module_can_be_copied_pickled_and_saved(pool: WorkerPool) -> None:
    assert pool.run(2, copies_case) == [[True] * 4] * 2


def consistency_case(fault: str, check: bool) -> str:
    """The message of a context in which rank 2 differs from the others."""
    process = Process.from_environment()
    odd = process.rank == 2
    with process_group(process, parse_command_line([]).config.comm):
        tokens = torch.arange(24).reshape(2, 12) + (odd and fault == "batch")
        options = ContextParallelOptions(load_balancer="contiguous" if odd and fault == "layout" else "head_tail")
        mask: Mask = documents([5, 7] if odd and fault == "mask" else [6, 6])
        buffers: dict = {"buffers": [tokens], "buffer_seq_dims": [1], "local_attention": True}
        try:
            with context_parallel(mesh_of_all(process), **buffers, mask=mask, options=options, check_consistency=check):
                return "entered"
        except ContextParallelError as error:
            return str(error)


@pytest.mark.parametrize("fault", ["batch", "layout", "mask"])
def test_a_rank_that_differs_is_named_before_anything_is_sent(pool: WorkerPool, fault: str) -> None:
    for message in pool.run(4, consistency_case, fault, True):
        assert f"the same {'batch' if fault == 'batch' else 'plan'}" in message
        assert "rank(s) [2] of the group differ" in message
        assert len(message.splitlines()) == 1


def test_ranks_that_agree_pass_and_without_the_check_nobody_notices(pool: WorkerPool) -> None:
    assert set(pool.run(4, consistency_case, "nothing", True)) == {"entered"}
    assert set(pool.run(4, consistency_case, "batch", False)) == {"entered"}


def planned_case() -> list[tuple[int, int]]:
    """Count the plans made and the plans lowered, in 20 equal steps and in 21 steps of seven masks."""
    process = Process.from_environment()
    counts = []
    with process_group(process, parse_command_line([]).config.comm):
        mesh = mesh_of_all(process)
        module = parallel_attention(mesh)
        for lengths in ([[8, 8]] * 20, [[length, 16 - length] for length in range(1, 8)] * 3):
            before = planning_calls()
            for step in lengths:
                x = torch.arange(16.0).reshape(1, 1, 16, 1).repeat(1, 2, 1, 8)
                with context_parallel(mesh, buffers=[x], buffer_seq_dims=[2], mask=documents(step)) as cp:
                    q = x.clone().requires_grad_()
                    module(q, q, q, plan=cp.attention_plan).sum().backward()
            counts.append(tuple(after - b for after, b in zip(planning_calls(), before, strict=True)))
    return counts


def planning_calls() -> tuple[int, int]:
    return _plan.cache_info().misses, lower.cache_info().misses


def test_equal_steps_are_planned_once(pool: WorkerPool) -> None:
    """Documents that change are planned again, which the counter sees."""
    for counts in pool.run(2, planned_case):
        assert counts == [(1, 1), (7, 7)]
