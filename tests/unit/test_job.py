"""What can be checked before ranks start is checked, each rule with one sentence that says what would work."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from trainer.config.errors import ConfigError
from trainer.config.keys import keys_of
from trainer.config.loader import parse_command_line
from trainer.config.schema import JobConfig, Model
from trainer.job import resolve
from trainer.job.degrees import Degrees

ROOT = Path(__file__).resolve().parents[2]
# Those of language models; test_field_jobs.py has the others.
CONFIGS = sorted(path for path in (ROOT / "train_configs").glob("*.toml") if not path.name.startswith("domain_"))
CONFIGS = [path for path in CONFIGS if path.name != "llama3_8b_lora.toml"]  # it needs weights: test_lora.py
# The shipped tokenizer has 4,352 tokens, the debug model 8 heads, 4 key/value heads and 768 feed-forward channels.
RANKS = {
    "llama3_70b.toml": 256,
    "llama3_405b.toml": 512,
    "llama3_8b_long.toml": 16,
    "llama3_8b_extend.toml": 16,
    "llama3_8b_1m.toml": 16,
    "llama3_8b_1m_64.toml": 128,
    "qwen3_8b_1m.toml": 16,
    "qwen3_8b_trajectories.toml": 16,
    "qwen3_next_80b.toml": 64,
    "kimi_linear_48b.toml": 32,
    "granite4_h_small.toml": 16,
    "deepseek_v3.toml": 512,
}


@pytest.fixture(autouse=True)
def _in_a_new_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def check(*argv: str, world_size: int = 1) -> Degrees:
    return resolve(parse_command_line(list(argv)).config, world_size).degrees


def refused(*argv: str, world_size: int = 1) -> str:
    with pytest.raises(ConfigError) as error:
        check(*argv, world_size=world_size)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_the_defaults_are_valid():
    assert check() == Degrees(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, world_size=1)


def test_the_degrees_of_the_configuration_are_resolved():
    degrees = check(
        *("--parallelism.data_parallel_replicate_degree", "2", "--parallelism.tensor_parallel_degree", "2"),
        world_size=8,
    )
    assert degrees == Degrees(dp_replicate=2, dp_shard=2, cp=1, tp=2, pp=1, world_size=8)


def test_replicas_with_offload_are_refused_on_gpus_alone():
    given = ["--training.enable_cpu_offload", "--parallelism.data_parallel_replicate_degree=2"]
    assert "pytorch issue 180665" in refused(*given, world_size=4)
    assert resolve(parse_command_line(given).config, 4, "cpu").degrees.dp_replicate == 2


def test_the_update_on_the_host_is_fused_whatever_the_device():
    for device in ("cuda", "cpu"):
        job = resolve(parse_command_line(["--training.enable_cpu_offload"]).config, 1, device)
        assert job.config.optimizer.implementation == "fused"


def test_the_degrees_of_a_hybrid_are_resolved():
    hybrid = ["--parallelism.context_parallel_degree=8", "--parallelism.context_parallel_method=hybrid"]
    for a2a, ring in ((2, 4), (4, 2)):
        words = ["--parallelism.context_parallel_hybrid_degrees", str(a2a), str(ring)]
        assert check(*hybrid, *words, world_size=8).cp_a2a == a2a


def test_nothing_is_written_by_a_check(tmp_path):
    check("--job.dump_folder", "deep/folder")
    assert not list(tmp_path.iterdir())


# ---- training configurations


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
@pytest.mark.parametrize("more", [1, 2])
def test_every_training_configuration_works_for_its_number_of_ranks(path: Path, more: int, tmp_path):
    (tmp_path / "data.jsonl").write_text('{"text": "a", "prompt": "a", "answer": "b"}\n' * 64)
    given = ["--job.config_file", str(path)]
    if path.name != "debug_model.toml":  # the published tokenizer and the data are the user's to bring
        given += ["--model.tokenizer_path", "None", "--training.dataset_path", str(tmp_path / "data.jsonl")]
        given += ["--checkpoint.initial_load_path", "None"]
    ranks = RANKS.get(path.name, 8) // more
    assert check(*given, world_size=ranks).world_size == ranks


def test_training_configurations_need_the_published_tokenizer():
    for path in CONFIGS:
        if path.name != "debug_model.toml":
            message = refused("--job.config_file", str(path), world_size=RANKS.get(path.name, 8))
            given = parse_command_line(["--job.config_file", str(path)]).config.model.tokenizer_path
            assert f"model.tokenizer_path = {given!r} does not exist" in message
            assert given != Model().tokenizer_file


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_the_default_run_works_on_one_to_eight_ranks(ranks: int):
    check("--job.config_file", str(ROOT / "train_configs/debug_model.toml"), world_size=ranks)


# ---- numbers

BOUNDS = {name: key.bounds for name, key in keys_of(JobConfig).items() if key.bounds is not None}
NOT_RANGED = {  # numbers whose rule needs the degrees or another key
    "training.global_batch_size",
    "checkpoint.load_step",
}


def test_every_number_has_a_rule():
    numbers = {name for name, key in keys_of(JobConfig).items() if key.kind in (int, float, int | None, float | None)}
    assert numbers == set(BOUNDS) | NOT_RANGED


@pytest.mark.parametrize("key", BOUNDS)
def test_a_number_out_of_range_is_refused_with_one_that_works(key: str):
    for value in (-1, -0.5, 2.0, float("nan"), float("inf"), 10**30):
        if not BOUNDS[key].test(value):
            with pytest.raises(ConfigError) as error:
                resolve(with_value(key, value), 1)
            message = str(error.value)
            assert message.startswith(f"{key} = {value!r} must be ")
            works = re.search(r"such as (\S+)$", message)[1]
            assert BOUNDS[key].test(float(works))
    assert not BOUNDS[key].test(-2 if key.endswith("shard_degree") else -1)  # -1: what is left
    assert BOUNDS[key].test(float("inf")) == (key == "training.max_norm")
    assert not BOUNDS[key].test(float("nan"))


def with_value(name: str, value: float) -> JobConfig:
    table, key = name.split(".")
    config = JobConfig()
    return replace(config, **{table: replace(getattr(config, table), **{key: value})})


@pytest.mark.parametrize(
    ("key", "value", "fine"),
    [
        ("optimizer.lr", "0", False),
        ("optimizer.beta1", "1", False),
        ("optimizer.beta1", "0", True),
        ("optimizer.weight_decay", "0", True),
        ("training.steps", "0", False),
        ("training.seed", "0", True),
        ("comm.trace_buf_size", "0", True),
        ("comm.init_timeout_seconds", "0", False),
        ("model.rope_scaling", "1", True),
        ("model.rope_scaling", "0.99", False),
        ("lr_scheduler.min_lr_factor", "1", True),
        ("lr_scheduler.warmup_steps", "0", True),
        ("job.max_minutes", "0", False),
    ],
)
def test_the_ends_of_ranges(key: str, value: str, fine: bool):
    if fine:
        check(f"--{key}", value)
    else:
        assert key in refused(f"--{key}", value)


# ---- rules between keys: arguments, ranks, what the message says

DEGREES = "parallelism.data_parallel_shard_degree"
TP = "--parallelism.tensor_parallel_degree"
AC_OPTION = "--activation_checkpoint.selective_ac_option"
CP = "--parallelism.context_parallel_"
A2A = [f"{CP}degree=2", f"{CP}method=all_to_all"]
CHUNKS = "--training.sequence_chunks="
HOST, FREE = "--training.enable_cpu_offload", "--training.max_norm=inf"
EARLY = "--training.on_nonfinite=stop_after_update"
COMPILED = ["--compile.enable"]
RECOMPUTED, PARTS = ["--activation_checkpoint.mode=full"], ["--activation_checkpoint.mlp_chunk_tokens=64"]
RULES = [
    (
        ["--parallelism.context_parallel_degree", "4", "--training.seq_len", "3"],
        4,
        ["training.seq_len = 3", "context_parallel_degree = 4", "at least 4"],
    ),
    (
        ["--parallelism.context_parallel_degree", "2", TP, "4", "--training.seq_len", "4"],
        8,
        ["training.seq_len = 4", "tensor_parallel_degree = 4", "at least 8"],
    ),
    (
        [f"{CP}degree", "3", f"{CP}method", "all_to_all"],
        3,
        ["context_parallel_method = 'all_to_all' over 3 ranks", "8 query heads", "degrees that work: 1, 2, 4, 8"],
    ),
    (  # after tensor parallelism, a rank has half of the heads
        [f"{CP}degree", "8", TP, "2", f"{CP}method", "all_to_all"],
        16,
        ["over 8 ranks", "4 query heads", "degrees that work: 1, 2, 4"],
    ),
    (
        [f"{CP}degree", "2", f"{CP}heads_per_pass", "1"],
        2,
        ["context_parallel_heads_per_pass = 1 has no effect", "'ring'", "use 'all_gather' or 'all_to_all'"],
    ),
    (
        [f"{CP}degree", "2", f"{CP}gradient_dtype", "bfloat16", "--training.mixed_precision_param", "float32"],
        2,
        ["context_parallel_gradient_dtype = 'bfloat16'", "computes in float32", "mixed_precision_param = 'bfloat16'"],
    ),
    (
        [f"{CP}degree", "2", f"{CP}method", "all_gather", f"{CP}heads_per_pass", "4"],
        2,
        ["context_parallel_heads_per_pass = 4 must be less than the 4 key/value heads", "use fewer"],
    ),
    (
        [f"{CP}degree", "2", f"{CP}method", "all_to_all", f"{CP}heads_per_pass", "1", f"{CP}keep_exchanged"],
        2,
        ["context_parallel_keep_exchanged = true keeps all heads", "heads_per_pass = 1", "use one of them"],
    ),
    (
        [f"{CP}degree", "4", f"{CP}method", "all_to_all", f"{CP}heads_per_pass", "1"],
        4,
        ["context_parallel_heads_per_pass = 1 must be less than the 1 key/value heads"],
    ),
    (
        [*A2A, f"{CP}query_heads_per_pass=2"],
        2,
        ["heads_per_pass = 2 must be less than the 2 query heads"],
    ),
    ([*A2A, f"{CP}query_heads_per_pass=1", f"{CP}heads_per_pass=1"], 2, ["sends one key/value head at a time"]),
    ([*A2A, f"{CP}query_heads_per_pass=1", f"{CP}keep_exchanged"], 2, ["keeps all heads", "query_heads_per_pass = 1"]),
    (
        [f"{CP}degree", "8", f"{CP}method", "hybrid"],
        8,
        ["hybrid_degrees = [] must be degrees [all_to_all, ring]", "one of [2, 4], [4, 2]"],
    ),
    (
        [f"{CP}degree", "8", f"{CP}method", "hybrid", f"{CP}hybrid_degrees", "2", "3"],
        8,
        ["hybrid_degrees = [2, 3]", "context_parallel_degree = 8", "one of [2, 4], [4, 2]"],
    ),
    ([f"{CP}degree", "3", f"{CP}method", "hybrid"], 3, ["hybrid_degrees = []", "use another method or degree"]),
    (
        [f"{CP}degree", "6", f"{CP}method", "hybrid", f"{CP}hybrid_degrees", "3", "2"],
        6,
        ["'hybrid' over 3 ranks", "8 query heads", "degrees that work: 1, 2, 4, 8"],
    ),
    (["--model.sliding_window_every", "2"], 1, ["sliding_window_every = 2 has no effect", "such as 4096"]),
    (["--parallelism.context_parallel_degree", "3"], 4, ["context_parallel_degree = 3", "context_parallel_degree = 4"]),
    (
        ["--lr_scheduler.total_steps", "50", "--lr_scheduler.min_lr_factor", "0.1"],
        1,
        ["warmup_steps = 200", "lr_scheduler.total_steps = 50", "lower it to 5"],
    ),
    (
        ["--training.steps", "1000", "--lr_scheduler.decay_ratio", "0.9"],
        1,
        ["decay_ratio = 0.9", "warmup_steps = 200", "at most 0.8"],
    ),
    (["--lr_scheduler.total_steps", "5000"], 1, ["total_steps = 5000", "training.steps = 10000", "at least 10000"]),
    (
        ["--activation_checkpoint.mode", "selective", "--activation_checkpoint.selective_ac_option", "5"],
        1,
        ["activation_checkpoint.selective_ac_option = '5'", "'op'", "from 1 to 4", "'debugmodel'"],
    ),
    (["--activation_checkpoint.selective_ac_option", "0"], 1, ["selective_ac_option = '0'", "such as '2'"]),
    (
        [*RECOMPUTED, "--activation_checkpoint.offload=inputs", "--activation_checkpoint.offload_keep_last=4"],
        1,
        ["offload_keep_last = 4", "the model keeps the inputs of only 4 layers", "set it to 3 or less"],
    ),
    (
        [*RECOMPUTED, "--activation_checkpoint.offload=inputs", "--parallelism.pipeline_parallel_degree=2"],
        2,
        ["offload_keep_last = 2", "a pipeline stage keeps the inputs of only 2 layers", "set it to 1 or less"],
    ),
    (
        [*RECOMPUTED, "--activation_checkpoint.offload=inputs+attention"],
        1,
        ["offload = 'inputs+attention' needs", "mode = 'selective' by operator", "use 'inputs' instead"],
    ),
    (
        [
            "--activation_checkpoint.mode=selective",
            "--activation_checkpoint.offload=inputs+attention",
            "--compile.enable",
        ],
        1,
        ["offload = 'inputs+attention' needs", "a model that is not compiled", "use 'inputs' instead"],
    ),
    (
        [*RECOMPUTED, "--activation_checkpoint.group=5"],
        1,
        ["group = 5", "'debugmodel' has 4 layers", "as many or fewer"],
    ),
    (
        [
            *(*RECOMPUTED, "--activation_checkpoint.group=2", "--parallelism.pipeline_parallel_degree=2"),
            *("--parallelism.pipeline_parallel_schedule=InterleavedZeroBubble", "--training.local_batch_size=4"),
        ],
        2,
        ["group = 2 computes the layers of a group", "InterleavedZeroBubble splits it", "use 1, or"],
    ),
    (
        ["--training.enable_cpu_offload", "--parallelism.data_parallel_replicate_degree=2"],
        2,
        ["enable_cpu_offload = true with parallelism.data_parallel_replicate_degree = 2", "use degree 1"],
    ),
    *(
        ([EARLY, *given], ranks, ["'stop_after_update' updates parameters on the host during the backward", *words])
        for given, ranks, words in (
            ([], 1, ["training.enable_cpu_offload = false", "or use 'stop'"]),
            ([HOST], 1, ["training.max_norm = 1, for which all gradients are needed"]),
            ([HOST, FREE, "--optimizer.name=Muon"], 1, ["optimizer.name = 'Muon'; AdamW and Adam"]),
            ([HOST, FREE, "--metrics.log_update_norms"], 1, ["metrics.log_update_norms = true"]),
            ([HOST, FREE, "--parallelism.pipeline_parallel_degree=2"], 2, ["pipeline_parallel_degree = 2"]),
        )
    ),
    ([f"{CHUNKS}0"], 1, ["training.sequence_chunks = 0 must be at least 1"]),
    (
        [f"{CHUNKS}300", "--training.seq_len=256"],
        1,
        ["sequence_chunks = 300 is more", "256; use at most 256"],
    ),
    (
        [f"{CHUNKS}129", "--training.seq_len=256", "--parallelism.tensor_parallel_degree=2"],
        2,
        ["sequence_chunks = 129", "seq_len = 256 / parallelism.tensor_parallel_degree = 2; use at most 128"],
    ),
    (
        [f"{CHUNKS}4", "--parallelism.context_parallel_degree=2"],
        2,
        ["sequence_chunks = 4 with parallelism.context_parallel_degree = 2", "FSDP, HSDP or TP"],
    ),
    (
        [f"{CHUNKS}4", "--parallelism.pipeline_parallel_degree=2"],
        2,
        ["sequence_chunks = 4 with parallelism.pipeline_parallel_degree = 2", "FSDP, HSDP or TP"],
    ),
    ([f"{CHUNKS}4", "--model.name=granitemoehybrid"], 1, ["sequence_chunks = 4", "layers of linear attention"]),
    (["--model.name=deepseek_v3", "--model.attention_sinks"], 1, ["model.attention_sinks = True", "latent attention"]),
    (
        [
            *("--model.name=deepseek_v3", "--parallelism.context_parallel_degree=2"),
            *("--parallelism.context_parallel_method=all_to_all", "--parallelism.context_parallel_keep_exchanged"),
        ],
        2,
        ["context_parallel_keep_exchanged = true", "latents"],
    ),
    ([f"{CHUNKS}4", "--model.short_conv_kernel=4"], 1, ["sequence_chunks = 4", "model.short_conv_kernel = 4"]),
    ([*PARTS, "--compile.enable"], 1, ["mlp_chunk_tokens = 64 with compile.enable", "compile.components = ['loss']"]),
    ([*PARTS, "--float8.enable", "--float8.emulate"], 1, ["mlp_chunk_tokens = 64 with float8.enable"]),
    ([*PARTS, "--activation_checkpoint.mode=selective"], 1, ["mlp_chunk_tokens = 64", "by operator keeps some"]),
    (["--activation_checkpoint.selective_ac_option", "ops"], 1, ["selective_ac_option = 'ops'", "'op'"]),
    (
        ["--profiling.enable_profiling", "--profiling.profile_freq", "3"],
        1,
        ["profile_freq = 3", "profiler_warmup = 3 + profiling.profiler_active = 1", "at least 4"],
    ),
    (
        ["--profiling.enable_profiling", "--training.steps", "50"],
        1,
        ["profile_freq = 100", "training.steps = 50", "at most 50"],
    ),
    (
        ["--profiling.enable_memory_snapshot", "--training.steps", "50"],
        1,
        ["profile_freq = 100", "training.steps = 50", "at most 50"],
    ),
    ([f"--{DEGREES}", "3"], 8, [f"{DEGREES} = 3", "world size of 8", f"{DEGREES} = 8", "3 ranks"]),
    ([TP, "3"], 8, ["tensor_parallel_degree = 3", "world size of 8", "tensor_parallel_degree = 4"]),
    ([TP, "0"], 8, ["tensor_parallel_degree = 0", "at least 1"]),
    (["--training.global_batch_size", "12"], 2, ["global_batch_size = 12", "= 8 x", "degree 2 = 16", "use 16 or -1"]),
    (["--training.global_batch_size", "40"], 2, ["global_batch_size = 40", "use 32 or 48 or -1"]),
    (["--training.global_batch_size", "0"], 1, ["global_batch_size = 0", "use 8 or -1"]),
    ([TP, "2", "--training.seq_len", "7"], 2, ["seq_len = 7", "tensor_parallel_degree = 2", "use 6 or 8"]),
    ([TP, "8"], 8, ["tensor_parallel_degree = 8", "4 key/value heads", "'debugmodel'", "1, 2, 4"]),
    ([TP, "3", "--training.seq_len", "9"], 3, ["tensor_parallel_degree = 3", "8 attention heads", "1, 2, 4"]),
    (
        [TP, "8", "--model.flavor", "3B", "--model.tokenizer_path", "odd.tiktoken"],
        8,
        ["tensor_parallel_degree = 8", "513 tokens in the vocabulary", "that fit this model: 1"],
    ),
    (["--model.flavor", "9B"], 1, ["model.flavor = '9B'", "debugmodel, 7B, 1B"]),
    (["--model.flavor", "debug"], 1, ["model.flavor = 'debug'", "'debugmodel'"]),
    (["--model.name", "lama3"], 1, ["model.name = 'lama3'", "'llama3'"]),
    (["--model.tokenizer_path", "nowhere.model"], 1, ["model.tokenizer_path = 'nowhere.model'", "does not exist"]),
    (["--model.tokenizer_path", ""], 1, ["model.tokenizer_path = ''", "leave it out"]),
    (["--training.dataset", "python_stdlb"], 1, ["training.dataset = 'python_stdlb'", "'python_stdlib'"]),
    (["--training.dataset", "text"], 1, ["training.dataset = 'text'", "training.dataset_path"]),
    (["--training.dataset", "text", "--training.dataset_path", "no.txt"], 1, ["training.dataset_path = 'no.txt'"]),
    (["--training.dataset", "text", "--training.dataset_path", "empty.txt"], 1, ["dataset_path = 'empty.txt'"]),
    (["--training.dataset_path", "one.txt"], 1, ["training.dataset_path = 'one.txt'", "leave it out", "'text'"]),
    (
        ["--training.dataset", "text", "--training.dataset_path", "one.txt", "--training.data_streams", "64"],
        1,
        ["training.data_streams = 64", "leave it out", "at most 1"],
    ),
    (["--job.dump_folder", "one.txt"], 1, ["job.dump_folder = 'one.txt'", "is a file", "./outputs"]),
    (["--job.dump_folder", "one.txt/deep/down"], 1, ["job.dump_folder = 'one.txt/deep/down'", "one.txt is a file"]),
    (["--job.dump_folder", "broken"], 1, ["job.dump_folder = 'broken'", "broken link"]),
    (["--job.dump_folder", ""], 1, ["job.dump_folder = ''", "./outputs"]),
    (["--activation_checkpoint.mode=memory_budget"], 1, ["mode = 'memory_budget'", "compile.enable", "'selective'"]),
    (
        ["--activation_checkpoint.mode=memory_budget", "--compile.enable", "--compile.components", "loss"],
        1,
        ["mode = 'memory_budget'", "'model' in compile.components"],
    ),
    (
        ["--activation_checkpoint.mode=memory_budget", "--compile.enable", "--compile.backend=eager"],
        1,
        ["mode = 'memory_budget'", "other than 'eager'"],
    ),
    (
        ["--parallelism.fsdp_backward_prefetch=1", "--parallelism.fsdp_reshard_after_forward=never"],
        2,
        ["fsdp_backward_prefetch = 1 has no effect", "'never'", "'always'"],
    ),
    (["--parallelism.enable_async_tensor_parallel", TP, "2"], 2, ["enable_async_tensor_parallel", "compile.enable"]),
    (
        ["--parallelism.enable_async_tensor_parallel", TP, "2", "--compile.enable", "--compile.backend=aot_eager"],
        2,
        ["enable_async_tensor_parallel", "compile.backend = 'inductor'"],
    ),
]


@pytest.mark.parametrize(
    ("argv", "ranks", "parts"), RULES, ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else None
)
def test_what_cannot_work_is_refused_in_one_sentence(argv: list[str], ranks: int, parts: list[str], tmp_path):
    (tmp_path / "one.txt").write_text("text")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "broken").symlink_to("nowhere")
    shipped = (ROOT / "trainer/assets/python_4k.tiktoken").read_text().splitlines()
    (tmp_path / "odd.tiktoken").write_text("\n".join(shipped[:257]))
    message = refused(*argv, world_size=ranks)
    for part in parts:
        assert part in message


def test_a_folder_without_permission_is_refused(monkeypatch):
    monkeypatch.setattr("os.access", lambda *_: False)  # the tests may run as root, who may write everywhere
    assert "not writable" in refused("--job.dump_folder", "x")


@pytest.mark.parametrize(
    "argv",
    [
        ["--lr_scheduler.total_steps", "20000"],
        ["--lr_scheduler.total_steps", "5000", "--lr_scheduler.min_lr_factor", "0.1"],
        ["--lr_scheduler.total_steps", "5000", "--lr_scheduler.decay_ratio", "0"],
        ["--training.steps", "1000", "--lr_scheduler.decay_ratio", "0.8"],
        ["--training.steps", "200"],
        ["--activation_checkpoint.mode", "selective", "--activation_checkpoint.selective_ac_option", "4"],
        ["--activation_checkpoint.selective_ac_option", "8"],
        ["--profiling.enable_profiling", "--training.steps", "100"],
        ["--training.global_batch_size", "64"],
        ["--training.dtype", "float64"],
    ],
    ids=" ".join,
)
def test_what_can_work_is_accepted(argv: list[str]):
    check(*argv, world_size=2)
