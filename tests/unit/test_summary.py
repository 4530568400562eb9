"""What a run says before it starts: every decision with its reason, the mesh, and what a rank will hold."""

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.chat_files import CHATML, chat_folder, conversations, write_lines
from trainer.commands import start
from trainer.commands.start import job_notes, opening
from trainer.config.errors import ConfigError
from trainer.config.loader import parse_command_line
from trainer.job import ResolvedJob, resolve
from trainer.job.memory import check_memory
from trainer.job.record import RankMemory, size_words
from trainer.job.summary import closing, summary
from trainer.runtime.devices import Machine

ROOT = Path(__file__).resolve().parents[2]
PRESETS = sorted(path.name for path in (ROOT / "train_configs").glob("*.toml"))
P = "--parallelism."
EVERYTHING = [
    "--model.sliding_window=128", "--model.sliding_window_every=2", "--training.attention_mask=document",
    f"{P}context_parallel_degree=2", f"{P}tensor_parallel_degree=2", f"{P}pipeline_parallel_degree=2",
    f"{P}context_parallel_load_balancer=balanced", f"{P}context_parallel_method=auto", "--checkpoint.enable",
    "--activation_checkpoint.mode=full", "--float8.enable", "--compile.enable",
]  # fmt: skip


def memory_of(job: ResolvedJob) -> RankMemory:
    return job.task.memory(job)


def job_of(*arguments: str, ranks: int = 1, device: str = "cpu") -> ResolvedJob:
    file = ["--job.config_file", f"{ROOT}/train_configs/debug_model.toml"]
    return resolve(parse_command_line([*file, *arguments]).config, ranks, device)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("ranks", [64, 512])
def test_a_summary_fits_100_columns_for_every_preset(name: str, ranks: int) -> None:
    config = parse_command_line(["--job.config_file", f"{ROOT}/train_configs/{name}"]).config
    config = replace(config, training=replace(config.training, global_batch_size=-1, data_streams=512))
    job = resolve(config, ranks, "cuda", missing=[])
    assert max(map(len, summary(job, 80).splitlines())) <= 80
    text = summary(job)
    assert max(map(len, text.splitlines())) <= 100, text
    for topic in ("model", "data", "step", "mesh", "attention", "precision", "recomputed", "checkpoints", "memory"):
        assert re.search(rf"(?m)^{topic} ", text), topic


def test_an_update_during_the_backward_is_said() -> None:
    settings = ["--training.enable_cpu_offload", "--training.max_norm=inf", "--optimizer.name=AdamW"]
    for early, said in (("false", ", on the host, computing"), ("true", ", updated during the backward, ")):
        assert said in re.sub(r"\s+", " ", summary(job_of(*settings, f"--training.early_update={early}")))


def test_every_decision_has_its_reason() -> None:
    text = re.sub(r"\s+", " ", summary(job_of(*EVERYTHING, ranks=8, device="cuda")))
    for part in (
        "pp 2 x cp 2 x tp 2 = 8 GPUs; cp = 2 ranks shard parameters and optimizer (FSDP)",
        "1F1B: 2 stages of",
        "causal mask within packed documents, a window of 128 tokens in 2 of 4 layers; ",
        " over 2 ranks (auto: ",
        "balanced: documents assigned by work and traffic, for each batch; kernel varlen (auto: by device, type and",
        "computing in bfloat16 (auto: bfloat16 on GPUs), gradients summed in float32; float8 products, tensorwise",
        "all activations except the input of each layer (full)",
        "each layer and the loss, by inductor; the first step takes minutes",
        "every 500 steps and after the last one, in outputs/debug_model/checkpoint",
        "8,192 tokens: 16 sequences of 512 = 8 micro-batches x 2 sequences x 1 data-parallel rank; 100 steps are",
    ):
        assert part in text, (part, text)


def test_a_kernel_that_cannot_run_here_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot do tensors on cpu or float32; kernels that can: 'cpu_flash', 'math'"):
        job_of(f"{P}context_parallel_degree=2", f"{P}context_parallel_kernel=cuda_flash", ranks=2)


@pytest.mark.parametrize(
    ("settings", "device", "kernel"),
    [
        ([], "cuda", "cudnn on compute capability 9.0 or later without FlashAttention-3 or -4, else cuda_flash (auto"),
        (["--training.deterministic"], "cuda", "cuda_flash (auto"),
        (["--model.sliding_window=128"], "cuda", "cuda_flash (auto"),
        (["--training.attention_mask=document"], "cuda", "varlen (auto"),
        ([f"{P}context_parallel_load_balancer=balanced"], "cuda", "cudnn on compute"),
        ([f"{P}context_parallel_kernel=cudnn"], "cuda", "cudnn (as set)"),
        ([], "cpu", "cpu_flash (auto"),
    ],
)
def test_the_kernel_and_its_rule(settings: list[str], device: str, kernel: str) -> None:
    """It depends on the GPU, which nobody knows before the job starts."""
    job = job_of(f"{P}context_parallel_degree=2", f"{P}context_parallel_method=ring", *settings, ranks=2, device=device)
    assert f"; kernel {kernel}" in re.sub(r"\s+", " ", summary(job))


@pytest.mark.parametrize(
    ("settings", "device", "named"),
    [
        (["--training.attention_mask=document"], "cuda", True),
        (["--model.sliding_window=128"], "cuda", True),
        ([f"{P}context_parallel_kernel=varlen"], "cuda", True),
        (["--training.attention_mask=document", "--training.deterministic"], "cuda", False),
        ([f"{P}context_parallel_kernel=cudnn"], "cuda", False),
        (["--training.attention_mask=document"], "cpu", False),
    ],
)
def test_packages_that_would_be_faster(settings: list[str], device: str, named: bool) -> None:
    """FlashAttention computes documents and windows, and PyTorch has FlashAttention-2."""
    text = summary(job_of(f"{P}context_parallel_degree=2", *settings, ranks=2, device=device))
    words = re.sub(r"\s+", " ", text)
    assert ("FlashAttention-4 on compute capability 9.x and 10.x (pip install flash-attn-4)" in words) == named
    assert ("computed by FlashAttention-2, or faster, if installed, by FlashAttention-3 on" in words) == named


def test_a_deterministic_job_refuses_a_kernel_that_is_not() -> None:
    words = f"{P}context_parallel_degree=2", f"{P}context_parallel_kernel=cudnn", "--training.deterministic"
    with pytest.raises(ConfigError, match=r"'cudnn' cannot do training\.deterministic; kernels that can: "):
        job_of(*words, ranks=2, device="cuda")


def test_the_first_line_says_what_starts() -> None:
    config = job_of("--job.description=my run").config
    assert opening(config, 4, "cuda") == "my run on 4 GPUs; output goes to ./outputs/debug_model"
    assert opening(config, 1, "cpu") == "my run on 1 CPU rank; output goes to ./outputs/debug_model"


def test_after_training_on_conversations_the_model_is_talked_to(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "chat.jsonl", conversations(8))
    folder = chat_folder(tmp_path / "model", CHATML)
    words = "--training.dataset=chat", f"--training.dataset_path={file}", f"--model.tokenizer_path={folder}"
    job = job_of(*words, "--job.dump_folder=out")
    text = closing(job, checkpoint=Path("out/checkpoint/step-1"), program="lct")
    assert "next         lct chat out\n" in text


def test_the_end_says_where_everything_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of("--job.dump_folder=out", "--metrics.no-enable_tensorboard")
    assert closing(job, checkpoint=None, program="lct").splitlines() == [
        "metrics      out/metrics.jsonl",
        "weights      not saved; --checkpoint.enable saves them",
    ]
    text = closing(job, checkpoint=Path("out/checkpoint/step-100"), program="lct")
    assert "weights      out/checkpoint/step-100\nnext         lct generate out --prompt" in text
    monkeypatch.setattr(type(job.task), "command", "python -m mine {}")  # a task of a package has a program of its own
    assert "next         python -m mine out\n" in closing(job, checkpoint=Path("out/checkpoint/step-1"), program="lct")


# ---- the mesh


# ---- memory


def test_when_the_loss_is_computed_in_chunks() -> None:
    small = job_of("--training.seq_len=4096")
    large = replace(small, model=replace(small.model, vocab_size=100_000))
    assert small.loss_chunk == (0, "auto: 4,352 tokens in the vocabulary are few")
    assert large.loss_chunk == (2560, "auto: 100,000 tokens in the vocabulary")
    huge = replace(small, model=replace(small.model, vocab_size=1_000_000))
    assert huge.loss_chunk[0] == 256  # the most of 128 each that 1 GiB of float32 logits hold
    half = job_of("--training.seq_len=4096", f"{P}tensor_parallel_degree=2", ranks=2)
    assert replace(half, model=huge.model).loss_chunk[0] == 512
    few = [job_of(f"--training.seq_len={n}", "--training.local_batch_size=1") for n in (768, 769)]
    few = [replace(job, model=large.model) for job in few]
    assert [job.loss_chunk[0] for job in few] == [0, 2560]
    assert few[0].loss_chunk[1] == "auto: 768 tokens have few logits"
    assert job_of("--training.loss_chunk_tokens=7").loss_chunk == (7, "")
    gathered = job_of(f"{P}tensor_parallel_degree=2", f"{P}disable_loss_parallel", ranks=2)
    float8 = job_of("--float8.enable", "--float8.filter_fqns=wk")
    for job, words in ((gathered, "gathers all logits"), (float8, "the output in float8")):
        chunk, reason = replace(job, model=large.model).loss_chunk
        assert chunk == 0
        assert words in reason


def test_weights_gradients_and_optimizer_are_exact() -> None:
    whole = job_of("--training.seq_len=64", "--optimizer.name=AdamW")
    memory, parameters = memory_of(whole), whole.model.n_params()
    norms = (2 * 4 + 1) * 256  # the estimate leaves them out
    assert (memory.weights, memory.gradients, memory.optimizer) == tuple(
        n * 4 * (parameters - norms) for n in (1, 1, 2)
    )
    muon = memory_of(job_of("--training.seq_len=64", "--optimizer.name=Muon"))
    matrices = parameters - norms - 2 * whole.model.vocab_size * whole.model.dim  # one moment of each
    assert muon.optimizer == memory.optimizer - 4 * matrices
    shared = memory_of(job_of("--training.seq_len=64", f"{P}context_parallel_degree=2", ranks=4))
    assert shared.weights == memory.weights // 4
    tensor_parallel = memory_of(job_of(f"{P}tensor_parallel_degree=2", ranks=2))
    assert tensor_parallel.weights == memory.weights // 2


def test_a_stage_holds_its_modules() -> None:
    whole = memory_of(job_of("--training.seq_len=64"))
    stages = memory_of(job_of("--training.seq_len=64", f"{P}pipeline_parallel_degree=2", ranks=2))
    assert whole.weights / 2 <= stages.weights < 0.75 * whole.weights
    balanced = job_of("--training.attention_mask=document", "--training.balance=step", ranks=2)
    assert "2 data-parallel ranks, documents assigned for equal work; " in re.sub(r"\s+", " ", summary(balanced))


def test_a_size_in_words() -> None:
    assert [size_words(x) for x in (2**19, 2**25, 1.5 * 2**30, 300 * 2**30, 2**41)] == [
        "0.5 MiB", "32 MiB", "1.5 GiB", "300 GiB", "2.0 TiB",
    ]  # fmt: skip


@pytest.mark.parametrize("seq_len", [10**12, 2 * 10**9])
def test_a_length_that_no_memory_holds_is_refused(seq_len: int) -> None:
    job = job_of(f"--training.seq_len={seq_len}")
    message = rf"training\.local_batch_size = 2, training\.seq_len = {seq_len} .* it has 24\.0 GiB"
    with pytest.raises(ConfigError, match=rf"{message}; use a smaller batch or length"):
        job_notes(job, Machine(0, None, 24 * 2**30), 1)
    job = job_of(f"--training.seq_len={seq_len}", "--training.local_batch_size=1")
    with pytest.raises(ConfigError, match=rf"^training\.seq_len = {seq_len} .*; use a shorter length"):
        job_notes(job, Machine(0, None, 24 * 2**30), 1)


def test_without_a_known_device_only_the_impossible_is_refused() -> None:
    check_memory(job_of(f"--training.seq_len={2 * 10**9}"), None)
    with pytest.raises(ConfigError, match="no device has that"):
        check_memory(job_of(f"--training.seq_len={10**12}"), None)


@pytest.mark.parametrize(("name", "ranks", "seq_len"), [("llama3_8b_long", 8, 2**17), ("llama3_8b_1m_64", 64, 2**20)])
def test_the_long_presets_say_their_tokens(name: str, ranks: int, seq_len: int) -> None:
    config = parse_command_line(["--job.config_file", name]).config
    job = resolve(config, ranks, "cuda", missing=[])
    assert config.training.seq_len == seq_len
    assert job.degrees.cp == ranks
    assert "in chunks of 2,048 tokens (auto: 128,256 tokens in the vocabulary)" in " ".join(summary(job).split())
    assert f"{config.training.global_batch_size * seq_len:,} tokens: " in summary(job)


# ---- what may surprise


def test_what_may_surprise_gets_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = job_of(f"--job.dump_folder={tmp_path}")
    monkeypatch.delenv("LOG_RANK", raising=False)
    assert job_notes(quiet, Machine(0, None, 24 * 2**30), 1) == []
    assert job_notes(quiet, Machine(0, None, None, "a note"), 1) == ["a note"]

    monkeypatch.setitem(os.environ, "CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert job_notes(quiet, Machine(0, None, None), 1) == []  # of CPUs
    (queue,) = job_notes(replace(quiet, device_type="cuda"), Machine(1, None, None), 1)
    assert queue.startswith("CUDA_DEVICE_MAX_CONNECTIONS = 1 puts all streams of a GPU into one queue")
    monkeypatch.setitem(os.environ, "CUDA_DEVICE_MAX_CONNECTIONS", "8")
    assert job_notes(replace(quiet, device_type="cuda"), Machine(1, None, None), 1) == []

    (tmp_path / "checkpoint" / "step-40").mkdir(parents=True)
    (tmp_path / "checkpoint" / "step-40" / "state.json").write_text("{}")
    (left,) = job_notes(quiet, Machine(0, None, None), 1)
    assert "has a checkpoint of step 40, and checkpoint.enable is off: this run starts from the beginning" in left
    monkeypatch.setitem(os.environ, "LOG_RANK", "2,5")
    *_, spoken = job_notes(quiet, Machine(0, None, None), 1)
    assert spoken == "LOG_RANK names '2', '5', and there are the ranks 0 to 0: no rank logs its steps"
    monkeypatch.setitem(os.environ, "LOG_RANK", "0, 9")
    *_, spoken = job_notes(quiet, Machine(0, None, None), 1)
    assert spoken == "LOG_RANK names '9', and there are the ranks 0 to 0: the others log"
    monkeypatch.setattr(start, "_left_checkpoints", lambda _: "")
    monkeypatch.setitem(os.environ, "LOG_RANK", "0")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "the rate rises over 10 steps, falls to 0 of it over the last 90, linear"),
        (["--training.steps=4"], "the rate rises over 10 steps"),
        (
            ["--lr_scheduler.warmup_steps=0", "--lr_scheduler.decay_ratio=0.2"],
            "the rate falls to 0 of it over the last 20",
        ),
    ],
)
def test_the_schedule_is_said(arguments: list[str], words: str) -> None:
    text = re.sub(r"\s+", " ", summary(job_of(*arguments)))
    assert f"schedule {words}" in text
    assert "-" not in text.partition("schedule ")[2].partition(" precision")[0]
