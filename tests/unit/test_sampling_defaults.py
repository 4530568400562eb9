"""Law: tokens are drawn as the command line says, else as the model's generation_config.json, else as usual."""

import json
from pathlib import Path

import pytest

from lct_inference import evaluate, generate, serve
from tests.chat_files import CHATML, chat_folder
from tests.hf_decoders import LLAMA, saved
from tests.unit.saved_runs import saved_run
from trainer.config.errors import ConfigError

USUAL = (0.7, 0, 1.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_folder(saved(tmp_path_factory.mktemp("model") / "hf", LLAMA), CHATML)


def drawn(command, folder: Path, *options: str) -> tuple[float, int, float]:
    args, _ = command.checked([str(folder), *options])
    return args.temperature, args.top_k, args.top_p


@pytest.mark.parametrize(
    ("content", "options", "wanted"),
    [
        ({}, [], USUAL),
        ({"do_sample": False, "top_k": 1, "temperature": 0.5}, [], (0.0, 0, 1.0)),
        ({"do_sample": False}, ["--temperature", "0.3"], (0.3, 0, 1.0)),
        ({"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}, [], (0.6, 20, 0.95)),
        ({"temperature": None, "top_p": 0.8}, [], (0.7, 0, 0.8)),
        ({"temperature": 0.6, "top_k": 20, "top_p": 0.95}, ["--top-k", "0", "--temperature", "0"], (0.0, 0, 0.95)),
    ],
)
def test_the_command_line_wins_over_the_model(folder: Path, content: dict, options: list[str], wanted: tuple) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2} | content))
    for command in (generate, serve):
        assert drawn(command, folder, *options) == wanted


def test_a_run_draws_as_the_model_that_it_started_from(folder: Path, tmp_path: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": False}))
    saved_run(tmp_path / "run", f"--model.path={folder}", "--training.seq_len=64")
    assert drawn(generate, tmp_path / "run") == (0.0, 0, 1.0)
    saved_run(tmp_path / "own", "--training.seq_len=64")
    assert drawn(generate, tmp_path / "own") == USUAL


@pytest.mark.parametrize(
    ("entry", "value"), [("temperature", -1), ("temperature", "hot"), ("top_k", 1.5), ("top_p", 0), ("top_p", True)]
)
def test_a_wrong_entry_is_one_sentence(folder: Path, entry: str, value: object) -> None:
    (folder / "generation_config.json").write_text(json.dumps({entry: value}))
    with pytest.raises(ConfigError, match=rf"generation_config.json: {entry} = {value!r} must be "):
        generate.checked([str(folder)])


def test_a_measurement_is_not_written_to_what_is_measured(folder: Path, tmp_path: Path) -> None:
    saved_run(tmp_path / "run", "--training.seq_len=64")
    for measured in (folder, tmp_path / "run"):
        before = sorted(measured.rglob("*"))
        wanted, _ = evaluate.checked([str(measured), "--seq-len", "64", "--ngpu", "1", "--lengths", "256"])
        assert wanted.output == Path("outputs", "evaluation", measured.name)
        assert sorted(measured.rglob("*")) == before
