"""Law: a model of transformers, unmodified, has the losses and gradients of one process, or its use is refused.

Each model runs unsharded and over two ranks.
"""

from dataclasses import replace
from unittest import mock

import pytest
from torch.distributed.fsdp import fully_shard

from longshard.context.planning.options import ContextParallelError
from longshard.context.regions import context_parallel
from longshard.integrations import interception
from longshard.integrations.interception import intercept_sdpa
from tests.distributed.other_models import (
    LAYERS,
    RANKS,
    SEQ_LEN,
    TOLERANCE,
    Case,
    assert_equal_to_one_process,
    batch_of,
    build,
    cases_on_ranks,
    logits_of,
    loss_of,
    ranks,
    refusals,
    relative,
    run_case,
    sharded_logits,
)
from tests.distributed.pool import WorkerPool
from tests.slow import slow
from trainer.data.packing import IGNORE_INDEX


@pytest.mark.parametrize("model", ["Llama", "GPT2", *slow("Qwen3")])
def test_losses_and_gradients_are_those_of_one_process(pool: WorkerPool, model: str) -> None:
    """Every pair of method, layout, route and activation checkpointing; ranks hold different numbers of tokens."""
    choices = (
        ("ring", "head_tail", "sdpa", None),
        ("all_to_all", "contiguous", "registered", None),
        ("ring", "contiguous", "registered", False),
        ("all_to_all", "head_tail", "sdpa", False),
        ("ring", "contiguous", "sdpa", True),
        ("all_to_all", "head_tail", "registered", True),
    )
    others = [Case(model, "all_gather"), Case(model, load_balancer="balanced")]
    assert_equal_to_one_process(pool, [*(Case(model, *choice) for choice in choices), *others])


def test_packed_documents_are_those_of_transformers(pool: WorkerPool) -> None:
    """There by positions that start again, here by the context's mask; a boundary is at the end of a shard."""
    lengths = (8, 3, 10)
    cases = [
        Case("Llama", method, balancer, route, document_lengths=lengths)
        for method in ("ring", "all_to_all")
        for balancer in ("head_tail", "contiguous")
        for route in ("sdpa", "registered")
    ]
    assert_equal_to_one_process(pool, cases)


WINDOWED = [
    Case("Mistral", changes={"sliding_window": 5}),
    # Longer than what a rank holds: transformers makes no mask, and tells SDPA nothing.
    Case("Mistral", changes={"sliding_window": 16}),
    Case(
        "Qwen2",
        changes={"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1},
    ),
]


def test_sliding_windows_are_honoured_by_the_registered_function(pool: WorkerPool) -> None:
    cases = [
        replace(case, route="registered", method=method, load_balancer=balancer)
        for case in WINDOWED
        for method in ("ring", "all_to_all")
        for balancer in ("head_tail", "contiguous")
    ]
    assert_equal_to_one_process(pool, cases)


def test_sliding_windows_are_refused_where_they_cannot_be_seen(pool: WorkerPool) -> None:
    for messages in refusals(pool, *WINDOWED):
        for message in messages:
            assert "got a mask of shape" in message or "register_transformers_attention" in message
    # As long as the sequence: it hides nothing.
    assert_equal_to_one_process(pool, [Case("Mistral", changes={"sliding_window": SEQ_LEN})])


@pytest.mark.parametrize("reentrant", [False, *slow(None)])
def test_attention_sinks_are_honoured_by_the_registered_function(pool: WorkerPool, reentrant: bool | None) -> None:
    """GPT-OSS: sinks with gradients of their own, in layers with and without a window."""
    changes = {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 6, "head_dim": 8}
    case = Case("GptOss", route="registered", reference="eager", changes=changes, reentrant=reentrant)
    assert_equal_to_one_process(
        pool,
        [replace(case, method=m, load_balancer=b) for m in ("ring", "all_to_all") for b in ("head_tail", "balanced")],
    )


def test_attention_that_is_not_known_is_refused(pool: WorkerPool) -> None:
    """Chunks are longer than a rank's part, so no mask shows them."""
    chunks = {"num_local_experts": 1, "attention_chunk_size": 16, "intermediate_size_mlp": 48, "head_dim": 8}
    cap = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 64}
    *chunked, capped = refusals(
        pool,
        Case("Llama4Text", changes=chunks),
        Case("Llama4Text", changes=chunks, route="registered"),
        Case("Gemma2", changes=cap, route="registered", reference="eager"),
    )
    assert all("in chunks of 16 for 21 tokens" in message for messages in chunked for message in messages)
    assert all("passes 'softcap'" in message for message in capped)


def test_mistakes_that_show(pool: WorkerPool) -> None:
    """Controls: each of these is another model, by far more than the tolerance."""
    mistakes = ("no interception", "permuted positions")
    cases = [Case("Llama", load_balancer=b, mistake=m) for b in ("head_tail", "contiguous") for m in mistakes]
    for outcomes in pool.run(RANKS, cases_on_ranks, cases):
        for case, outcome in zip(cases, outcomes, strict=True):
            assert min(outcome.gradients.values()) > 0.1, case


def test_mistakes_that_are_refused(pool: WorkerPool) -> None:
    """On every rank, also where only one of them sees the mistake."""
    for route in ("sdpa", "registered"):
        jumps, padded, *forgotten, labels = refusals(
            pool,
            Case("Llama", route=route, mistake="no attention mask"),
            Case("Llama", route=route, load_balancer="contiguous", mistake="padding"),
            Case("Llama", route=route, load_balancer="contiguous", mistake="no positions"),
            Case("GPT2", route=route, mistake="no positions"),
            Case("Llama", route=route, mistake="shift after the cut"),
        )
        assert "got a mask of shape" in jumps[0]
        assert "rank(s) [0] of the group" in jumps[1]
        assert all("an all-ones `attention_mask`" in message for message in padded)
        assert all("got no `position_ids`" in message for messages in forgotten for message in messages)
        assert all("got `labels`, which it shifts" in message for message in labels)
    # Documents that begin where a shard begins, without their mask: no jump to see on any rank.
    (boundary,) = refusals(
        pool, Case("Llama", load_balancer="contiguous", document_lengths=(11, 10), mistake="no document mask")
    )
    for message in boundary:
        assert "counts positions from 0 on rank(s) [1] of the group" in message
        assert "positions in documents together with their mask" in message


def test_attention_that_is_not_sdpa_is_noticed(pool: WorkerPool) -> None:
    (messages,) = refusals(pool, Case("GPT2", route="eager"))
    assert all("attn_implementation='eager', which does not call" in message for message in messages)


def fsdp_case(reentrant: bool | None) -> tuple[float, int]:
    """The worst gradient of a model whose parameters are sharded over the same ranks, and how much attention ran."""
    with ranks() as mesh:
        case = Case("Llama", reentrant=reentrant)
        wanted, model = (build(case).to(mesh.device_type) for _ in range(2))
        batch = {name: x.to(mesh.device_type) for name, x in batch_of(case).items()}
        count = (batch["labels"] != IGNORE_INDEX).sum()
        inputs = {"position_ids": batch["positions"], "attention_mask": batch["ones"]}
        loss_of(logits_of(wanted, batch, **inputs), batch, count).backward()
        for part in (*model.model.layers, model):
            fully_shard(part, mesh=mesh)
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
        with context_parallel(
            mesh, buffers=list(batch.values()), buffer_seq_dims=[1] * len(batch), intercept=intercept_sdpa()
        ) as cp:
            loss_of(sharded_logits(case, model, batch, count), batch, count).backward()
        pairs = zip(model.parameters(), wanted.parameters(), strict=True)
        return max(relative(a.grad.full_tensor(), b.grad) for a, b in pairs), cp.live.calls


@pytest.mark.parametrize("reentrant", [None, *slow(False, True)])
def test_with_sharded_parameters(pool: WorkerPool, reentrant: bool | None) -> None:
    for worst, attention_calls in pool.run(RANKS, fsdp_case, reentrant):
        assert worst < TOLERANCE
        assert attention_calls == LAYERS * (1 if reentrant is None else 2)


def not_entered_again_case(reentrant: bool) -> str:
    """With a backward in which the mode is off, as it is unless it is entered again."""
    with ranks() as mesh, mock.patch.object(interception, "_BACKWARD", {}):
        try:
            run_case(Case("Llama", reentrant=reentrant), mesh)
        except ContextParallelError as error:
            return str(error)
    return "no error"


@pytest.mark.parametrize("reentrant", [False, *slow(True)])
def test_recomputation_needs_the_mode_entered_again(pool: WorkerPool, reentrant: bool) -> None:
    for message in pool.run(RANKS, not_entered_again_case, reentrant):
        assert "outside of the context's interception" in message
