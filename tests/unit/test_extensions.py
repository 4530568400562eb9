"""Law: a package of `job.imports` adds what it names, to every command, and fails in one sentence if it cannot."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from trainer.config.errors import ConfigError
from trainer.config.loader import parse_command_line, to_toml
from trainer.config.registry import Registry
from trainer.job import resolve

pytestmark = pytest.mark.about("trainer/observer.py")

PACKAGE = """
from dataclasses import dataclass, replace
from trainer.config.keys import AT_LEAST_ONE, key
from trainer.extensions import register_dataset, register_model, register_table
from trainer.data.sources.registry import DATASETS
from trainer.families.decoder_args import LLAMA3 as FLAVORS

register_model("mine", {"small": replace(FLAVORS["debugmodel"], n_layers=3)}, spec="trainer.models.parallelize")
register_dataset("mine", DATASETS["text"])

@dataclass(frozen=True)
class Mine:
    '''Settings of mine.'''
    width: int = key(3, AT_LEAST_ONE, "points")
    '''How wide it is.'''

register_table("mine", Mine)
"""


def lct(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", "from trainer.commands.main import main; raise SystemExit(main())", *arguments]
    environment = {"PYTHONPATH": str(root)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text(PACKAGE)
    (tmp_path / "base.toml").write_text('job.imports = ["mine"]\nmodel.name = "mine"\nmodel.flavor = "small"\n')
    (tmp_path / "run.toml").write_text('base = "base.toml"\nmine.width = 5\n')
    return tmp_path


def test_a_model_and_a_table_come_from_the_folder_of_the_command(package: Path) -> None:
    checked = lct(package, "check", "run.toml", "--training.data_streams=8")
    assert checked.returncode == 0, checked.stderr
    assert "mine small" in checked.stdout + checked.stderr
    assert "3 layers" in checked.stdout + checked.stderr
    printed = lct(package, "train", "run.toml", "--mine.width=7", "--print-config")
    assert "[mine]\nwidth = 7\n" in printed.stdout
    assert "How wide it is. Default: 3." in lct(package, "train", "run.toml", "--help", "mine").stdout
    wrong = lct(package, "check", "run.toml", "--mine.width=0")
    assert "mine.width = 0 must be at least 1" in wrong.stderr + wrong.stdout


def test_the_command_line_goes_over_the_file(package: Path) -> None:
    assert (
        "[mine] (in run.toml) is not a known table" in lct(package, "check", "run.toml", "--job.imports", "json").stderr
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "ModuleNotFoundError: No module named 'other'"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("import other.", "SyntaxError"),
        (
            "from trainer.extensions import register_model\nregister_model('llama3', {}, spec='')",
            "a model named 'llama3' exists already; register yours under another name",
        ),
        (
            "from trainer.extensions import register_optimizer\nregister_optimizer('AdamW', 'other:build')",
            "an optimizer named 'AdamW' exists already; register yours under another name",
        ),
        (
            "from trainer.extensions import register_table\nregister_table('training', dict)",
            "a table named 'training' exists already; register yours under another name",
        ),
        (
            "from trainer.extensions import register_optimizer\nregister_optimizer('mine', 'other:bild')\n"
            "if True:\n    def build(parts, config): ...",
            "register_optimizer('mine'): place = 'other:bild': module 'other' has no 'bild'; did you mean 'build'?",
        ),
        (
            "from trainer.extensions import register_observer\nregister_observer('other.parts:watch')",
            "register_observer: place = 'other.parts:watch': there is no module 'other.parts'",
        ),
        (
            "from trainer.extensions import register_iterable\nregister_iterable('texts', 'other.open')",
            "register_iterable('texts'): place = 'other.open' must have the form 'package.module:name'",
        ),
        (
            "from trainer.extensions import register_model\nregister_model('mine', {}, spec='other')",
            "register_model('mine'): spec = 'other:SPEC': module 'other' has no 'SPEC'",
        ),
    ],
)
def test_a_package_that_fails_is_one_sentence(tmp_path: Path, text: str | None, reason: str) -> None:
    if text is not None:
        (tmp_path / "other.py").write_text(text)
    for command in ("check", "train"):
        result = lct(tmp_path, command, "--job.imports", "other")
        assert result.returncode == 2
        assert result.stderr.startswith(f"error: job.imports: 'other' cannot be imported ({reason}")
        assert result.stderr.count("\n") == 1


def test_a_registry_keeps_its_choices_and_names_them() -> None:
    registry: Registry[int] = Registry("number", {"one": 1})
    registry.add("two", 2)
    registry.add("two", 2)  # the same again, as when a module is imported twice
    with pytest.raises(ConfigError, match="a number named 'two' exists already"):
        registry.add("two", 3)
    with pytest.raises(ConfigError, match=r"x\.y = 'tow' is not a known number; did you mean 'two'"):
        registry.find("x.y", "tow")
    assert registry.find("x.y", "two") == 2


def test_the_older_key_of_torchtitan_is_read(toml: Callable[..., str]) -> None:
    command = parse_command_line(["--job.config_file", toml('experimental.custom_import = "json"')])
    assert command.config.job.imports == ("json",)
    assert 'imports = ["json"]' in to_toml(command.config).replace("\n    ", "").replace(",\n]", "]")


def test_all_wrong_settings_are_reported(tmp_path: Path) -> None:
    arguments = ["--training.global_batch_size=3", "--model.tokenizer_path=", "--checkpoint.load_step=0"]
    arguments += ["--training.dataset=text", f"--training.dataset_path={tmp_path}/none", "--lora.rank=4"]
    with pytest.raises(ConfigError) as first:
        resolve(parse_command_line(arguments).config, 3, "cpu")
    assert str(first.value).startswith("2 settings are wrong:")
    with pytest.raises(ConfigError) as second:
        resolve(parse_command_line([*arguments[:1], *arguments[3:]]).config, 2, "cpu")
    for key in ("training.global_batch_size = 3", "none", "lora.rank = 4"):
        assert key in str(second.value)
    assert str(second.value).startswith("3 settings are wrong:")
