"""Law: fine-tuning starts from settings for it: AdamW, a small rate, a warm-up; with a file, and without one."""

import json
from pathlib import Path

import pytest

from tests.chat_files import chat_folder
from trainer.commands.start import parse
from trainer.config.errors import ConfigError
from trainer.config.loader import parse_command_line
from trainer.job import resolve
from trainer.job.record import ResolvedJob

pytestmark = pytest.mark.about("train_configs", "trainer/commands/start.py")
LINES = {
    "chat.jsonl": {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    "pairs.jsonl": {"prompt": "a", "chosen": "b", "rejected": "c"},
}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of a model and, in the current folder, the files that the presets name."""
    from tests.hf_decoders import LLAMA, saved

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CONFIG_FILE", raising=False)
    for name, line in LINES.items():
        Path(name).write_text(f"{json.dumps(line)}\n" * 64)
    return chat_folder(saved(tmp_path / "hf", LLAMA), "{% for m in messages %}{{ m.content }}</s>{% endfor %}")


def started(*arguments: str, ranks: int = 1) -> ResolvedJob:
    config = parse_command_line(parse(list(arguments)).arguments).config
    return resolve(config, ranks, "cpu")


@pytest.mark.parametrize(
    ("file", "rate"), [([], 1e-5), (["finetune"], 1e-5), (["sft"], 1e-5), (["lora"], 2e-4), (["dpo"], 1e-5)]
)
@pytest.mark.parametrize("ranks", [1, 8])
def test_a_preset_fits_a_folder_of_a_model(model: Path, file: list[str], rate: float, ranks: int) -> None:
    job = started(*file, f"--model.path={model}", ranks=ranks)
    optimizer, schedule = job.config.optimizer, job.config.lr_scheduler
    assert (optimizer.name, optimizer.lr, schedule.warmup_steps) == ("AdamW", rate, 10)
    assert job.config.job.description != "Llama 3 debug model"
    assert job.notes == ()


def test_without_a_folder_of_weights_the_default_is_the_debug_model(model: Path) -> None:
    assert started().config.job.description == "Llama 3 debug model"
    assert started("debug_model", f"--model.path={model}").config.optimizer.name == "Muon"  # as the file says


@pytest.mark.parametrize("name", ["finetune", "sft", "lora", "dpo"])
def test_a_preset_without_a_model_asks_for_one(model: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint.initial_load_path = '\./model' is no folder here"):
        started(name)
