"""Law: a model with experts trains on every layout as on one process: losses, gradients, norm, weights, loads.

Loads and biases are buffers, which `assert_parity` compares too.
"""

import pytest

from tests.distributed.harness import assert_parity, run_layout
from tests.distributed.pool import WorkerPool
from tests.distributed.test_parity import degrees, reference

EXPERTS = ["--model.name=qwen3_moe", "--training.dtype=float64", "--model.router_bias_update_rate=0.01"]


def ep(degree: int) -> str:
    return f"--parallelism.expert_parallel_degree={degree}"


LAYOUTS = {
    "fsdp2": (2, degrees(dp_shard=2)),
    "ep2": (2, [*degrees(dp_shard=2), ep(2)]),
    "tp2": (2, degrees(tp=2)),
    "tp2+ep2": (2, [*degrees(tp=2), ep(2)]),
    "pp2": (2, degrees(pp=2)),
    "ddp2": (2, degrees(dp_replicate=2)),
    "ep2+fsdp4": (4, [*degrees(dp_shard=4), ep(2)]),
    "cp2+fsdp2+ep2": (4, [*degrees(dp_shard=2, cp=2), ep(2)]),
    "cp2+tp2+ep4": (4, [*degrees(cp=2, tp=2), ep(4)]),
    "fsdp2+tp2": (4, degrees(dp_shard=2, tp=2)),
    "hsdp2x2+ep2": (4, [*degrees(dp_replicate=2, dp_shard=2), ep(2)]),
    "ddp2+tp2+ep2": (4, [*degrees(dp_replicate=2, tp=2), ep(2)]),
    "fsdp2+pp2+ep2": (4, [*degrees(dp_shard=2, pp=2), ep(2)]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_equals_one_process(pool: WorkerPool, layout: str) -> None:
    world_size, arguments = LAYOUTS[layout]
    got = pool.run(world_size, run_layout, [*EXPERTS, *arguments])[0]
    assert_parity(got, reference(pool, *EXPERTS), 1e-10)
