"""Law: each model of transformers equals one process under context parallelism, or every rank refuses it.

The models here go wrong when they run on a part of a sequence without further care.
"""

from contextlib import nullcontext
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from examples import transformers_model
from longshard.context.attention import ContextParallelAttention
from longshard.context.planning.options import ContextParallelError
from longshard.context.regions import context_parallel
from longshard.integrations import watch
from longshard.integrations.interception import intercept_sdpa
from tests.distributed.other_models import (
    RANKS,
    SEQ_LEN,
    TOLERANCE,
    Case,
    assert_equal_to_one_process,
    batch_of,
    build,
    data,
    gradients_of,
    logits_of,
    loss_of,
    ranks,
    refusals,
    relative,
    run_case,
)
from tests.distributed.pool import WorkerPool
from tests.slow import slow
from trainer.data.packing import IGNORE_INDEX

pytestmark = pytest.mark.about(
    "longshard/integrations/arguments.py",
    "longshard/integrations/attended.py",
    "longshard/integrations/rotary_length.py",
)

IN_FLOAT32 = 1e-6  # where a model adds up in float32 whatever its weights are
LENGTHS = (8, 3, 10)
ROPE = {"rope_theta": 1e4}
DYNAMIC = {"max_position_embeddings": 8, "rope_parameters": ROPE | {"rope_type": "dynamic", "factor": 4.0}}
LONG = {"rope_type": "longrope", "original_max_position_embeddings": 12, "long_factor": [3.0] * 4}
LONGROPE = {"max_position_embeddings": 64, "rope_parameters": ROPE | LONG | {"short_factor": [1.0] * 4}}
GPT_OSS = {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 6, "head_dim": 8}
GEMMA = {"sliding_window": 6, "head_dim": 8, "query_pre_attn_scalar": 8}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"]}
LLAMA4 = {"num_local_experts": 1, "attention_chunk_size": 64, "intermediate_size_mlp": 48, "head_dim": 8}


@pytest.mark.slow
def test_packed_documents_with_sinks_and_mixed_windows(pool: WorkerPool) -> None:
    """GPT-OSS and Gemma 3: documents x windows x sinks, each layer another; logits and every gradient."""
    packed = Case("", route="registered", document_lengths=LENGTHS, reference_by_document=True)
    for model, changes, reference, tolerance in (
        ("GptOss", GPT_OSS, "eager", TOLERANCE),
        ("Gemma3Text", GEMMA, "sdpa", IN_FLOAT32),
    ):
        case = replace(packed, model=model, changes=changes | ALTERNATING, reference=reference)
        pairs = (("ring", "head_tail"), ("all_to_all", "balanced"))
        assert_equal_to_one_process(
            pool, [replace(case, method=method, load_balancer=balancer) for method, balancer in pairs], tolerance
        )


LENGTH_CASES = [
    Case("Llama", load_balancer=balancer, changes=changes, document_lengths=lengths)
    for changes in (DYNAMIC, LONGROPE)
    for balancer, lengths in (("head_tail", None), ("contiguous", None), ("contiguous", LENGTHS))
]


def test_rotary_tables_know_the_largest_position_of_all_ranks(pool: WorkerPool) -> None:
    assert_equal_to_one_process(pool, [*LENGTH_CASES, replace(LENGTH_CASES[0], reentrant=False)])


def own_length_case() -> list[float]:
    with ranks() as mesh, mock.patch.object(watch, "depends_on_length", return_value=False):
        return [run_case(case, mesh).worst for case in (LENGTH_CASES[1], LENGTH_CASES[4])]


def test_rotary_tables_of_a_part_are_wrong(pool: WorkerPool) -> None:
    """Control: each rank with the largest position of its own part."""
    for errors in pool.run(RANKS, own_length_case):
        assert min(errors) > 1e-2


def test_positions_that_a_model_makes_up_are_refused(pool: WorkerPool) -> None:
    """With documents too, whose positions begin again, and in models whose attention is not told of positions."""
    small = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "is_decoder": True}
    gpt = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "attn_pdrop": 0.0}
    opt = {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0}
    forgotten = Case("Llama", load_balancer="contiguous", mistake="no positions")
    cases = [
        *(replace(forgotten, model=m, document_lengths=LENGTHS) for m in ("Llama", "Qwen3", "GPTNeoX")),
        replace(forgotten, model="OPT", changes=opt, document_lengths=LENGTHS),
        *(replace(forgotten, model=m, changes=small) for m in ("Bert", "Roberta", "Electra")),
        replace(forgotten, model="GPTBigCode", changes=gpt),
    ]
    for messages in refusals(pool, *cases):
        for message in messages:
            assert "got no `position_ids`, and would count positions from 0" in message
    # The same positions, given by the caller: they are seen where they arrive.
    local = [replace(case, mistake="local positions") for case in cases]
    for messages in refusals(pool, *local, replace(local[0], route="registered"), replace(local[4], reference="sdpa")):
        for message in messages:
            assert "counts positions from 0 on rank(s) [1] of the group" in message


def test_llama_4_scales_attention_by_its_own_count(pool: WorkerPool) -> None:
    """It counts from 0; the scale is one below `floor_scale` tokens."""
    changes = LLAMA4 | {"no_rope_layers": [0, 0]}
    case = Case("Llama4Text", changes=changes | {"floor_scale": 8})
    for message in refusals(pool, case)[0]:
        assert "counts from 0 on every rank; use sequences of fewer than 8 tokens" in message
    assert_equal_to_one_process(pool, [replace(case, changes=changes | {"floor_scale": SEQ_LEN + 1})], IN_FLOAT32)


def classifier_case() -> str:
    from transformers import LlamaForSequenceClassification

    with ranks() as mesh:
        case = Case("Llama")
        model = LlamaForSequenceClassification(build(case).config).double()
        batch = batch_of(case)
        with (
            pytest.raises(ContextParallelError) as error,
            context_parallel(mesh, buffers=list(batch.values()), buffer_seq_dims=[1] * 4, intercept=intercept_sdpa()),
        ):
            logits_of(model, batch, position_ids=batch["positions"], attention_mask=batch["ones"])
        return str(error.value)


def test_a_head_for_the_whole_sequence_is_refused(pool: WorkerPool) -> None:
    for message in pool.run(RANKS, classifier_case):
        assert "has logits of shape (2, 2), not one row for each token" in message


def later_positions_case(how: str, with_model: bool, calls: tuple[str, ...]) -> list[str | None]:
    """The refusals of forwards in one context, with `global` positions or with `local` ones, from 0 on each rank."""
    with ranks() as mesh:
        model, batch, refused = build(Case("Llama")), batch_of(Case("Llama")), []
        settings = {"buffers": list(batch.values()), "buffer_seq_dims": [1] * 4, "load_balancer": "contiguous"}
        with context_parallel(mesh, intercept=intercept_sdpa(model if with_model else None), **settings):
            local = torch.arange(batch["tokens"].shape[1]).expand_as(batch["tokens"])
            for positions in (batch["positions"] if call == "global" else local for call in calls):
                try:
                    if how == "model":
                        logits_of(model, batch, position_ids=positions, attention_mask=batch["ones"])
                    else:
                        x = model.model.embed_tokens(batch["tokens"])
                        table = model.model.rotary_emb(x, position_ids=positions)
                        for layer in model.model.layers:
                            x = layer(x, attention_mask=None, position_embeddings=table)
                    refused.append(None)
                except ContextParallelError as error:
                    refused.append(str(error))
        return refused


@pytest.mark.parametrize("with_model", [True, False])
@pytest.mark.parametrize("how", ["model", "layers by hand"])
def test_positions_are_watched_in_every_forward(pool: WorkerPool, how: str, with_model: bool) -> None:
    wrong = "counts positions from 0 on rank(s) [1] of the group"
    for first, second in pool.run(RANKS, later_positions_case, how, with_model, ("global", "local")):
        assert first is None
        assert wrong in second
    for first, second in pool.run(RANKS, later_positions_case, how, with_model, ("local", "global")):
        assert wrong in first  # no module had a hook before this call
        assert second is None


def autocast_case(dtype: torch.dtype) -> list[float]:
    """Errors of all gradients against float64: of one process under autocast, and of two ranks."""
    with ranks() as mesh:
        case = Case("Llama")
        exact, one, model = build(case), build(case).float(), build(case).float()
        batch = batch_of(case)
        count = (batch["labels"] != IGNORE_INDEX).sum()
        for each, context in ((exact, nullcontext()), (one, torch.autocast("cpu", dtype))):
            with context:
                logits = logits_of(each, batch, position_ids=batch["positions"], attention_mask=batch["ones"])
            assert logits.dtype == (torch.float64 if each is exact else dtype)
            loss_of(logits.to(torch.promote_types(logits.dtype, torch.float32)), batch, count).backward()
        with context_parallel(mesh, buffers=list(batch.values()), buffer_seq_dims=[1] * 4, intercept=intercept_sdpa()):
            with torch.autocast("cpu", dtype):
                logits = logits_of(model, batch, position_ids=batch["positions"], attention_mask=batch["ones"])
            assert logits.dtype == dtype
            loss_of(logits.float(), batch, count).backward()
        for p in model.parameters():
            assert p.grad.dtype == torch.float32
            dist.all_reduce(p.grad, group=mesh.get_group())
        gradients = [gradients_of(m).values() for m in (exact, one, model)]
        wanted, *others = (torch.cat([x.double().flatten() for x in g]) for g in gradients)
        return [relative(x, wanted) for x in others]


@pytest.mark.parametrize("dtype", [torch.bfloat16, *slow(torch.float16)])
def test_autocast_is_as_exact_as_on_one_process(pool: WorkerPool, dtype: torch.dtype) -> None:
    for one, sharded in pool.run(RANKS, autocast_case, dtype):
        assert 1e-4 < one < 0.1
        assert sharded < 1.5 * one


def autocast_of_style_case() -> None:
    """Bit for bit as F.scaled_dot_product_attention under autocast, on one rank; float64 stays."""
    with ranks() as mesh:
        module = nn.Module()
        ContextParallelAttention()._apply(module, mesh)
        for types in ((torch.float32, torch.bfloat16, torch.float32), (torch.float64,) * 3, (torch.float16,) * 3):
            inputs = [data().reshape(2, 2, 13, 4).to(dtype).requires_grad_() for dtype in types]
            copies = [x.detach().clone().requires_grad_() for x in inputs]
            buffers = {"buffers": [torch.zeros(13)], "buffer_seq_dims": [0]}
            with context_parallel(mesh, **buffers, local_attention=True) as cp:
                with torch.autocast("cpu", torch.bfloat16):
                    out = module(*inputs, plan=cp.attention_plan)
                    wanted = F.scaled_dot_product_attention(*copies, is_causal=True)
                out.double().pow(2).sum().backward()
                wanted.double().pow(2).sum().backward()
            assert out.dtype == wanted.dtype
            for a, b in zip((out, *(x.grad for x in inputs)), (wanted, *(x.grad for x in copies)), strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_autocast_of_the_operator_is_that_of_plain_attention(pool: WorkerPool) -> None:
    pool.run(1, autocast_of_style_case)


def guide_case() -> list[str]:
    """The program of docs/transformers.md."""
    with ranks():
        return [row.result for row in transformers_model.main().rows]


def test_the_guide_runs(pool: WorkerPool) -> None:
    for results in pool.run(RANKS, guide_case):
        assert results == ["equal"] * 4
