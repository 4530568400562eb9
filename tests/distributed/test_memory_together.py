"""Law: everything that saves memory, all at once, changes no loss, no gradient and no weight of one process."""

import pytest

from tests.distributed.harness import assert_parity, run_layout
from tests.distributed.pool import WorkerPool
from tests.distributed.test_parity import degrees, reference
from tests.slow import slow

_AC, _CP = "--activation_checkpoint.", "--parallelism.context_parallel_"
# Experts, biases, sinks, a window in every second layer, YaRN, packed documents.
MODEL = [
    "--training.dtype=float64",
    "--model.name=gpt_oss",
    "--model.flavor=tiny4",
    "--training.attention_mask=document",
]
SAVED = [
    *(f"{_AC}mode=full", f"{_AC}group=2", f"{_AC}offload=inputs", f"{_AC}offload_keep_last=0"),
    f"{_AC}mlp_chunk_tokens=5",
    "--training.loss_chunk_tokens=3",
    "--training.enable_cpu_offload",
]
OVER_HEADS = [f"{_CP}method=all_to_all", f"{_CP}query_heads_per_pass=1"]
EXPERTS = "--parallelism.expert_parallel_degree=2"
LAYOUTS = {
    "one": (1, []),
    "fsdp2+cp2": (4, [*degrees(dp_shard=2, cp=2), EXPERTS, *OVER_HEADS]),
    "cp2+pp2": (4, [*degrees(cp=2, pp=2), EXPERTS, *OVER_HEADS]),
    "fsdp2+cp2+tp2": (8, [*degrees(dp_shard=2, cp=2, tp=2), EXPERTS, f"{_CP}method=ring"]),
    "cp2+tp2+pp2": (8, [*degrees(cp=2, tp=2, pp=2), EXPERTS, f"{_CP}method=all_to_all"]),
    "fsdp2+cp2+tp2+pp2": (16, [*degrees(dp_shard=2, cp=2, tp=2, pp=2), EXPERTS, f"{_CP}method=all_to_all"]),
}
QUICK = "cp2+pp2"


@pytest.mark.parametrize("layout", [QUICK, *slow(*(name for name in LAYOUTS if name != QUICK))])
def test_losses_gradients_and_weights_are_those_of_one_process(pool: WorkerPool, layout: str) -> None:
    ranks, arguments = LAYOUTS[layout]
    got = pool.run(ranks, run_layout, [*MODEL, *SAVED, *arguments], timeout=400)[0]
    assert_parity(got, reference(pool, *MODEL), 1e-10)


@pytest.mark.slow
def test_a_sequence_in_chunks_with_all_of_it(pool: WorkerPool) -> None:
    chunks = ["--training.sequence_chunks=3", "--training.sequence_chunks_offload"]
    got = pool.run(2, run_layout, [*MODEL, *SAVED, *chunks, *degrees(dp_shard=2), EXPERTS])[0]
    assert_parity(got, reference(pool, *MODEL), 1e-10)
