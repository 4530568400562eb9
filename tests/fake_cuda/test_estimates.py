"""Law: presets fit on their GPUs, and the planner says what runs on GPUs have shown."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from lct_planner import shim
from lct_planner.estimate import Estimate, estimate, lines
from lct_planner.suggest import suggestions
from lct_planner.timing import attention_kernels, device
from lct_planner.worker import Worker

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(shim.why_not()), reason=shim.why_not()),
]
_P = "--parallelism."
_BOTH = ("forward", "backward")


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker(has_shim=True) as worker:
        yield worker


def of(worker: Worker, preset: str, ranks: int, *settings: str, gpu: str = "h100") -> Estimate:
    return estimate(worker, [f"--job.config_file={preset}", *settings], ranks, device(gpu))


@pytest.mark.parametrize(
    ("preset", "ranks"),
    [
        ("llama3_8b", 8),
        ("llama3_8b_long", 8),
        ("llama3_8b_extend", 8),
        ("llama3_8b_1m", 8),
        ("llama3_8b_1m_64", 64),
        ("qwen3_8b", 8),
        ("qwen3_8b_1m", 8),
        ("llama3_70b", 256),
        ("llama3_405b", 512),
    ],
)
def test_a_preset_fits_on_80_gb(worker: Worker, preset: str, ranks: int) -> None:
    answer = of(worker, preset, ranks)
    assert answer.fits, answer.by_purpose
    if preset.endswith("_1m"):
        assert answer.total < 56e9


def test_an_estimate_leaves_the_folder_of_its_job_alone(worker: Worker, tmp_path: Path) -> None:
    """The configuration of a finished run is there."""
    of(worker, "debug_model", 1, f"--job.dump_folder={tmp_path / 'run'}")
    assert not [*tmp_path.iterdir()]


def test_sixteen_thousand_ranks(worker: Worker) -> None:
    settings = (f"{_P}tensor_parallel_degree=8", f"{_P}pipeline_parallel_degree=16", "--training.local_batch_size=16")
    options = ("--training.global_batch_size=2048", "--activation_checkpoint.mode=full", "--compile.no-enable")
    answer = of(worker, "llama3_405b", 16384, *settings, *options)
    assert answer.fits
    assert "pipeline bubble" in answer.time.bottleneck  # as many micro-batches as stages


def test_fsdp_comes_before_tensor_parallelism_inside_a_node(worker: Worker) -> None:
    """KempnerForge's 8B on 4 H200: 53.8 % against 34.7 % MFU."""
    shards, tensors = (
        of(worker, "llama3_8b", 4, f"{_P}tensor_parallel_degree={tp}", "--training.global_batch_size=16", gpu="h200")
        for tp in (1, 4)
    )
    assert shards.mfu[0] > 1.3 * tensors.mfu[0]


def test_all_to_all_comes_before_a_ring_at_64k_inside_a_node(worker: Worker) -> None:
    """In prime-rl's runs at 65,536 tokens, all-to-all lost up to 8 %, and a ring 29 to 32 %."""
    arguments = ["--job.config_file=llama3_8b_long", "--training.seq_len=65536", "--training.attention_mask=causal"]
    choices = suggestions(partial(estimate, worker, ranks=8, device=device("h100")), arguments, 8, 200e9)
    settings_of_8 = [c.settings for c in choices if c.settings["parallelism.context_parallel_degree"] == "8"]
    assert settings_of_8[0]["parallelism.context_parallel_method"] == "all_to_all"


def test_a_ring_pays_for_its_small_tiles(worker: Worker) -> None:
    """At 65,536 tokens over 8 ranks an H100 took 1.218 of one call for the tiles of a ring, 1.058 for all_to_all's."""
    settings = ("--training.seq_len=65536", "--training.attention_mask=causal", "--training.global_batch_size=1")
    one = ("--training.local_batch_size=1", f"{_P}context_parallel_degree=8")
    answers = {
        method: of(worker, "llama3_8b_long", 8, *settings, *one, f"{_P}context_parallel_method={method}")
        for method in ("all_to_all", "all_gather", "ring")
    }
    assert answers["all_to_all"].time.seconds < answers["ring"].time.seconds
    attention_times = {
        method: sum(part.get(f"attention_{direction}", 0.0) for part in x.time.parts.values() for direction in _BOTH)
        for method, x in answers.items()
    }
    assert attention_times["ring"] == pytest.approx(
        attention_times["all_to_all"] * 1.14 / 1.07, rel=0.02
    )  # without merging


def test_documents_are_predicted_with_the_kernel_that_computes_them(worker: Worker) -> None:
    """Without FlashAttention-3 the run takes FlashAttention-2, at 0.6 of cuDNN's speed, and the estimate says so."""
    causal, documents = (
        of(worker, "llama3_8b_long", 8, f"--training.attention_mask={mask}") for mask in ("causal", "document")
    )
    assert [list(attention_kernels(x.profile)) for x in (causal, documents)] == [["cudnn"], ["flash2"]]
    said = [text for _, text in lines(documents) if text.startswith("attention's kernel: FlashAttention-2 100%")]
    assert len(said) == 1
    assert "FlashAttention-3" in said[0]


def test_offloading_comes_before_more_context_parallelism(worker: Worker) -> None:
    """A million tokens on 16 GPUs: two sequences over 8 of a node each, or one over both nodes."""
    full = ("--activation_checkpoint.mode=full", "--compile.components=loss", "--training.global_batch_size=2")
    offload = ("--activation_checkpoint.offload=inputs", "--activation_checkpoint.mlp_chunk_tokens=8192")
    near = of(worker, "llama3_8b_1m", 16, *full, *offload)
    far = of(
        worker, "llama3_8b_1m", 16, *full, "--activation_checkpoint.offload=none", f"{_P}context_parallel_degree=16"
    )
    assert near.fits
    assert far.fits
    assert near.tokens_per_second > far.tokens_per_second
