"""Law of notes: what conversations have and their text has not is counted, and told by check, data show and start."""

from pathlib import Path

import pytest

from tests.chat_files import CHATML, chat_folder, write_lines
from tests.published_templates import BEGIN, END, OF_TEXT, PUBLISHED, TOOL, answer, special_names, template, user
from tests.unit.chat_encoding import read
from trainer.config.data import Chat
from trainer.config.errors import ConfigError
from trainer.config.schema import JobConfig, Model, Training
from trainer.data import DataSettings, open_text
from trainer.data.contents import lacking_parts
from trainer.data.tokenizers.chat_template import ChatTemplate
from trainer.job.data import conversation_notes

TWO_ANSWERS = [user("Q1?"), answer("R1.", reasoning="idea1"), user("Q2?"), answer("R2.", reasoning="idea2")]


def notes(chosen: ChatTemplate, line: dict) -> dict[str, int]:
    messages = read(line)
    return chosen.notes(messages, *chosen.render(messages))


def qwen3(**chat: str) -> ChatTemplate:
    return ChatTemplate(
        PUBLISHED["qwen3"], "qwen3", {"bos_token": BEGIN, "eos_token": END}, Chat(**chat), special_names()
    )


@pytest.mark.parametrize("name", OF_TEXT)
def test_reasoning_that_no_text_has_is_counted(name):
    line = {"messages": TWO_ANSWERS}
    try:
        text, spans = template(name).render(read(line))
    except ConfigError:
        return
    lost = sum(idea not in text for idea in ("idea1", "idea2"))
    assert notes(template(name), line) == {"answers": 2} | ({"reasoning": lost} if lost else {})
    assert len(spans) == 2


def test_reasoning_in_a_content_and_messages_that_are_not_learned():
    written = [user("Q1?"), answer("<think>\nidea1\n</think>\n\nR1."), user("Q2?"), answer("<think>idea2</think>R2.")]
    assert notes(qwen3(), {"messages": written}) == {"answers": 2, "reasoning": 1}
    assert notes(qwen3(answers="last"), {"messages": TWO_ANSWERS}) == {"answers": 1}
    unlearned = [TWO_ANSWERS[0], TWO_ANSWERS[1] | {"weight": 0}, *TWO_ANSWERS[2:]]
    assert notes(qwen3(), {"messages": unlearned}) == {"answers": 1}


def test_tools_a_system_message_and_ends_are_counted():
    line = {"messages": [{"role": "system", "content": "Be brief."}, user("Q?"), answer("R.")], "tools": [TOOL]}
    assert notes(qwen3(), line) == {"answers": 1}
    source = CHATML.replace("{{- '<|head|>'", "{% if message.role != 'system' %}{{- '<|head|>'").replace(
        "'\\n' -}}\n{% endfor %}", "'\\n' -}}{% endif %}\n{% endfor %}"
    )
    silent = ChatTemplate(source, "my.jinja", {}, tokens=["<|end|>", "<|head|>"])
    assert notes(silent, line) == {"answers": 1, "tools": 1, "system": 1}
    assert notes(ChatTemplate(CHATML, "my.jinja", {}, tokens=["<|pad|>"]), line) == {"answers": 1, "tools": 1, "end": 1}


def test_data_show_check_and_the_start_say_lacking_parts(tmp_path: Path):
    folder = chat_folder(tmp_path / "model", PUBLISHED["qwen3"], specials=special_names())
    lines = [{"messages": TWO_ANSWERS[:2]}, {"messages": TWO_ANSWERS}, {"messages": TWO_ANSWERS}]
    file = write_lines(tmp_path / "chat.jsonl", lines)
    (sentence,) = lacking_parts(open_text(DataSettings("chat", str(file), str(folder))).contents())
    assert sentence == (
        "2 of 5 answers have reasoning in the data and none in their text, so that the model learns to answer without "
        f'it; chat.answers = "last" learns the last answer alone, whose reasoning most templates write (first: {file}, '
        "line 2)"
    )
    training = Training(dataset="chat", dataset_path=str(file))
    config = JobConfig(model=Model(tokenizer_path=str(folder)), training=training)
    assert conversation_notes(config) == [f"of the first 3 conversations: {sentence}"]
    assert conversation_notes(JobConfig(model=config.model, training=training, chat=Chat(answers="last"))) == []
