"""A key without effect is reported in one line, or refused; a key with an effect, and a preset, are not."""

import subprocess
import sys
from operator import attrgetter
from pathlib import Path

import pytest

from examples.fields.tests.test_jobs import WITHOUT_TOKENS
from tests.unit.unused_keys import ALWAYS, BEFORE, CONDITIONAL, MORE, REFUSED, TOLD
from trainer.config.errors import ConfigError
from trainer.config.keys import keys_of
from trainer.config.loader import parse_command_line
from trainer.config.schema import JobConfig
from trainer.job import resolve

ROOT = Path(__file__).resolve().parents[2]
PRESETS = {path.name: 1 for path in (ROOT / "train_configs").glob("*.toml") if not path.name.startswith("domain_")}
PRESETS |= {
    f"llama3_{size}.toml": ranks
    for size, ranks in (
        ("1b", 8),
        ("3b", 8),
        ("8b", 8),
        ("8b_long", 8),
        ("8b_extend", 8),
        ("8b_1m", 8),
        ("8b_1m_64", 64),
        ("8b_sft", 8),
        ("70b", 256),
        ("405b", 512),
    )
}
PRESETS |= {"debug_model.toml": 2, "qwen3_8b.toml": 8, "qwen3_8b_1m.toml": 8, "qwen3_8b_trajectories.toml": 8}
PRESETS |= {"qwen3_next_80b.toml": 64, "kimi_linear_48b.toml": 32, "granite4_h_small.toml": 16, "deepseek_v3.toml": 512}
for _name in (
    "llama3_8b_lora",
    "llama3_8b_lora_24gb",
    "llama3_8b_qlora_24gb",
    "finetune",
    "sft",
    "lora",
    "dpo",
):  # test_lora.py, test_fine_tuning_presets.py
    del PRESETS[f"{_name}.toml"]


@pytest.fixture(autouse=True)
def _in_a_new_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def notes(argv: list[str], world_size: int) -> tuple[str, ...]:
    config = parse_command_line(argv).config
    return resolve(config, world_size).notes


@pytest.mark.parametrize(("key", "words", "ranks", "switch", "part"), TOLD)
def test_a_key_without_effect_is_told_and_one_with_effect_is_not(key, words, ranks, switch, part):
    argv = [*BEFORE.get(key, []), f"--{key}", *words]
    (note,) = notes(argv, ranks)
    assert note.startswith(f"{key} = ")
    assert " has no effect " in note
    assert part in note
    assert "\n" not in note
    if isinstance(switch, int):
        assert notes(argv, switch) == ()
    elif switch is not None:
        assert notes([*argv, *switch], ranks) == ()


@pytest.mark.parametrize(("argv", "ranks", "parts"), MORE)
def test_other_reasons(argv, ranks, parts):
    lines = notes(argv, ranks)
    assert len(lines) == len(parts)
    for line, part in zip(lines, parts, strict=True):
        assert part in line


@pytest.mark.parametrize(("argv", "ranks", "parts"), REFUSED)
def test_what_the_run_would_not_do_is_refused(argv, ranks, parts):
    with pytest.raises(ConfigError) as error:
        notes(argv, ranks)
    assert "\n" not in str(error.value)
    for part in parts:
        assert part in str(error.value)


def test_every_key_is_one_or_the_other():
    assert set(keys_of(JobConfig)) == CONDITIONAL | ALWAYS
    assert not CONDITIONAL & ALWAYS


def test_every_rule_is_tried():
    tried = {key for key, *_ in TOLD} | {
        "model.sliding_window_every",
        "checkpoint.load_step",
        "checkpoint.exclude_from_loading",
        "checkpoint.initial_load_model_only",
    }
    tried |= {"lr_scheduler.total_steps", "lr_scheduler.decay_ratio"}  # in MORE
    tried |= {*WITHOUT_TOKENS}
    tried |= {"parallelism.domain_parallel_degrees"}  # in examples/fields
    tried |= {
        f"optimizer.{key}" for key in ("beta1", "beta2", "eps", "implementation", "state_dtype", "groups")
    }  # integration/test_extensions.py
    tried |= {"mixture.paths", "mixture.weights"}  # in test_mixture.py
    tried |= {f"model.router_{key}" for key in ("aux_loss_coef", "aux_loss_load", "bias_update_rate")}
    tried |= {"parallelism.expert_parallel_degree"}  # these four in test_expert_jobs.py
    assert tried == CONDITIONAL


def test_the_defaults_are_in_no_line():
    config = JobConfig()
    assert all(attrgetter(key)(config) == known.default for key, known in keys_of(JobConfig).items())
    assert notes([], 1) == ()


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_no_notes(name, tmp_path):
    (tmp_path / "data.jsonl").write_text('{"text": "a", "prompt": "a", "answer": "b"}\n' * 64)
    argv = ["--job.config_file", f"{ROOT}/train_configs/{name}", "--model.tokenizer_path", "None"]
    if name != "debug_model.toml":
        argv += ["--training.dataset_path", "data.jsonl", "--checkpoint.initial_load_path", "None"]
    assert parse_command_line(argv).notes == ()
    assert notes(argv, PRESETS[name]) == ()


def test_a_check_prints_the_notes_apart_from_the_summary():
    command = [sys.executable, f"{ROOT}/train.py", "--check-config", "--checkpoint.interval=9"]
    result = subprocess.run([*command, "--training.batch_size=8"], capture_output=True, text=True, check=True)
    older, unused = result.stderr.splitlines()
    assert older.startswith("note: training.batch_size = 8 (on the command line) is an older spelling")
    assert unused == "note: checkpoint.interval = 9 has no effect without checkpoint.enable"
    assert "checkpoints  none are saved" in result.stdout
    assert "note" not in result.stdout
