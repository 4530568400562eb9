"""What can be checked before ranks start is checked, each rule with one sentence that says what would work."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.job_rules import BESIDE_OTHERS, RULES
from trainer.config.errors import ConfigError
from trainer.config.keys import keys_of
from trainer.config.loader import parse_command_line
from trainer.config.schema import JobConfig, Model
from trainer.job import resolve
from trainer.job.degrees import Degrees
from trainer.job.incompatible import INCOMPATIBLE, Pair

pytestmark = pytest.mark.about("trainer/job/record.py", "trainer/job/incompatible.py", "trainer/job/training.py")

ROOT = Path(__file__).resolve().parents[2]
# Presets of language models; examples/fields/tests/test_jobs.py has the others.
CONFIGS = sorted(path for path in (ROOT / "train_configs").glob("*.toml") if not path.name.startswith("domain_"))
# These need weights: test_lora.py, test_fine_tuning_presets.py
_OF_WEIGHTS = {"llama3_8b_lora", "llama3_8b_lora_24gb", "llama3_8b_qlora_24gb", "finetune", "sft", "lora", "dpo"}
CONFIGS = [path for path in CONFIGS if path.stem not in _OF_WEIGHTS]
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
    settings = ["--training.enable_cpu_offload", "--parallelism.data_parallel_replicate_degree=2"]
    assert "pytorch issue 180665" in refused(*settings, world_size=4)
    assert resolve(parse_command_line(settings).config, 4, "cpu").degrees.dp_replicate == 2


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
@pytest.mark.parametrize("divisor", [1, 2])
def test_every_training_configuration_works_for_its_number_of_ranks(path: Path, divisor: int, tmp_path):
    (tmp_path / "data.jsonl").write_text('{"text": "a", "prompt": "a", "answer": "b"}\n' * 64)
    arguments = ["--job.config_file", str(path)]
    if path.name != "debug_model.toml":  # the published tokenizer and the data are the user's to bring
        arguments += ["--model.tokenizer_path", "None", "--training.dataset_path", str(tmp_path / "data.jsonl")]
        arguments += ["--checkpoint.initial_load_path", "None"]
    ranks = RANKS.get(path.name, 8) // divisor
    assert check(*arguments, world_size=ranks).world_size == ranks


def test_training_configurations_need_the_published_tokenizer():
    for path in CONFIGS:
        if path.name != "debug_model.toml":
            message = refused("--job.config_file", str(path), world_size=RANKS.get(path.name, 8))
            tokenizer = parse_command_line(["--job.config_file", str(path)]).config.model.tokenizer_path
            assert f"model.tokenizer_path = {tokenizer!r} does not exist" in message
            assert tokenizer != Model().tokenizer_file


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
    assert not BOUNDS[key].test(-2 if key.endswith("shard_degree") else -1)  # -1: all other ranks
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


@pytest.fixture(scope="module")
def refusals() -> list[str]:
    messages = []
    for argv, ranks in [*((argv, ranks) for argv, ranks, _ in RULES), *BESIDE_OTHERS]:
        try:
            check(*argv, world_size=ranks)
        except ConfigError as error:
            messages.append(str(error))
    return messages


@pytest.mark.parametrize("pair", [pytest.param(pair, id=f"{pair.first} {pair.second}") for pair in INCOMPATIBLE])
def test_a_pair_that_does_not_work_together_has_keys_and_a_rule_that_refuses_it(
    pair: Pair, refusals: list[str]
) -> None:
    assert {pair.first, pair.second} <= {*keys_of(JobConfig), "experts"}
    words = map(re.escape, re.split(r"\{[^}]*\}", pair.sentence))
    pattern = re.compile(".*".join(words))
    assert any(pattern.search(message) for message in refusals)
