"""Laws of runs that start from a folder of transformers: its sizes, weights and tokenizer, and refusals."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from lct_inference.generate import ends_of
from lct_tools.check import check_tensors
from tests.chat_files import chat_folder
from tests.hf_decoders import LLAMA, QWEN3, changed, saved
from tests.unit.hugging_face_folders import resolved
from trainer.commands import tokenize_text
from trainer.config.errors import ConfigError
from trainer.config.loader import parse_command_line, to_toml
from trainer.config.schema import Model
from trainer.data.tokenizers.tokenizer import open_tokenizer
from trainer.hugging_face import folder as hf_folder
from trainer.hugging_face.config_json import CONFIG_FILE
from trainer.hugging_face.stored import INDEX
from trainer.job import resolve
from trainer.job.summary import summary


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved(tmp_path / "hf", LLAMA)


def refused(*arguments: str) -> str:
    with pytest.raises(ConfigError) as error:
        resolve(parse_command_line(list(arguments)).config, 1, "cpu")
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_folder_is_a_flavor(folder: Path) -> None:
    job = resolve(parse_command_line([f"--model.flavor={folder}", "--training.seq_len=32"]).config, 1, "cpu")
    assert job.model == replace(LLAMA, max_seq_len=32)
    saved(folder, QWEN3, family="qwen3")
    assert refused(f"--model.flavor={folder}").endswith("is of another family than model.name = 'llama3'; use 'qwen3'")
    assert "model_type = 'bert'" in (changed(folder, model_type="bert") or refused(f"--model.flavor={folder}"))


def test_the_files_of_a_folder_are_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    real_text = Path.read_text
    real_tensors = hf_folder.read_folder
    monkeypatch.setattr(Path, "read_text", lambda file, *a, **k: read.append(file.name) or real_text(file, *a, **k))
    monkeypatch.setattr(hf_folder, "read_folder", lambda where: read.append("tensors") or real_tensors(where))
    check_tensors(resolve(parse_command_line([f"--model.path={folder}", "--training.seq_len=32"]).config, 1, "cpu"))
    assert read.count(CONFIG_FILE) == read.count("tensors") == 1


def test_what_cannot_start_a_run_is_refused_before_it(folder: Path, tmp_path: Path) -> None:
    start = f"--checkpoint.initial_load_path={folder}"
    message = refused(start)
    assert message.startswith("model.flavor = 'debugmodel' is not the model in checkpoint.initial_load_path = ")
    assert "dim = 256 (there 32), n_layers = 4 (there 2)" in message
    here = [f"--model.flavor={folder}", start]
    resolve(parse_command_line([*here, "--model.rope_theta=1e7"]).config, 1, "cpu")  # said by the user, so meant
    assert "leave out model.sliding_window" in refused(*here, "--model.sliding_window=8")
    assert "leave out model.attention_sinks" in refused("--checkpoint.enable", "--checkpoint.last_save_in_hf", SINKS)
    assert "is no folder here" in refused(f"--checkpoint.initial_load_path={tmp_path / 'no'}")
    assert "holds neither a config.json" in refused(f"--checkpoint.initial_load_path={tmp_path}")
    whole = ["--checkpoint.initial_load_model_only", "false"]
    assert "holds weights alone; name a folder step-N" in refused(*here, *whole)
    changed(folder, vocab_size=4300)
    assert "4,352 tokens, and model.flavor" in refused(here[0])
    missing: list[str] = []
    elsewhere = parse_command_line(["--checkpoint.initial_load_path=/no/such"]).config
    resolve(elsewhere, 1, "cpu", missing=missing)
    assert "is no folder here" in missing[0]


SINKS = "--model.attention_sinks"


def test_a_path_gives_family_sizes_weights_and_tokenizer(tmp_path: Path) -> None:
    folder = saved(tmp_path / "hf", replace(QWEN3, vocab_size=4400), family="qwen3")
    job = resolved(f"--model.path={folder}", "--training.seq_len=32")
    assert job.model == replace(QWEN3, vocab_size=4400, max_seq_len=32)
    config = job.config
    assert (config.model.name, config.model.flavor) == ("qwen3", str(folder))
    assert config.checkpoint.initial_load_path == str(folder)
    again = parse_command_line(["--job.config_file", _written(tmp_path / "again.toml", to_toml(config))]).config
    assert resolve(again, 1, "cpu").config.model == config.model, "config.toml of the run names the same model"
    own = resolved(f"--model.path={folder}", f"--checkpoint.initial_load_path={folder}", "--model.rope_theta=1e7")
    assert own.model.rope_theta == 1e7
    shutil.copy(Model().tokenizer_file, folder / "tokenizer.model")
    assert resolved(f"--model.path={folder}").config.model.tokenizer_file == str(folder)


def test_a_path_replaces_the_model_of_a_preset_and_nothing_else(folder: Path, tmp_path: Path) -> None:
    base = 'base = "llama3_8b_sft"\n[training]\ndataset = "python_stdlib"\n'
    file = _written(tmp_path / "own.toml", f'{base}[model]\npath = "{folder}"\nrope_theta = 2e6\n')
    for arguments in (
        ["--job.config_file", file],
        ["--job.config_file", _written(tmp_path / "b.toml", base), f"--model.path={folder}", "--model.rope_theta=2e6"],
    ):
        config = parse_command_line(arguments).config
        assert config.model == Model(path=str(folder), rope_theta=2e6), "no scaling, no tokenizer of Llama 3.1"
        assert config.checkpoint.initial_load_path is None
        assert (config.checkpoint.enable, config.optimizer.lr) == (True, 1e-5)


def test_a_wrong_path_is_one_sentence_before_it(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    message = refused("--model.path=Qwen/Qwen3-8B")
    assert message == (
        "model.path = 'Qwen/Qwen3-8B' is no folder here; name a folder of a Hugging Face model, with its weights, such "
        "as './Qwen3-8B' after `hf download Qwen/Qwen3-8B --local-dir ./Qwen3-8B`"
    )
    assert "hf download ORG/NAME --local-dir nowhere" in refused("--model.path=./nowhere")
    assert "hf download Qwen/Qwen3-8B" in refused("--model.flavor=Qwen/Qwen3-8B")
    assert "both give the sizes" in refused(f"--model.path={folder}", "--model.flavor=8B")
    assert "holds a model of 'llama3'; leave out model.name" in refused(f"--model.path={folder}", "--model.name=qwen3")
    (folder / INDEX).unlink()
    assert "holds no weights" in refused(f"--model.path={folder}")


def test_the_start_says_where_the_weights_come_from(folder: Path) -> None:
    def weights(*arguments: str) -> str:
        text = re.search(r"(?m)^weights +(.*(?:\n  +.*)*)", summary(resolved(*arguments)))[1]
        return " ".join(text.split())

    assert weights("--training.seed=3") == "random, seed 3"
    assert weights(f"--model.path={folder}") == f"of {folder}"
    sizes = weights(f"--model.flavor={folder}")
    assert sizes.startswith("random, seed 0; ")
    assert "takes its weights, too" in sizes


def test_every_end_that_a_model_names_ends_a_text(tmp_path: Path) -> None:
    folder = saved(tmp_path / "hf", replace(LLAMA, vocab_size=4400))
    chat_folder(folder, None)
    (folder / "original").mkdir()
    shutil.copy(Model().tokenizer_file, folder / "original" / "tokenizer.model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [300, 308, 99999]}))
    config = resolved(f"--model.path={folder}").config
    tokenizer = open_tokenizer(config.model.tokenizer_file)
    assert tokenizer.decode([tokenizer.eos_id]) == "<|eos|>", "of tokenizer.json, not of Meta's file beside it"
    assert ends_of(config, tokenizer) == {tokenizer.eos_id, 300, 308}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 301}))
    assert ends_of(config, tokenizer) == {tokenizer.eos_id, 301}


def _written(file: Path, text: str) -> str:
    file.write_text(text)
    return str(file)


def test_the_tokenizer_of_the_folder_is_used_unless_another_one_is_named(folder: Path) -> None:
    def file_of(*arguments: str) -> str:
        return parse_command_line([f"--model.flavor={folder}", *arguments]).config.model.tokenizer_file

    shipped = file_of()
    assert shipped.endswith("python_4k.tiktoken"), "the folder has none"
    (folder / "tokenizer.model").write_bytes(Path(shipped).read_bytes())
    assert file_of() == str(folder)
    assert file_of("--model.tokenizer_path=elsewhere") == "elsewhere"


def test_token_files_are_made_ahead_with_the_tokenizer_of_the_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "original").mkdir()
    shutil.copy(Model().tokenizer_file, folder / "original" / "tokenizer.model")
    made = []
    monkeypatch.setattr(tokenize_text, "catalog_of", made.append)
    tokenize_text.fill_cache([f"--model.path={folder}"])
    assert [settings.tokenizer for settings in made] == [str(folder)]
