"""Models of transformers with convolutions and scans: their functions run over ranks, and equal one process."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from longshard.context.planning.mask import Band, Mask
from longshard.context.planning.options import ContextParallelError
from longshard.context.regions import context_parallel
from longshard.integrations import scans
from longshard.integrations.interception import intercept_sdpa
from tests.distributed.other_models import (
    RANKS,
    SEQ_LEN,
    TOLERANCE,
    Case,
    Outcome,
    batch_of,
    build,
    cases_on_ranks,
    logits_of,
    ranks,
    refusals,
    run_case,
)
from tests.distributed.pool import WorkerPool
from tests.hf_families import in_double
from tests.slow import slow

LENGTHS = (8, 3, 10)
LAYERS = {"layer_types": ["linear_attention", "full_attention"]}
CONVOLUTIONS = {"layer_types": ["conv", "full_attention"]}
DELTA = {f"linear_{key}": n for key, n in (("num_key_heads", 2), ("num_value_heads", 4), ("key_head_dim", 8))}
DELTA |= LAYERS | {"linear_value_head_dim": 8, "head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SHARED = EXPERTS | {"shared_expert_intermediate_size": 16}
LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "num_key_value_heads": 4}
KIMI = LAYERS | LATENT | {"linear_num_heads": 4, "linear_head_dim": 8, "first_k_dense_replace": 2, "head_dim": 12}
MAMBA2 = {"n_heads": 4, "d_head": 16, "d_state": 8, "n_groups": 1, "chunk_size": 8}
MAMBA2 = {f"mamba_{key}": n for key, n in MAMBA2.items()}
GRANITE = MAMBA2 | {"layer_types": ["mamba", "attention"], "num_local_experts": 0, "shared_intermediate_size": 48}
NEMOTRON = {"layers_block_type": ["mamba", "attention"], "mamba_num_heads": 4, "mamba_head_dim": 16}
NEMOTRON |= {"ssm_state_size": 8, "n_groups": 1, "chunk_size": 8, "head_dim": 8}
MAMBA1 = {"mamba_d_state": 8, "mamba_dt_rank": 4}
EVERY_SECOND = {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
ZAMBA2 = {"mamba_d_state": 8, "mamba_headdim": 16, "n_mamba_heads": 4, "mamba_ngroups": 1, "chunk_size": 8}
ALONE = {"state_size": 8, "expand": 2}
CASES: dict[str, dict[str, Any]] = {
    "Qwen3Next": DELTA | SHARED,
    "KimiLinear": KIMI,
    "GraniteMoeHybrid": GRANITE,
    "Lfm2": CONVOLUTIONS,
    "Mamba": ALONE,
}
MORE: dict[str, dict[str, Any]] = {
    "Qwen3_5Text": DELTA,
    "Qwen3_5MoeText": DELTA | SHARED,
    "OlmoHybrid": DELTA,
    "BailingHybrid": EXPERTS,
    "Mamba2": ALONE | {"num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": 8},
    "FalconMamba": ALONE,
    "NemotronH": NEMOTRON,
    "Bamba": MAMBA2 | {"attn_layer_indices": [1]},
    "FalconH1": MAMBA2 | {"mamba_d_ssm": 64, "head_dim": 8},
    "Zamba": MAMBA1 | {"n_mamba_heads": 2, "layers_block_type": ["mamba", "hybrid"] * 2, "num_hidden_layers": 4},
    "Zamba2": ZAMBA2 | {"layers_block_type": ["mamba", "hybrid"], "hybrid_layer_ids": [1]},
    "Jamba": MAMBA1 | EVERY_SECOND | {"num_experts": 4, "num_experts_per_tok": 2},
    "Lfm2Moe": CONVOLUTIONS | EXPERTS,
    "Lfm3": CONVOLUTIONS,
}


def case_of(model: str, **changes: Any) -> Case:
    attention = "eager" if model in ("Mamba", "Mamba2", "FalconMamba") else "sdpa"  # models without any
    return Case(model, reference=attention, route=attention, changes=(CASES | MORE)[model], **changes)


def in_double_on_ranks(cases: list[Case]) -> list[Outcome | str]:
    """Transformers computes scans in float32, whatever the weights are; here in float64."""
    with in_double():
        return cases_on_ranks(cases)


@pytest.mark.parametrize("model", [*CASES, *slow(*MORE)])
def test_scans_equal_one_process(pool: WorkerPool, model: str) -> None:
    plain = case_of(model)
    packed = replace(plain, document_lengths=LENGTHS, reference_by_document=True)
    cases = [plain, replace(plain, load_balancer="contiguous", reentrant=False), packed]
    for outcomes in pool.run(RANKS, in_double_on_ranks, cases):
        for case, outcome in zip(cases, outcomes, strict=True):
            assert isinstance(outcome, Outcome), (case, outcome)
            assert outcome.worst < TOLERANCE, (case, outcome)
            assert outcome.attention_calls > 0


def without_documents(case: Case) -> float:
    with ranks() as mesh, in_double(), mock.patch.object(scans, "positions_of", return_value=None):
        return run_case(case, mesh).logits


def test_states_that_go_on_into_the_next_document_are_seen(pool: WorkerPool) -> None:
    case = case_of("Qwen3Next", document_lengths=LENGTHS, reference_by_document=True)
    assert min(pool.run(RANKS, without_documents, case)) > 1e-3


def refused(mesh: DeviceMesh, mask: Mask | None, call: Callable[[nn.Module, dict[str, torch.Tensor]], object]) -> str:
    """Return the error of a call of a model inside a context, or an empty text."""
    model, batch = build(case_of("Qwen3Next")), batch_of(case_of("Qwen3Next"))
    settings = {"buffers": list(batch.values()), "buffer_seq_dims": [1] * 4, "mask": mask}
    try:
        with context_parallel(mesh, intercept=intercept_sdpa(model), **settings):
            call(model, batch)
    except ContextParallelError as error:
        return str(error)
    return ""


def called(model: nn.Module, batch: dict[str, torch.Tensor], *, use_cache: bool) -> object:
    inputs = {"input_ids": batch["tokens"], "position_ids": batch["positions"], "attention_mask": batch["ones"]}
    return model(**inputs, use_cache=use_cache)


def convolved(model: nn.Module, _: dict[str, torch.Tensor]) -> object:
    return model.model.layers[0].linear_attn.conv1d(torch.zeros(2, 64, 10, dtype=torch.float64))


def refused_calls() -> list[str]:
    overlapping = Mask(SEQ_LEN, SEQ_LEN, (Band(0, 5, 0, 5), Band(5, SEQ_LEN, 3, SEQ_LEN)))
    with ranks() as mesh:
        return [
            refused(mesh, None, partial(called, use_cache=True)),
            refused(mesh, overlapping, partial(called, use_cache=False)),
            refused(mesh, None, convolved),
        ]


def test_what_a_scan_cannot_follow_is_refused(pool: WorkerPool) -> None:
    for cache, mask, convolution in pool.run(RANKS, refused_calls):
        assert "was called with a cache, whose states belong to one process; pass `use_cache=False`" in cache
        assert "is not a mask of documents; give `documents(lengths)`, or no mask" in mask
        assert "conv1d (Conv1d) is a convolution of (4,) tokens, which mixes tokens outside of attention" in convolution


def test_outside_of_a_context_nothing_changes() -> None:
    case = case_of("Lfm2")
    model, batch = build(case), batch_of(case)
    before = logits_of(model, batch)
    assert scans.bind(model.modules())
    assert logits_of(model, batch).equal(before)


def test_layers_that_are_not_known_stay_refused(pool: WorkerPool) -> None:
    """A recurrence of another kind, and n-grams of tokens with a dilated convolution."""
    gated = {"lru_width": 32, "attention_window_size": 64, "block_types": ["recurrent", "attention"], "head_dim": 8}
    grams = {"ple_layer_ids": [1], "ngram_vocab_size_base": 100, "heads_per_ngram": 2, "hc_count": 2, "hc_lowrank": 8}
    grams |= DELTA | SHARED | {"layer_types": ["linear_attention"] * 2}
    for messages in refusals(pool, Case("RecurrentGemma", changes=gated), Case("Qwen4ExpText", changes=grams)):
        for message in messages:
            assert "mixes tokens outside of attention" in message or "no attention that can be" in message
