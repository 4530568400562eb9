"""Presets by name, the error for a missing file, and the note for longer sequences than the file has."""

from pathlib import Path

import pytest

from trainer.config.errors import ConfigError
from trainer.config.loader import parse_command_line, to_toml
from trainer.config.schema import JobConfig

ROOT = Path(__file__).resolve().parents[2]


def parse(*argv: str) -> JobConfig:
    return parse_command_line(list(argv)).config


# ---- presets


@pytest.mark.parametrize("name", ["debug_model", "llama3_8b", "llama3_8b.toml"])
def test_a_preset_is_found_by_its_name_from_anywhere(name: str, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    whole = parse("--job.config_file", str(ROOT / "train_configs" / f"{name.removesuffix('.toml')}.toml"))
    assert to_toml(parse("--job.config_file", name)) == to_toml(whole)


def test_a_file_goes_over_the_preset_of_its_name(toml, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    toml("[training]\nsteps = 3\n", "llama3_8b.toml")
    assert parse("--job.config_file", "llama3_8b.toml").training.steps == 3
    assert parse("--job.config_file", "llama3_8b").model.flavor == "8B"


def test_a_base_is_a_file_beside_or_else_a_preset(toml):
    path = toml('base = "llama3_8b.toml"\n[training]\nsteps = 5\n')
    config = parse("--job.config_file", path)
    assert (config.model.flavor, config.training.steps) == ("8B", 5)
    toml("[model]\nflavor = '1B'\n", "llama3_8b.toml")
    assert parse("--job.config_file", path).model.flavor == "1B"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        (
            "nope.toml",
            "give a .toml file, or one that comes with the program: debug_model, deepseek_v3",
        ),
        ("pyproject2", "did you mean 'pyproject.toml'?"),
        ("debug", "did you mean 'debug_model', which comes with the program?"),
        ("lama3_8b.toml", "did you mean 'llama3_8b', which comes with the program?"),
        ("train_configs/debugmodel.toml", "did you mean 'train_configs/debug_model.toml'?"),
        ("nowhere/at_all.toml", "give a .toml file, or one that comes with the program: debug_model"),
        ("nowhere/llama3_8b.toml", "did you mean 'llama3_8b', which comes with the program?"),
    ],
)
def test_a_missing_file_is_told_with_near_files_and_presets_only(name: str, hint: str, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(ConfigError) as error:
        parse("--job.config_file", name)
    assert str(error.value).startswith(f"job.config_file = {name!r} does not exist; {hint}")


# ---- a longer sequence than in the file

BATCH = "[training]\nseq_len = 8192\nglobal_batch_size = 128\nlocal_batch_size = 1\n"
NO_LENGTH = "[training]\nglobal_batch_size = 16\n"


@pytest.mark.parametrize(
    ("file", "argv", "note"),
    [
        (BATCH, ["--training.seq_len=131072"], "16.8 million tokens, 16 times what {}; lower {} to 8 to keep it"),
        (BATCH, ["--training.seq_len=12288"], "1.6 million tokens, 1.5 times what {}; lower {} to 85 to keep it"),
        (BATCH, ["--training.seq_len=2097152"], "268.4 million tokens, 256 times what {}; lower {} for a smaller one"),
        (
            BATCH.replace("local_batch_size = 1", "local_batch_size = 2"),
            ["--training.seq_len=12288"],
            "lower {1} to 84 to",
        ),
        (
            "[training]\nglobal_batch_size = 16\n",
            ["--training.seq_len=4096"],
            "65,536 tokens, 2 times what {}; lower {} to 8",
        ),
        (BATCH, ["--training.seq_len=8192"], ""),
        (BATCH, ["--training.seq_len=4096"], ""),
        (BATCH, ["--training.seq_len=131072", "--training.global_batch_size=128"], ""),
        (BATCH.replace("= 128", "= -1"), ["--training.seq_len=131072"], ""),
        ("", ["--training.seq_len=131072"], ""),
        (BATCH, [], ""),
    ],
)
def test_a_step_that_grows_with_the_sequence_is_told(file: str, argv: list[str], note: str, toml):
    path = toml(file)
    notes = parse_command_line(["--job.config_file", path, *argv]).notes
    assert len(notes) == bool(note)
    assert note.format(f"{path} asks for", "training.global_batch_size") in "".join(notes)
