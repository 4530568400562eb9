"""Law: the operator of context parallelism is attention of one process, in outputs and in gradients.

The law holds for every method, layout, mask, ratio of heads and data type. Cotangents are random.
"""

import dataclasses
from collections import Counter
from itertools import product
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from longshard.context.attention import (
    context_parallel_attention,
    operator,
)
from longshard.context.attention_inputs import AttentionSettings
from longshard.context.execution import build
from longshard.context.live import LivePlan, opened
from longshard.context.planning.balance import LOAD_BALANCERS
from longshard.context.planning.options import ContextParallelError, ContextParallelOptions
from longshard.sharding.layout import head_tail
from scripts.gpu_blocks.block import largest
from tests.distributed.attention_cases import (
    BATCH,
    MASKS,
    METHODS,
    Case,
    assert_exact,
    attention_case,
    mesh_of_all,
    relative,
)
from tests.distributed.pool import WorkerPool
from tests.slow import slow
from trainer.config.loader import parse_command_line
from trainer.runtime.process_group import Process, process_group


def cases_of(method: str, lengths: tuple[int, ...] = (48, 37, 5, 2)) -> list[Case]:
    """Layouts x masks x lengths; a length meets another head ratio under each mask and each layout."""
    ratios = [(24, 8), (24, 2), (24, 1), (24, 24)] if method == "all_to_all" else [(8, 8), (8, 2), (8, 1), (24, 6)]
    cases = []
    for b, balancer in enumerate(LOAD_BALANCERS):
        for m, mask in enumerate(MASKS):
            for n, seq_len in enumerate(lengths):
                options = ContextParallelOptions(method, balancer)
                cases.append(Case(seq_len, ratios[(b + m + n) % len(ratios)], options=options, **mask))
    return cases


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("degree", [3, *slow(1, 2, 4, 6, 8)])
def test_every_method_layout_and_mask_equals_one_process(pool: WorkerPool, degree: int, method: str) -> None:
    """Every length, also fewer tokens than ranks; grouped heads; rows that see nothing."""
    assert_exact(pool, degree, cases_of(method, (37, 5) if degree > 4 else (48, 37, 5, 2)))


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [(2, 2), (2, 4), (4, 2), (3, 2)])
def test_a_ring_of_head_groups(pool: WorkerPool, degrees: tuple[int, int]) -> None:
    """hybrid: all-to-all inside, ring outside, with every layout, mask and length."""
    cases = cases_of("all_to_all", (37, 5))
    hybrids = [
        dataclasses.replace(
            case,
            options=ContextParallelOptions(
                "hybrid", case.options.load_balancer, hybrid_degrees=degrees, heads_per_pass=number % 3
            ),
        )
        for number, case in enumerate(cases)
    ]
    assert_exact(pool, degrees[0] * degrees[1], hybrids)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("degree", [3, *slow(1)])
def test_sinks_take_their_share_once(pool: WorkerPool, degree: int, method: str) -> None:
    """Applied after the merge, with their own gradient, also where a query sees nothing but its sink."""
    options = ContextParallelOptions(method)
    cases = [Case(26, (6, 2), options=options, sinks=True, **mask) for mask in MASKS]
    assert_exact(pool, degree, [*cases, Case(26, (6, 6), 16, torch.bfloat16, options, sinks=True)])


@pytest.mark.parametrize(
    ("degree", "options"),
    [
        (3, ContextParallelOptions("all_to_all", "contiguous", keep_exchanged=True)),
        *slow(
            (2, ContextParallelOptions("all_to_all", keep_exchanged=True)),
            (4, ContextParallelOptions("hybrid", "balanced", hybrid_degrees=(2, 2), keep_exchanged=True)),
        ),
    ],
    ids=lambda value: value if isinstance(value, int) else value.method,
)
def test_what_was_exchanged_can_be_kept(pool: WorkerPool, degree: int, options: ContextParallelOptions) -> None:
    """The backward sends the gradient of the output alone to the ranks of the heads."""
    cases = [Case(length, (12, 6), options=options, **mask) for length in (26, 5, 2) for mask in MASKS]
    cases += [Case(21, heads, options=options, mask="documents") for heads in RATIOS]
    cases += [Case(26, (6, 2), options=options, sinks=True, **mask) for mask in MASKS]
    cases += [Case(26, (12, 2), 16, dtype, options, sinks=True) for dtype in (torch.bfloat16, torch.float32)]
    assert_exact(pool, degree, cases)
    again = [dataclasses.replace(case, options=dataclasses.replace(options, keep_exchanged=False)) for case in cases]
    results = (pool.run(degree, attention_case, some)[0] for some in (cases, again))
    kept, exchanged = (sum(sum(result["sent"].values()) for result in some) for some in results)
    assert kept < 0.8 * exchanged


def kept_of_another_length_case() -> str:
    """The message for more keys than queries."""
    process = Process.from_environment()
    options = ContextParallelOptions("all_to_all", keep_exchanged=True)
    with process_group(process, parse_command_line([]).config.comm):
        layouts = [options.layout(length, 2) for length in (8, 12)]
        q, k = (torch.zeros(1, 2, layout.local_length(process.rank), 8) for layout in layouts)
        live = LivePlan(mesh_of_all(process), layouts[0], None, options, layouts[1])
        with opened(live, 1) as handle, pytest.raises(ContextParallelError) as error:
            context_parallel_attention(q, k, k, handle, AttentionSettings(0.3, keep_exchanged=True))
    return str(error.value)


def test_only_self_attention_keeps_what_was_exchanged(pool: WorkerPool) -> None:
    for message in pool.run(2, kept_of_another_length_case):
        assert "use keep_exchanged = False" in message


RATIOS = [(12, 12), (12, 6), (12, 4), (12, 3), (12, 2), (12, 1)]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("degree", [4, *slow(2)])
def test_every_head_ratio(pool: WorkerPool, degree: int, method: str) -> None:
    """Cases have fewer key/value heads than ranks, and numbers that have no common factor with the degree."""
    options = ContextParallelOptions(method)
    assert_exact(pool, degree, [Case(21, heads, options=options, mask="documents") for heads in RATIOS])


@pytest.mark.parametrize("method", ["ring", "all_to_all", *slow("all_gather")])
def test_ranks_without_tokens(pool: WorkerPool, method: str) -> None:
    """Empty shards of one key/value head or several, with masks of each sequence: empty results share no memory."""
    options = ContextParallelOptions(method, "contiguous")
    cases = [
        Case(seq_len, (6, kv_heads), head_dim, options=options, mask=mask)
        for seq_len in (1, 2)
        for kv_heads in (1, 2, 6)
        for head_dim in (1, 8)
        for mask in ("documents", "none")
    ]
    assert_exact(pool, 3, cases)


@pytest.mark.parametrize("method", ["ring", *slow("all_gather", "all_to_all")])
def test_keys_more_or_fewer_than_queries(pool: WorkerPool, method: str) -> None:
    """The last query stands at the last key; queries before the first key see nothing."""
    cases = [
        Case(seq_len, (6, 3), options=ContextParallelOptions(method, balancer), kv_len=kv_len, **mask)
        for balancer in LOAD_BALANCERS
        for seq_len, kv_len in ((20, 33), (33, 20), (7, 2), (2, 9))
        for mask in MASKS[:4]
    ]
    assert_exact(pool, 3, cases)


@pytest.mark.parametrize("method", ["all_to_all", *slow("all_gather")])
def test_a_few_heads_at_a_time(pool: WorkerPool, method: str) -> None:
    """Results are the same, the same bytes are sent in more exchanges; a last pass may be smaller."""
    numbers = (0, 1, 2, 3)
    if method == "all_to_all":  # four query heads of a key/value head, with copies of these and without
        options = [ContextParallelOptions(method, query_heads_per_pass=n) for n in (1, 3)]
        settings = product(options, (1, 2), ("none", "documents"), (0, 5))
        assert_exact(pool, 2, [Case(24, (8, n), options=o, mask=mask, window=w) for o, n, mask, w in settings])
    cases = [
        Case(24, (16, 8), options=ContextParallelOptions(method, heads_per_pass=number), mask=mask)
        for number in numbers
        for mask in ("none", "documents")
    ]
    assert_exact(pool, 2, cases)
    (results, _) = pool.run(2, attention_case, cases[::2])
    by_number = [sum(result["calls"].values()) for result in results]
    assert by_number[1] > by_number[2] > by_number[0]
    assert len({sum(result["sent"].values()) for result in results}) == 1


def strides_case(method: str) -> list[float]:
    """Differences of results and gradients between inputs that lie in memory in an odd way and the same, contiguous."""
    process = Process.from_environment()
    case = Case(24, (4, 2), 8)
    with process_group(process, parse_command_line([]).config.comm):
        mesh = mesh_of_all(process)
        options = ContextParallelOptions(method)
        layout = options.layout(24, mesh.size())
        own_rows = torch.from_numpy(layout.indices(process.rank))
        *shards, cotangent = (x[:, :, own_rows].to(process.device) for x in case.inputs())
        results = []
        odd = [
            lambda x: x,
            lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
            lambda x: x.repeat_interleave(2, dim=3)[..., ::2],
            lambda x: x.permute(2, 0, 3, 1).contiguous().permute(1, 3, 0, 2),
        ]
        with opened(LivePlan(mesh, layout, options=options), BATCH) as handle:
            for change in odd:
                leaves = [change(x).requires_grad_() for x in shards]
                out, lse, *_ = context_parallel_attention(*leaves, handle, AttentionSettings(0.3))
                assert not lse.requires_grad  # nobody would add its gradient
                results.append([out, *torch.autograd.grad(out, leaves, change(cotangent))])
    return [relative(a, b) for result in results[1:] for a, b in zip(result, results[0], strict=True)]


@pytest.mark.parametrize("method", ["all_to_all", *slow("ring", "all_gather")])
def test_strides_do_not_matter(pool: WorkerPool, method: str) -> None:
    for errors in pool.run(2, strides_case, method):
        assert len(errors) == 12
        assert largest(*errors) < 1e-12


@pytest.mark.parametrize("method", ["ring", *slow("all_gather", "all_to_all")])
def test_data_types_and_head_sizes(pool: WorkerPool, method: str) -> None:
    options = ContextParallelOptions(method)
    cases = [
        Case(40, (4, 2), head_dim, dtype, options, window=window)
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
        for head_dim in (4, 80, 256)
        for window in (0, 9)
    ]
    assert_exact(pool, 2, cases)


def test_a_kernel_that_is_asked_for_is_used(pool: WorkerPool) -> None:
    options = ContextParallelOptions(kernel="math")
    assert_exact(pool, 2, [Case(30, options=options, **mask) for mask in MASKS])


def own_communicators_case(cases: list[Case], can_split: bool) -> tuple[list[dict], Counter[str]]:
    """As where one communicator is one queue: K/V are sent apart from FSDP's collectives, and their gradients apart.

    can_split: as on GPUs, where a group is split off its parent.
    """
    made, new_group = Counter(), dist.new_group

    def split(parent: dist.ProcessGroup, parts: list[list[int]], **settings: object) -> dist.ProcessGroup:
        """Gloo cannot; so make the group of the same ranks again."""
        (places,) = parts
        ranks = dist.get_process_group_ranks(parent)
        assert can_split
        made[settings["group_desc"]] += 1
        return new_group([ranks[place] for place in places], use_local_synchronization=True, **settings)

    def made_again(*arguments: object, **settings: object) -> dist.ProcessGroup:
        assert not (can_split and "cp_" in str(settings.get("group_desc")))
        made[settings.get("group_desc")] += 1
        return new_group(*arguments, **settings)

    with (
        mock.patch.object(build, "_is_queue", return_value=True),
        mock.patch.object(build, "_can_split", return_value=can_split),
        mock.patch.object(dist, "new_group", made_again),
        mock.patch.object(dist, "split_group", split),
    ):
        results = attention_case(cases)
    return results, made


@pytest.mark.parametrize("can_split", [True, *slow(False)])
def test_keys_and_gradients_have_communicators_of_their_own_where_one_is_a_queue(
    pool: WorkerPool, can_split: bool
) -> None:
    options = [ContextParallelOptions(method) for method in METHODS]
    options.append(ContextParallelOptions("hybrid", hybrid_degrees=(2, 2)))
    cases = [Case(37, (8, 4), options=each, mask="documents") for each in options for _ in range(2)]
    for results, groups in pool.run(4, own_communicators_case, cases, can_split):
        assert max(error for result in results for error in result["errors"]) < 1e-12
        # Of all ranks, once for all cases, and for each hybrid mesh: the ring, and for K/V the ranks that divide heads.
        assert (groups["cp_dkv"], groups["cp_kv"]) == (3, 5)


def operator_case() -> dict[str, str]:
    """PyTorch's own checks of the operator: schema, autograd registration, shapes and strides without data, tracing."""
    process = Process.from_environment()
    with process_group(process, parse_command_line([]).config.comm):
        q = torch.randn(2, 16, 4, 8, device=process.device).transpose(1, 2).requires_grad_()
        k = torch.randn(2, 16, 2, 8, device=process.device).transpose(1, 2).requires_grad_()
        v = torch.randn(2, 2, 16, 8, device=process.device, requires_grad=True)
        with opened(LivePlan(mesh_of_all(process), head_tail(16, 1)), 2) as handle:
            arguments = q, k, v, handle
            result = torch.library.opcheck(operator, (*arguments, [*AttentionSettings(0.3)]))
            torch.library.opcheck(operator, (*arguments, [*AttentionSettings(0.3, False, 5)]))
    return result


@pytest.mark.slow
def test_the_operator_keeps_the_rules_of_operators(pool: WorkerPool) -> None:
    (result,) = pool.run(1, operator_case)
    assert result
    assert set(result.values()) == {"SUCCESS"}
