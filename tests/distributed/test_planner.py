"""Law: the planner's memory of a step is what the allocator of a real CPU rank reports, to 2 %."""

import math

import pytest

from lct_planner.worker import Worker
from tests.distributed.memory_cases import measured_case, predicted_case
from tests.distributed.pool import WorkerPool
from tests.distributed.test_parity import LAYOUTS
from tests.slow import slow

_P, _CP, _AC = "--parallelism.", "--parallelism.context_parallel_", "--activation_checkpoint."
_FULL = [f"{_AC}mode=full"]
_OP = [f"{_AC}mode=selective"]
_OFFLOAD = [*_FULL, f"{_AC}offload=inputs", f"{_AC}offload_keep_last=1"]
_BF16 = ["--training.mixed_precision_param=bfloat16"]
_DOCUMENTS = "--training.attention_mask=document"
_FOUR_ROWS = ["--training.local_batch_size=4"]
SIZES = ["--training.seq_len=512", "--training.local_batch_size=2", "--training.global_batch_size=-1"]


def cp(degree: int, method: str, *options: str) -> list[str]:
    return [f"{_CP}degree={degree}", f"{_CP}method={method}", *options]


def family(name: str, *options: str) -> list[str]:
    return [f"--model.name={name}", "--model.flavor=debugmodel", *options]


CASES: dict[str, tuple[int, list[str]]] = {
    "one": (1, []),
    **{name: (ranks, arguments) for name, (ranks, arguments, *_) in LAYOUTS.items() if ranks <= 4},
    "full": (1, _FULL),
    "by operator": (1, _OP),
    "every second layer": (1, [*_OP, f"{_AC}selective_ac_option=2"]),
    "offloaded": (1, _OFFLOAD),
    "in parts": (1, [*_FULL, f"{_AC}mlp_chunk_tokens=64"]),
    "fsdp2, full": (2, _FULL),
    "fsdp2, offloaded": (2, _OFFLOAD),
    "loss in chunks": (1, ["--training.loss_chunk_tokens=128"]),
    "bfloat16": (2, _BF16),
    "bfloat16, full": (1, [*_FULL, *_BF16]),
    "weights in bfloat16": (2, ["--training.dtype=bfloat16"]),
    "ring": (2, cp(2, "ring")),
    "all_gather": (2, cp(2, "all_gather")),
    "all_to_all": (2, cp(2, "all_to_all")),
    "all_to_all, kept": (2, cp(2, "all_to_all", f"{_CP}keep_exchanged=true")),
    "hybrid": (4, cp(4, "hybrid", f"{_CP}hybrid_degrees", "2", "2")),
    "ring of 4, full": (4, cp(4, "ring", *_FULL)),
    "ring, by operator": (2, cp(2, "ring", *_OP)),
    "ring, full, tp2": (4, cp(2, "ring", *_FULL, f"{_P}tensor_parallel_degree=2")),
    "short convolution": (2, cp(2, "ring", "--model.short_conv_kernel=4")),
    "qwen2": (1, family("qwen2")),
    "qwen3": (1, family("qwen3")),
    "mistral, window": (1, family("mistral", "--model.sliding_window=64")),
    "accumulated": (1, ["--training.global_batch_size=8"]),
    "fused optimizer": (1, ["--optimizer.implementation=fused"]),
    "parameters on the host": (2, ["--training.enable_cpu_offload=true"]),
    "ring of 4, documents": (4, cp(4, "ring", _DOCUMENTS)),
    "ring of 4, full, documents, windows": (4, cp(4, "ring", *_FULL, _DOCUMENTS, "--model.sliding_window=64")),
    "all_to_all, query heads in passes": (2, cp(2, "all_to_all", f"{_CP}query_heads_per_pass=1")),
    "in groups": (1, [*_FULL, f"{_AC}group=2"]),
    "inputs and attention offloaded": (2, [*_OP, f"{_AC}offload=inputs+attention", f"{_AC}offload_keep_last=1"]),
    "moments in bfloat16": (2, ["--optimizer.state_dtype=bfloat16"]),
    "sequence in chunks": (1, ["--training.sequence_chunks=4"]),
    "sequence in chunks, offloaded": (1, ["--training.sequence_chunks=4", "--training.sequence_chunks_offload=true"]),
    "adapters": (2, ["--lora.rank=8"]),
    "adapters over weights in four bits": (2, ["--lora.rank=8", "--lora.quantize=nf4"]),
    "experts": (1, family("qwen3_moe")),
    "experts_in_parts": (1, family("qwen3_moe", *_FULL, f"{_AC}mlp_chunk_tokens=256", "--model.flavor=tiny")),
    "experts divided over ranks": (2, family("qwen3_moe", f"{_P}expert_parallel_degree=2")),
    "gpt-oss": (1, family("gpt_oss")),
    "gemma2": (1, family("gemma2")),
    "gemma3, ring": (2, cp(2, "ring", *family("gemma3"))),
    "olmo2, tp2": (2, family("olmo2", f"{_P}tensor_parallel_degree=2")),
    "smollm3": (1, family("smollm3")),
    "glm4_moe, tp2+ep2": (2, family("glm4_moe", f"{_P}tensor_parallel_degree=2", f"{_P}expert_parallel_degree=2")),
    "sparse attention": (2, cp(2, "all_gather", *family("deepseek_v32"))),
    "sparse attention in chunks": (1, family("deepseek_v32", "--training.sequence_chunks=4")),
    "hsdp2x2": (4, [f"{_P}data_parallel_replicate_degree=2", f"{_P}data_parallel_shard_degree=2"]),
    "hsdp2x2, weights in bfloat16": (  # a float32 buffer of each layer stays (pytorch issue 179128)
        4,
        [f"{_P}data_parallel_replicate_degree=2", f"{_P}data_parallel_shard_degree=2", "--training.dtype=bfloat16"],
    ),
    "1F1B": (
        2,
        [f"{_P}pipeline_parallel_degree=2", f"{_P}pipeline_parallel_schedule=1F1B", "--training.local_batch_size=4"],
    ),
}
_RUNS = 3  # at most: on a busy machine a thread of gloo frees late
QUICK = ("one", "fsdp2", "fsdp2+cp2", "offloaded", "experts_in_parts")


@pytest.mark.parametrize("name", [*QUICK, *slow(*(name for name in CASES if name not in QUICK))])
def test_the_allocator_of_a_rank_reports_what_is_predicted(pool: WorkerPool, name: str) -> None:
    ranks, arguments = CASES[name]
    arguments = ["--model.flavor=debugmodel", *SIZES, *arguments]
    (predicted,) = pool.run(1, predicted_case, arguments, ranks, 0)
    measured = math.inf
    for _ in range(_RUNS):
        measured = min(measured, pool.run(ranks, measured_case, arguments)[0])
        if predicted == pytest.approx(measured, rel=0.02):
            break
    assert predicted == pytest.approx(measured, rel=0.02)


def test_preferences_are_traced_with_their_reference() -> None:
    """A frozen copy of the weights takes their bytes; adapters need none."""
    pairs = ["--training.dataset=preferences", "--training.dataset_path=x", "--checkpoint.initial_load_path=x"]
    parameters = []
    with Worker(has_shim=False) as worker:
        for arguments in ([], pairs, [*pairs, "--lora.rank=8"]):
            answer = worker.ask(["--model.flavor=debugmodel", *SIZES, *arguments], 1, None, whole=True)
            live = answer["profiles"]["0"]["live"]
            parameters.append(max(purposes["parameters"] for purposes in live.values()))
    text, copied, adapted = parameters
    assert copied == 2 * text
    assert text < adapted < 1.1 * text


def test_forty_settings_are_compared() -> None:
    assert len(CASES) >= 40
