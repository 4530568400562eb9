"""The choice of a method where the configuration leaves it open: by what the plan says is sent."""

from dataclasses import replace

import pytest

from trainer.config.loader import parse_command_line
from trainer.distributed.context_parallel.auto import SHORT_SHARD, choose
from trainer.distributed.context_parallel.configure import attention_options
from trainer.distributed.context_parallel.cost import AttentionShape, attention_cost
from trainer.distributed.context_parallel.mask import Mask, causal, sliding_window
from trainer.distributed.context_parallel.options import ContextParallelOptions
from trainer.distributed.context_parallel.plan import make_plan
from trainer.models.llama3.args import FLAVORS

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
            for plan in of_rank
            for way in ("forward", "backward")
        )
        for of_rank in plans
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
    assert chosen([causal(long)], 16, AttentionShape(1, 1, 1, 128, 2)).method == "ring"


def test_heads_that_no_number_of_ranks_divides_leave_the_ring_or_all_gather() -> None:
    shape = AttentionShape(1, 7, 7, 128, 2)
    assert chosen([causal(8 * SHORT_SHARD)], 4, shape).method == "ring"
    assert chosen([causal(2 * SHORT_SHARD)], 4, shape).method == "all_gather"


def test_a_hybrid_is_chosen_where_the_degree_is_more_than_the_heads() -> None:
    shape = AttentionShape(1, 8, 2, 128, 2)
    options = chosen([causal(32 * SHORT_SHARD)], 16, shape)
    assert options.method == "hybrid"
    assert options.hybrid_degrees[0] * options.hybrid_degrees[1] == 16
    assert 8 % options.hybrid_degrees[0] == 0


def test_the_reason_is_said_with_its_numbers() -> None:
    arguments = ["--parallelism.context_parallel_degree=4", "--parallelism.context_parallel_method=auto"]
    options, reason = attention_options(parse_command_line(arguments).config, FLAVORS["debugmodel"])
    assert options.method in reason
    assert "MiB" in reason
    assert "8/4 heads over 4 ranks" in reason
    assert attention_options(parse_command_line(arguments[:1]).config, FLAVORS["debugmodel"])[1] == ""
