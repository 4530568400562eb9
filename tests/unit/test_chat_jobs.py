"""Laws of jobs on conversations: their settings are checked before ranks start, and imply a mask."""

import json
from pathlib import Path

import pytest

from tests.chat_files import CHATML, LLAMA3, chat_folder, conversations, write_lines
from trainer.config.errors import ConfigError
from trainer.config.loader import parse_command_line
from trainer.data.sources.registry import DataSettings
from trainer.data.token_files.catalog import open_documents
from trainer.data.tokenizers.tokenizer import open_tokenizer
from trainer.job import ResolvedJob, resolve
from trainer.job.summary import summary

pytestmark = pytest.mark.about("trainer/job/data.py", "trainer/job/language.py")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "chat.jsonl", conversations(8))


def job(*arguments: str) -> ResolvedJob:
    return resolve(parse_command_line(["--training.data_streams=2", *arguments]).config, 1)


def refusal(*arguments: str) -> str:
    with pytest.raises(ConfigError) as error:
        job(*arguments)
    assert "\n" not in str(error.value)
    return str(error.value)


def chat(path: Path) -> tuple[str, str]:
    return "--training.dataset=chat", f"--training.dataset_path={path}"


def test_conversations_in_one_sequence_do_not_see_each_other(data, tmp_path):
    folder = chat_folder(tmp_path / "model", CHATML)
    made = job(*chat(data), f"--model.tokenizer_path={folder}")
    assert made.config.masks_documents
    assert made.attention is not None
    assert made.notes == ()
    assert "causal mask within packed documents" in summary(made)


def test_messages_without_a_template_are_refused_before_ranks_start(data):
    message = refusal(*chat(data))
    assert message.startswith(f'{data}, line 1 has "messages", which need a chat template')
    assert "model.chat_template" in message


def test_prompts_and_answers_need_no_template(tmp_path):
    path = write_lines(tmp_path / "plain.jsonl", [{"prompt": "a", "answer": "b"}] * 4)
    assert job(*chat(path)).config.masks_documents


def test_a_template_of_your_own(data, tmp_path):
    """It goes before the folder's; "none" is for prompts and answers as plain text."""
    folder = chat_folder(tmp_path / "model", CHATML)
    (tmp_path / "mine.jinja").write_text(LLAMA3)
    lines = write_lines(tmp_path / "plain.jsonl", [{"prompt": "two", "answer": "five"}] * 4)
    texts = []
    for own in ((), (f"--model.chat_template={tmp_path}/mine.jinja",), ("--model.chat_template=none",)):
        model = job(*chat(lines), f"--model.tokenizer_path={folder}", *own).config.model
        source = open_documents(DataSettings.of("chat", str(lines), model))
        texts.append(open_tokenizer(str(folder)).decode(source[0].ids.tolist()))
    assert texts[0] == "<|head|>user\ntwo<|end|>\n<|head|>assistant\nfive<|end|>\n"
    assert texts[1].startswith("<|begin|><|head|>system<|/head|>")
    assert texts[2] == "twofive<|eos|>", "this tokenizer puts nothing before a text"
    none = refusal(*chat(data), f"--model.tokenizer_path={folder}", "--model.chat_template=none")
    assert "need a chat template" in none


def test_a_template_is_tried_on_the_first_line(data, tmp_path):
    folder = chat_folder(tmp_path / "model", "{{ raise_exception('never') }}")
    message = refusal(*chat(data), f"--model.tokenizer_path={folder}")
    assert message.startswith(f"{data}, line 1: the chat template {folder}/tokenizer_config.json refuses it (never)")


def test_a_bad_line_is_told_with_its_file(tmp_path):
    path = write_lines(tmp_path / "bad.jsonl", [{"text": "a"}])
    assert refusal(*chat(path)).startswith(f"{path}, line 1: it has neither")


def test_a_bad_line_further_on_is_told_before_the_first_step(data, tmp_path):
    folder = chat_folder(tmp_path / "model", CHATML)
    data.write_text(data.read_text() + json.dumps({"messages": [{"role": "bot", "content": "x"}]}) + "\n")
    model = job(*chat(data), f"--model.tokenizer_path={folder}").config.model
    with pytest.raises(ConfigError, match=r"chat.jsonl, line 9: message 1: .* must be one of 'system'"):
        open_documents(DataSettings.of("chat", str(data), model))


def test_validation_on_conversations_needs_a_mask(data, tmp_path):
    folder = chat_folder(tmp_path / "model", CHATML)
    settings = [f"--model.tokenizer_path={folder}", "--validation.enable", "--validation.dataset=chat"]
    settings.append(f"--validation.dataset_path={data}")
    assert "validation.dataset = 'chat' needs training.attention_mask = 'document'" in refusal(*settings)
    assert job(*settings, "--training.attention_mask=document").notes == ()


def test_missing_data_are_told_once(tmp_path):
    missing: list[str] = []
    config = parse_command_line([*chat(tmp_path / "no.jsonl"), "--model.chat_template=no.jinja"]).config
    resolve(config, 1, missing=missing)
    assert len(missing) == 2
    assert "no.jsonl" in missing[0]
    assert "model.chat_template = 'no.jinja' cannot be read" in missing[1]
