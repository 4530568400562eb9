"""The choice of a method where the configuration leaves it open: by what the plan says is sent."""

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

from longshard.context.planning.auto import _outside, choose
from longshard.context.planning.cost import (
    SHORT_SHARD,
    AttentionShape,
    attention_cost,
    shortest_ring,
)
from longshard.context.planning.mask import Mask, causal, full, sliding_window
from longshard.context.planning.methods import METHODS, make_plan
from longshard.context.planning.options import BatchPlan, ContextParallelOptions
from trainer.config.loader import parse_command_line
from trainer.families.decoder_args import LLAMA3 as FLAVORS
from trainer.job import attention, resolve
from trainer.job.attention import resolve_attention
from trainer.runtime.nodes import ranks_of_each_node

LLAMA_8B = AttentionShape(1, 32, 8, 128, 2)
OPTIONS = ContextParallelOptions()


def chosen(masks: list[Mask], degree: int, shape: AttentionShape = LLAMA_8B) -> ContextParallelOptions:
    return choose(OPTIONS, tuple(masks), degree, shape)[0]


def busiest(options: ContextParallelOptions, masks: list[Mask], degree: int) -> int:
    heads = options.hybrid_degrees and options.hybrid_degrees[0]
    layout = options.layout(masks[0].q_len, degree)
    plans = [
        [make_plan(layout, mask, options.method, rank, head_degree=heads) for mask in masks] for rank in range(degree)
    ]
    return max(
        sum(
            attention_cost(plan, LLAMA_8B, way).bytes_sent.total()
            for plan in rank_plans
            for way in ("forward", "backward")
        )
        for rank_plans in plans
    )


@pytest.mark.parametrize("degree", [2, 4, 8, 16])
@pytest.mark.parametrize("window", [None, 4096])
def test_nothing_sends_much_less_than_what_is_chosen(degree: int, window: int | None) -> None:
    seq_len = 2 * SHORT_SHARD * degree
    masks = [causal(seq_len) if window is None else sliding_window(seq_len, window)]
    got = busiest(chosen(masks, degree), masks, degree)
    for method in ("ring", "all_gather", "all_to_all"):
        assert got <= 1.1 * busiest(replace(OPTIONS, method=method), masks, degree), method


def test_many_ranks_divide_the_heads_and_a_window_or_one_head_does_not() -> None:
    long = 32 * SHORT_SHARD
    assert chosen([causal(long)], 16).method in ("all_to_all", "hybrid")
    assert chosen([sliding_window(long, 128)], 16).method == "ring"
    assert chosen([causal(3 * long)], 16, AttentionShape(1, 1, 1, 128, 2)).method == "ring"


def test_heads_that_no_number_of_ranks_divides_leave_the_ring_or_all_gather() -> None:
    shape = AttentionShape(1, 7, 7, 128, 2)
    assert chosen([causal(8 * SHORT_SHARD)], 4, shape).method == "ring"
    assert chosen([causal(2 * SHORT_SHARD)], 4, shape).method == "all_gather"


def test_a_ring_of_more_stages_needs_longer_shards() -> None:
    """Each stage has its launches; a window that reaches one neighbour has two stages on any number of ranks."""
    one_head = AttentionShape(1, 1, 1, 128, 2)
    for degree in (8, 16, 64):
        shortest = shortest_ring(degree)
        assert chosen([causal(shortest * degree)], degree, one_head).method == "ring"
        assert chosen([causal((shortest - 2) * degree)], degree, one_head).method == "all_gather"
        assert chosen([sliding_window(2 * SHORT_SHARD * degree, 128)], degree, one_head).method == "ring"


def test_a_hybrid_is_chosen_where_the_degree_is_more_than_the_heads() -> None:
    shape = AttentionShape(1, 8, 2, 128, 2)
    options = chosen([causal(32 * SHORT_SHARD)], 16, shape)
    assert options.method == "hybrid"
    assert options.hybrid_degrees[0] * options.hybrid_degrees[1] == 16
    assert 8 % options.hybrid_degrees[0] == 0


def test_the_reason_is_said_with_its_numbers() -> None:
    arguments = ["--parallelism.context_parallel_degree=4", "--parallelism.context_parallel_method=auto"]
    job = resolve(parse_command_line(arguments).config, 4)
    options, reason = job.attention, job.attention_reason
    assert options.method in reason
    assert "MiB" in reason
    assert "8/4 heads over 4 ranks" in reason
    assert resolve(parse_command_line(arguments[:1]).config, 4).attention_reason == ""


AUTO = [
    "--parallelism.context_parallel_degree=8",
    "--parallelism.context_parallel_method=auto",
    "--training.attention_mask=document",
    f"--training.seq_len={16 * SHORT_SHARD}",
]
ONE_DOCUMENT, MANY = [16 * SHORT_SHARD], [SHORT_SHARD // 4] * 64


def planned(lengths: list[int], *options: str, device_type: str = "cuda") -> BatchPlan:
    """The plan that the trainer makes for a batch of packed documents."""
    job = resolve(parse_command_line([*AUTO, "--model.flavor=8B", *options]).config, 8, device_type)
    ids = np.repeat(np.arange(len(lengths)), lengths)[None]
    return BatchPlan.of({"document_ids": ids}, 8, job.attention, job.method_chooser())


def test_the_documents_of_a_batch_decide() -> None:
    """One long document is worth an exchange of heads; short ones hardly leave their rank."""
    long, short = planned(ONE_DOCUMENT), planned(MANY)
    assert long.options.method == "all_to_all"
    assert short.options.method in ("ring", "all_gather")
    assert "MiB" in short.reason
    for plan in (long, short):  # with this batch's mask, not with the causal one
        mask = plan.mask & causal(plan.mask.q_len)
        least = min(busiest(replace(plan.options, method=m), [mask], 8) for m in ("ring", "all_gather", "all_to_all"))
        assert busiest(plan.options, [mask], 8) <= 1.1 * least


def test_no_batch_asks_for_a_mesh_of_its_own() -> None:
    """Hybrid needs a 2-D mesh, and meshes are made before the first batch."""
    sixteen = ["--parallelism.context_parallel_degree=16", "--model.flavor=8B"]
    config = parse_command_line([*AUTO, *sixteen]).config
    assert resolve_attention(config, replace(FLAVORS["8B"], n_heads=8, n_kv_heads=2), "cuda")[0].method != "hybrid"
    for others in (AUTO[:2], [AUTO[0], *AUTO[2:]]):
        assert resolve(parse_command_line(others).config, 8).method_chooser() is None


@pytest.mark.parametrize(
    ("arguments", "device_type", "itemsize"),
    [
        ([], "cuda", 2),
        ([], "cpu", 4),
        (["--training.dtype=float64"], "cuda", 8),
        (["--training.dtype=bfloat16"], "cpu", 2),
        (["--training.mixed_precision_param=float32"], "cuda", 4),
        (["--training.mixed_precision_param=bfloat16"], "cpu", 2),
    ],
)
def test_bytes_are_those_of_the_data_type_that_computes(arguments: list[str], device_type: str, itemsize: int) -> None:
    """Gradients of K and V are summed in float32 at least, so that the choice depends on it."""
    chosen_for = mock.Mock(wraps=choose)
    with mock.patch.object(attention, "choose", chosen_for):
        resolve_attention(parse_command_line([*AUTO, *arguments]).config, FLAVORS["8B"], device_type)
    assert chosen_for.call_args.args[3].itemsize == itemsize


def test_the_balancer_of_auto_is_that_of_the_method() -> None:
    """Ranks that attend over the whole sequence have equal work in any layout, and messages in order are not copied."""
    hybrid = {"hybrid": (2, 2)}
    balancers = {name: ContextParallelOptions(name, hybrid_degrees=hybrid.get(name)).balancer for name in METHODS}
    assert balancers == {
        "ring": "head_tail",
        "all_gather": "head_tail",
        "all_to_all": "contiguous",
        "hybrid": "head_tail",
    }
    assert ContextParallelOptions("all_to_all", "balanced").balancer == "balanced"


# ---- several nodes

LLAMA_70B = replace(LLAMA_8B, heads=64)
TABLE = [
    # ranks, ranks of a node, 8B, 70B; a ring of nodes, or inside a node what sends least
    (8, 8, ("all_to_all", None), ("all_to_all", None)),
    (8, 4, ("hybrid", (4, 2)), ("hybrid", (4, 2))),
    (16, 16, ("hybrid", (8, 2)), ("hybrid", (8, 2))),
    (16, 8, ("hybrid", (8, 2)), ("hybrid", (8, 2))),
    (16, 4, ("hybrid", (8, 2)), ("hybrid", (4, 4))),
    (32, 32, ("hybrid", (16, 2)), ("hybrid", (16, 2))),
    (32, 8, ("hybrid", (8, 4)), ("hybrid", (8, 4))),
    (64, 64, ("hybrid", (32, 2)), ("hybrid", (32, 2))),
    (64, 8, ("hybrid", (8, 8)), ("hybrid", (8, 8))),
]


@pytest.mark.parametrize(("ranks", "node", "expected_8b", "expected_70b"), TABLE)
def test_heads_are_exchanged_inside_a_node_where_links_are_fast(
    ranks: int, node: int, expected_8b: tuple, expected_70b: tuple
) -> None:
    results = []
    for shape in (LLAMA_8B, LLAMA_70B):
        options, reason = choose(OPTIONS, (causal(16384 * ranks),), ranks, shape, node=node)
        results.append((options.method, options.hybrid_degrees))
        assert ("a byte off node counted 9 times" in reason) == (node < ranks)
        assert (" off node)" in reason) == (node < ranks)
    assert results == [expected_8b, expected_70b]


@pytest.mark.parametrize(
    ("method", "heads", "mask", "rank", "share"),
    [
        ("all_to_all", 8, causal(4096), 4, 4 / 7),  # of the seven others of a rank, four
        ("hybrid", 4, causal(4096), 4, None),  # heads stay inside, K/V leave
        ("ring", 1, full(4096), 4, 1.0),  # the first rank of a node sends all its rows to the last one of another
        ("ring", 1, full(4096), 5, 0.0),
        ("all_gather", 1, causal(4096), 4, 1 / 7),  # four of seven shards arrive once, over the links of four ranks
        ("ring", 1, sliding_window(4096, 100), 3, 0.5),  # to its two neighbours in the sequence, by two ranges
    ],
)
def test_what_leaves_a_node_of_four_of_eight_ranks(
    method: str, heads: int, mask: Mask, rank: int, share: float | None
) -> None:
    way = replace(OPTIONS, method=method, hybrid_degrees=(4, 2) if heads == 4 else None)
    plan = make_plan(way.layout(4096, 8), mask, method, rank, head_degree=heads)
    sent = attention_cost(plan, LLAMA_8B, "forward").bytes_sent
    outside = _outside(plan, "forward", sent, 4)
    assert outside == (sent["kv"] if share is None else round(share * sent.total()))
    assert (share == 0.0) == (outside == 0)
    assert _outside(plan, "forward", sent, 8) == 0


@pytest.mark.parametrize("documents", [False, True])
def test_the_ranks_of_a_node_are_known_to_the_job(documents: bool) -> None:
    """With tensor parallelism over two ranks, four ranks of a node share a sequence."""
    arguments = [
        *AUTO[:2],
        "--parallelism.tensor_parallel_degree=2",
        "--model.flavor=8B",
        *AUTO[2 if documents else 3 :],
    ]
    config = parse_command_line(arguments).config
    chosen_for = mock.Mock(wraps=choose)
    with mock.patch.object(attention, "choose", chosen_for):
        for node in (8, None, 16):
            job = resolve(config, 16, node=node)
            if documents:
                job.method_chooser()(causal(16 * SHORT_SHARD))
    sharing = [call.kwargs["node"] for call in chosen_for.call_args_list]
    assert sharing == [4] * (4 if documents else 2) + [8] * (2 if documents else 1)
    assert resolve(config, 16, "cpu").node == 16


@pytest.mark.parametrize(
    ("variables", "node"),
    [
        ({}, None),
        ({"LOCAL_WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "2"}, 8),
        ({"LOCAL_WORLD_SIZE": "16"}, None),
        ({"LOCAL_WORLD_SIZE": "12", "GROUP_WORLD_SIZE": "2"}, None),  # the other node has four
        ({"LOCAL_WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2"}, None),
    ],
)
def test_ranks_of_each_node_are_those_of_all_nodes(variables: dict[str, str], node: int | None) -> None:
    """Ranks that disagree would choose different methods, and wait for each other."""
    assert ranks_of_each_node(variables, 16) == node
