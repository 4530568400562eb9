"""Law: multi-token prediction over ranks, chunks and micro-batches equals one process; targets cross their borders.

The support matrix tests its layouts one by one, and tests/unit/test_multi_token.py the values on one process.
"""

from unittest import mock

import pytest
import torch

from tests.distributed.harness import Record, assert_parity, run_layout
from tests.distributed.pool import WorkerPool
from tests.distributed.test_parity import degrees, reference
from tests.slow import slow
from trainer.tasks.further_tokens import further_targets
from trainer.tasks.rank_batch import RankBatch

TOLERANCE = 1e-10
BASE = ("--training.dtype=float64", "--model.mtp_layers=2", "--training.mtp_loss_weight=1.0")
DOCUMENTS = "--training.attention_mask=document"
EXPERTS = ("--model.name=qwen3_moe", "--parallelism.expert_parallel_degree=2")
COMPILED = ("--compile.enable", "--compile.backend=aot_eager")
# Name -> (ranks, arguments of the layout, arguments of the single process too).
CASES: dict[str, tuple[int, list[str], list[str]]] = {
    "in chunks as at once": (1, ["--training.sequence_chunks=3", "--activation_checkpoint.mode=full"], [DOCUMENTS]),
    "chunks that wait on the host, over ranks": (
        2,
        ["--training.sequence_chunks=2", "--training.sequence_chunks_offload", *degrees(dp_shard=2)],
        [DOCUMENTS],
    ),
    "compiled, cp2 tp2": (4, [*COMPILED, *degrees(cp=2, tp=2)], [DOCUMENTS]),
    "experts divided, recomputed, cp2": (
        4,
        [*EXPERTS, "--activation_checkpoint.mode=selective", *degrees(cp=2, dp_shard=2)],
        ["--model.name=qwen3_moe"],
    ),
    "windows and gathered logits, cp2 tp2": (
        4,
        ["--parallelism.disable_loss_parallel", *degrees(cp=2, tp=2)],
        ["--model.sliding_window=5"],
    ),
    "offloaded inputs, tied, hybrid shards": (
        4,
        [
            *("--activation_checkpoint.mode=full", "--activation_checkpoint.offload=inputs"),
            *("--activation_checkpoint.offload_keep_last=0", "--activation_checkpoint.group=2"),
            *degrees(dp_shard=2, dp_replicate=2),
        ],
        ["--model.flavor=tiny_tied", DOCUMENTS],
    ),
    "norm and output apart, zero bubble, cp2": (
        4,
        [
            "--parallelism.pipeline_parallel_schedule=InterleavedZeroBubble",
            *("--parallelism.pipeline_parallel_module_fqns", "tok_embeddings", "layers.0,layers.1", "norm", "output"),
            *degrees(cp=2, pp=2),
        ],
        [DOCUMENTS],
    ),
    "Qwen3-Next, cp4": (4, degrees(cp=4), ["--model.name=qwen3_next", DOCUMENTS]),
}
# What transforms a layer, also one for a further token.
_SELECTIVE = ("--activation_checkpoint.mode=selective", "--activation_checkpoint.offload_keep_last=0")
TRANSFORMS = {
    "attention on the host": (*_SELECTIVE, "--activation_checkpoint.offload=inputs+attention"),
    "part of the attention on the host, experts": (
        *_SELECTIVE,
        "--activation_checkpoint.offload=inputs+attention",
        "--activation_checkpoint.offload_fraction=0.3",
        "--model.name=olmoe",
    ),
    "inputs on the host": (*_SELECTIVE, "--activation_checkpoint.offload=inputs"),
    "every second layer": ("--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=2"),
    "groups of recomputed layers": ("--activation_checkpoint.mode=full", "--activation_checkpoint.group=2"),
    "feed-forward in chunks": ("--activation_checkpoint.mode=full", "--activation_checkpoint.mlp_chunk_tokens=3"),
    "parameters on the host": ("--training.enable_cpu_offload",),
    "compiled within a budget": (*COMPILED, "--activation_checkpoint.mode=memory_budget"),
}
QUICK = {"in chunks as at once", "experts divided, recomputed, cp2", "norm and output apart, zero bubble, cp2"}


@pytest.mark.parametrize("name", [*sorted(QUICK), *slow(*(name for name in CASES if name not in QUICK))])
def test_a_layout_equals_one_process(pool: WorkerPool, name: str) -> None:
    ranks, arguments, shared = CASES[name]
    got = pool.run(ranks, run_layout, [*BASE, *shared, *arguments])[0]
    wanted = reference(pool, *BASE, *shared)
    assert_parity(got, wanted, TOLERANCE)
    for ours, theirs in zip(got.metrics, wanted.metrics, strict=True):
        for key in ("mtp_loss_1", "mtp_loss_2"):
            assert ours[key] == pytest.approx(theirs[key], rel=TOLERANCE)
            assert ours[key] != pytest.approx(theirs["loss"], rel=1e-4)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_of_layers_changes_nothing(pool: WorkerPool, name: str) -> None:
    transform = TRANSFORMS[name]
    shared = [*BASE, *(x for x in transform if x.startswith("--model"))]
    got = pool.run(1, run_layout, [*shared, *transform])[0]
    assert_parity(got, reference(pool, *shared), TOLERANCE)


def cut_before(arguments: list[str]) -> Record:
    """Make targets of the tokens that a rank has, as if the sequence ended with them."""
    real = RankBatch.on

    def on_device(own: RankBatch, device: torch.device) -> RankBatch:
        tokens, labels = own.columns["tokens"], own.columns["labels"]
        further = own.columns["next_tokens"].shape[-1]
        targets = further_targets(tokens, labels, torch.zeros_like(tokens), further)
        return real(own.with_columns(**targets), device)

    with mock.patch.object(RankBatch, "on", on_device):
        return run_layout(arguments)


def test_targets_of_a_ranks_own_tokens_are_seen_to_be_wrong(pool: WorkerPool) -> None:
    arguments = [*BASE, *degrees(cp=2)]
    assert_parity(pool.run(2, run_layout, arguments)[0], reference(pool, *BASE), TOLERANCE)
    with pytest.raises(AssertionError, match="gradient"):
        assert_parity(pool.run(2, cut_before, arguments)[0], reference(pool, *BASE), TOLERANCE)
