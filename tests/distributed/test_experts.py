"""Law: a model with experts trains on every layout as on one process: losses, gradients, norm, weights, loads.

Loads and biases of routers are buffers, which `assert_parity` compares too.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.profiler import profile

from tests.distributed.checkpoint_cases import load_step_save, merged, same
from tests.distributed.harness import Record, assert_parity, run_layout, trainer_of
from tests.distributed.pool import WorkerPool
from tests.distributed.test_host_reads import TOTALS
from tests.distributed.test_parity import degrees, reference
from tests.slow import slow
from trainer.config.loader import parse_command_line
from trainer.families.feed_forward_args import ExpertArgs
from trainer.models import moe
from trainer.models.experts import Experts
from trainer.models.initialization import initialize
from trainer.parallel import expert_parallel
from trainer.parallel.expert_parallel import ExpertParallel
from trainer.parallel.parallel_dims import ParallelDims
from trainer.runtime.process_group import Process, process_group
from trainer.transforms.compile import compiled_graphs

FAMILY = "--model.name=qwen3_moe"
EXPERTS = [FAMILY, "--training.dtype=float64", "--model.router_bias_update_rate=0.01"]
DOCUMENTS = "--training.attention_mask=document"
# Biases, windows in every second layer, attention sinks, YaRN.
GPT_OSS = "--model.name=gpt_oss"


def ep(degree: int) -> str:
    return f"--parallelism.expert_parallel_degree={degree}"


def ac(mode: str) -> str:
    return f"--activation_checkpoint.mode={mode}"


COMPILED = ["--compile.enable", "--compile.backend=aot_eager"]
# Ranks, their settings, and settings of the reference too.
LAYOUTS: dict[str, tuple[int, list[str], list[str]]] = {
    "fsdp2": (2, degrees(dp_shard=2), []),
    "ep2": (2, [*degrees(dp_shard=2), ep(2)], []),
    "tp2": (2, degrees(tp=2), []),
    "tp2+ep2": (2, [*degrees(tp=2), ep(2)], []),
    "cp2+ep2, unequal lengths": (2, [*degrees(cp=2), ep(2)], ["--training.seq_len=15"]),
    "pp2": (2, degrees(pp=2), []),
    "ddp2": (2, degrees(dp_replicate=2), []),
    "cp3, uneven shards": (3, degrees(cp=3), []),
    "fsdp4+ep2": (4, [*degrees(dp_shard=4), ep(2)], []),
    "cp2+fsdp2+ep2": (4, [*degrees(dp_shard=2, cp=2), ep(2), ac("selective")], [DOCUMENTS]),
    "cp2+tp2+ep4": (4, [*degrees(cp=2, tp=2), ep(4), ac("full")], [GPT_OSS, DOCUMENTS]),
    "fsdp2+tp2+ep2": (4, [*degrees(dp_shard=2, tp=2), ep(2), "--training.local_batch_size=1"], [GPT_OSS]),
    "hsdp2x2+ep2": (4, [*degrees(dp_replicate=2, dp_shard=2), ep(2)], []),
    "ddp2+tp2+ep2": (4, [*degrees(dp_replicate=2, tp=2), ep(2), ac("full")], []),
    "fsdp2+pp2+ep2, backward split": (
        4,
        [*degrees(dp_shard=2, pp=2), ep(2), "--parallelism.pipeline_parallel_schedule=InterleavedZeroBubble"],
        ["--model.flavor=tiny4"],
    ),
    "tp2+ep2, compiled": (2, [*degrees(tp=2), ep(2), *COMPILED], []),
    "tp2+ep2, compiled, whole layers": (2, [*degrees(tp=2), ep(2), *COMPILED, ac("full")], []),
    "fsdp4+ep2, compiled, selective": (4, [*degrees(dp_shard=4), ep(2), *COMPILED, ac("selective")], []),
    "cp2+tp2+ep4, compiled, selective": (
        4,
        [*degrees(cp=2, tp=2), ep(4), *COMPILED, ac("selective")],
        [GPT_OSS, DOCUMENTS],
    ),
    "fsdp2+ep2, compiled, every second layer": (
        2,
        [*degrees(dp_shard=2), ep(2), *COMPILED, ac("selective"), "--activation_checkpoint.selective_ac_option=2"],
        [],
    ),
    "fsdp2+pp2+ep2, compiled, selective, backward split": (
        4,
        [
            *[*degrees(dp_shard=2, pp=2), ep(2), *COMPILED, ac("selective")],
            "--parallelism.pipeline_parallel_schedule=InterleavedZeroBubble",
        ],
        ["--model.flavor=tiny4"],
    ),
    "cp2+pp2+ep2": (4, [*degrees(cp=2, pp=2), ep(2)], [GPT_OSS, DOCUMENTS]),
    "fsdp2+pp2+ep2": (4, [*degrees(dp_shard=2, pp=2), ep(2)], []),
    "tp2+pp2+ep2, offloaded": (4, [*degrees(tp=2, pp=2), ep(2), "--training.enable_cpu_offload"], []),
}
PARTS = "--activation_checkpoint.mlp_chunk_tokens=5"
OFFLOADED = [ac("full"), "--activation_checkpoint.offload=inputs", "--activation_checkpoint.offload_keep_last=1"]
LAYOUTS |= {
    "one, in parts": (1, [PARTS], []),
    "fsdp2, in parts, whole layers": (2, [*degrees(dp_shard=2), PARTS, ac("full")], []),
    "fsdp4+ep2, in parts, whole layers": (4, [*degrees(dp_shard=4), ep(2), PARTS, ac("full")], []),
    "cp2+tp2+ep4, in parts": (4, [*degrees(cp=2, tp=2), ep(4), PARTS], [GPT_OSS, DOCUMENTS]),
    "fsdp2+ep2, compiled, offloaded": (2, [*degrees(dp_shard=2), ep(2), *COMPILED, *OFFLOADED], []),
    "cp2+tp2+ep4, in parts, offloaded": (
        4,
        [*degrees(cp=2, tp=2), ep(4), PARTS, *OFFLOADED],
        [GPT_OSS, DOCUMENTS],
    ),
    "cp2+tp2+ep4, in parts, compiled, whole layers": (
        4,
        [*degrees(cp=2, tp=2), ep(4), PARTS, *COMPILED, ac("full")],
        [GPT_OSS, DOCUMENTS],
    ),
    "fsdp2+pp2+ep2, in parts, compiled, backward split": (
        4,
        [
            *[*degrees(dp_shard=2, pp=2), ep(2), PARTS, *COMPILED],
            "--parallelism.pipeline_parallel_schedule=InterleavedZeroBubble",
        ],
        ["--model.flavor=tiny4"],
    ),
    "fsdp2+pp2+ep2, in parts": (4, [*degrees(dp_shard=2, pp=2), ep(2), PARTS], []),
}
QUICK = {"cp2+tp2+ep4", "fsdp4+ep2", "fsdp2+pp2+ep2", "fsdp4+ep2, in parts, whole layers"}
QUICK |= {"cp2+tp2+ep4, compiled, selective"}


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in LAYOUTS]
)
def test_a_layout_equals_one_process(pool: WorkerPool, layout: str) -> None:
    world_size, arguments, shared = LAYOUTS[layout]
    got = pool.run(world_size, run_layout, [*EXPERTS, *shared, *arguments])[0]
    assert_parity(got, reference(pool, *EXPERTS, *shared), 1e-10)
    loads = [x for name, x in got.buffers.items() if name.endswith("router.load")]
    assert len(loads) == (4 if "--model.flavor=tiny4" in shared else 2)
    assert all(load.sum() == pytest.approx(1) and load.std() > 0.01 for load in loads)


# ---- routings that leave ranks without work


def forced_case(arguments: list[str], experts: list[int]) -> Record:
    """A run in which all tokens choose these experts."""

    def initialize_and_force(model: torch.nn.Module, **settings: object) -> None:
        initialize(model, **settings)
        for router in moe.routers_of([model]).values():
            router.selection_bias[experts] = 1e3

    with mock.patch("trainer.models.model_parts.initialize", initialize_and_force):
        return run_layout(arguments)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2+ep2", "cp2+tp2+ep4"])
def test_ranks_whose_experts_nobody_chooses_take_part(pool: WorkerPool, layout: str) -> None:
    world_size, arguments, _ = LAYOUTS[layout]
    got = pool.run(world_size, forced_case, [*EXPERTS, *arguments], [1, 0])[0]
    assert_parity(got, pool.run(1, forced_case, EXPERTS, [1, 0])[0], 1e-10)
    assert got.buffers["layers.0.feed_forward.router.load"].tolist() == [0.5, 0.5, 0.0, 0.0]
    assert not got.gradients[0]["layers.0.feed_forward.experts.w13"][2:].any()


def graphs_case(arguments: list[str]) -> tuple[list[int], int]:
    """Graphs compiled after each of three steps, and breaks."""
    torch._dynamo.reset()
    from torch._dynamo.utils import counters

    counters.clear()
    with trainer_of([*arguments, *COMPILED]) as trainer:
        graphs = [trainer.train_step(step) or compiled_graphs() for step in (1, 2, 3)]
    return graphs, sum(counters["graph_break"].values())


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", "full", "selective"])
@pytest.mark.parametrize(("family", "compiled"), [("qwen3_moe", 2), ("qwen2_moe", 4)])
def test_attention_and_a_shared_expert_are_graphs_of_their_own(
    pool: WorkerPool, family: str, compiled: int, mode: str
) -> None:
    """All blocks share these graphs; the loss and dense layers have their own, and no later step compiles again."""
    model = [f"--model.name={family}", "--training.dtype=float64"]
    (graphs, breaks), _ = pool.run(2, graphs_case, [*model, *degrees(dp_shard=2), ep(2), ac(mode)])
    assert (graphs, breaks) == ([compiled] * 3, 0)


def attentions_case(arguments: list[str]) -> tuple[int, int]:
    """Forwards of attention and of experts in a second step of two micro-batches, and two layers."""
    with trainer_of([*arguments, *COMPILED]) as trainer:
        trainer.train_step(1)
        with mock.patch.object(Experts, "sums", autospec=True, side_effect=Experts.sums) as sums, profile() as seen:
            trainer.train_step(2)
    names = [event.name for event in seen.events()]
    return names.count("aten::_scaled_dot_product_flash_attention_for_cpu"), sums.call_count


@pytest.mark.parametrize(("mode", "forwards"), [("selective", (4, 8)), *slow(("none", (4, 4)), ("full", (8, 8)))])
def test_compiled_attention_is_kept_by_operator_and_experts_are_recomputed(
    pool: WorkerPool, mode: str, forwards: tuple[int, int]
) -> None:
    assert pool.run(2, attentions_case, [*EXPERTS, *degrees(dp_shard=2), ep(2), ac(mode)])[0] == forwards


# ---- negative controls


@contextmanager
def planted(fault: str) -> Iterator[None]:
    real = expert_parallel.added_rows

    def dropping(rows: torch.Tensor, places: torch.Tensor, number: int) -> torch.Tensor:
        return real(rows * (torch.arange(len(rows)) > 0).unsqueeze(1), places, number)

    patches = {
        "a token dropped": mock.patch.object(expert_parallel, "added_rows", dropping),
        "load counted locally": mock.patch.object(moe, "all_reduce", lambda x, _over: x),
        "experts not summed over tp": mock.patch.object(ParallelDims, "expert_mesh", ParallelDims.parameter_mesh),
    }
    with patches[fault]:
        yield


def faulty_case(arguments: list[str], fault: str) -> Record:
    with planted(fault):
        return run_layout(arguments)


@pytest.mark.parametrize(
    ("fault", "layout", "seen"),
    [
        ("load counted locally", "tp2+ep2", "buffer layers.0.feed_forward.router.load"),
        *slow(
            ("a token dropped", "tp2+ep2", "gradient of layers.0.attention"),
            ("experts not summed over tp", "tp2", r"gradient of layers.0.feed_forward.experts.w13"),
        ),
    ],
)
def test_negative_control(pool: WorkerPool, fault: str, layout: str, seen: str) -> None:
    world_size, arguments, _ = LAYOUTS[layout]
    got = pool.run(world_size, faulty_case, [*EXPERTS, "--optimizer.implementation=for-loop", *arguments], fault)[0]
    with pytest.raises(AssertionError, match=seen):
        assert_parity(got, reference(pool, *EXPERTS, "--optimizer.implementation=for-loop"), 1e-3)


def frozen_case() -> list[bool]:
    """Which parameters of experts, frozen before they are divided, are trained."""
    process = Process.from_environment()
    with process_group(process, parse_command_line([]).config.comm), torch.device("meta"):
        module = Experts(8, ExpertArgs(4, 2, 8, biases=True)).requires_grad_(False)
        mesh = init_device_mesh("cpu", (2,))
        return [p.requires_grad for p in parallelize_module(module, mesh, ExpertParallel()).parameters()]


def test_frozen_experts_stay_frozen(pool: WorkerPool) -> None:
    """A model with adapters has frozen experts."""
    assert pool.run(2, frozen_case) == [[False] * 4] * 2


# ---- checkpoints, host reads


@pytest.mark.slow
def test_a_checkpoint_of_one_layout_is_loaded_by_another(pool: WorkerPool, tmp_path: Path) -> None:
    saved: dict | None = None
    for layout in ("tp2+ep2", "fsdp4+ep2", "pp2", "fsdp2"):
        world_size, arguments, _ = LAYOUTS[layout]
        results = pool.run(world_size, load_step_save, str(tmp_path), [FAMILY, *arguments], 1)
        got = merged(results, "before")
        if saved is not None:
            assert got.keys() == saved.keys()
            assert [name for name in saved if not same(saved[name], got[name])] == []
        saved = merged(results, "after")
    assert saved["model.layers.1.feed_forward.router.load"].std() > 0


def tables_case(arguments: list[str]) -> Counter[tuple[int, ...]]:
    """Shapes of tensors whose values the host asked for in a second step."""
    shapes: Counter[tuple[int, ...]] = Counter()
    tolist = torch.Tensor.tolist

    def noted(self: torch.Tensor) -> list:
        shapes[tuple(self.shape)] += 1
        return tolist(self)

    with trainer_of([*arguments, "--metrics.log_freq=100", "--training.steps=9"]) as trainer:
        trainer.train_step(1)
        with mock.patch.object(torch.Tensor, "tolist", noted):
            trainer.train_step(2)
    return shapes


@pytest.mark.parametrize(("recomputed", "readings"), [("full", 2), *slow(("none", 1))])
def test_the_host_reads_one_table_of_counts_a_layer_and_forward(
    pool: WorkerPool, recomputed: str, readings: int
) -> None:
    settings = [*EXPERTS, *degrees(dp_shard=2), ep(2), ac(recomputed), "--optimizer.implementation=foreach"]
    for shapes in pool.run(2, tables_case, settings):
        layers, micro_batches = 2, 2
        assert shapes == {(2, 2 + 4): layers * micro_batches * readings, TOTALS: 1}
