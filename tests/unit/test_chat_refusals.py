"""Laws of refused chat data: each wrong template or line is refused in one sentence."""

import json
from pathlib import Path

import pytest

from tests.chat_files import CALLS, CHATML, INSTRUCT, LLAMA3, MARKED, TEMPLATES, chat_folder
from tests.unit.chat_encoding import CALLING, SPECIAL, TURNS, read, refusal
from trainer.config.errors import MissingFile
from trainer.data.tokenizers.chat_template import ChatTemplate
from trainer.data.tokenizers.conversation_encoder import ConversationEncoder
from trainer.data.tokenizers.template_files import find_template
from trainer.data.tokenizers.tokenizer import open_tokenizer

pytestmark = pytest.mark.about("trainer/data/tokenizers/template_sandbox.py")


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("chat")
    return {name: chat_folder(root / name, text, file=name == "chatml") for name, text in TEMPLATES.items()}


def without(condition: str) -> str:
    """The template, without the messages for which the condition holds."""
    first, last = CALLS.index("{{- "), CALLS.index("{% endfor %}\n")
    one = "{% if not (" + condition + ") %}" + CALLS[first:last] + "{% endif %}"
    return CALLS[:first] + one + CALLS[last:]


@pytest.mark.parametrize(
    ("template", "messages", "missing"),
    [
        (CHATML, CALLING, "the call of 'add' in message 2"),
        (CALLS.replace("call.function.arguments | tojson", "'{}'"), CALLING, "the call of 'add' in message 2"),
        (without("message.role == 'tool'"), CALLING, "the content of message 3 (tool)"),
        # A short content does not match the text of an earlier message.
        (
            without("loop.last"),
            [*TURNS[:3], {"role": "assistant", "content": "a"}],
            "the answer of message 4 (assistant)",
        ),
    ],
)
def test_a_message_that_the_template_leaves_out_is_refused(template, messages, missing):
    conversation = read({"messages": messages}, "b.jsonl, line 7")
    assert refusal(ChatTemplate(template, "my.jinja", SPECIAL).render, conversation) == (
        f"b.jsonl, line 7: the chat template my.jinja does not write {missing}; use the template of a model that has "
        "it, or leave the line out"
    )


# --- where a template is found


def test_a_file_goes_before_the_configuration_and_a_key_before_both(tmp_path):
    folder = chat_folder(tmp_path / "model", CHATML)
    texts = []
    conversation = read({"messages": TURNS[:2]})
    texts.append(find_template(str(folder), None).render(conversation)[0])
    (folder / "chat_template.jinja").write_text(INSTRUCT)
    texts.append(find_template(str(folder / "tokenizer.json"), None).render(conversation)[0])
    (tmp_path / "mine.jinja").write_text(LLAMA3)
    texts.append(find_template(str(folder), str(tmp_path / "mine.jinja")).render(conversation)[0])
    assert [text[:9] for text in texts] == ["<|head|>u", "<|begin|>", "<|begin|>"]
    assert texts[1] != texts[2]
    assert find_template(str(folder), "none") is None
    assert find_template(str(chat_folder(tmp_path / "bare", None)), None) is None
    several = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": CHATML}]
    config = json.dumps({"chat_template": several, "bos_token": {"content": "<|begin|>"}})
    (tmp_path / "bare" / "tokenizer_config.json").write_text(config)
    assert find_template(str(tmp_path / "bare"), None).render(conversation)[0] == texts[0]


def test_a_template_that_is_not_there_or_no_template_is_refused(tmp_path):
    folder = chat_folder(tmp_path, None)
    with pytest.raises(MissingFile, match=r"model.chat_template = 'no.jinja' cannot be read"):
        find_template(str(folder), "no.jinja")
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    assert "chat_template.jinja cannot be read ('utf-8' codec" in refusal(find_template, str(folder), None)
    assert "is no Jinja template" in refusal(ChatTemplate, "{% if %}", "x.jinja", {})


# --- refused

REWRITES = CHATML.replace("message['content'] + ", "message['content'] + ('' if loop.last else ' (old)') + ")
CHANGES = (
    "{% for m in messages %}{{ m.content }} {% endfor %}"
    "{% set x %}{% generation %} a{% endgeneration %}{% endset %}{{ x | trim | length }}"
)
CLOCK = "{{ strftime_now('%Y') }}" + CHATML


@pytest.mark.parametrize(
    ("template", "part"),
    [
        (REWRITES, "writes message 2 otherwise when others follow"),
        (CLOCK, "refuses it ('strftime_now' is undefined)"),
        ("{{ raise_exception('no!') }}", "refuses it (no!)"),
        ("{{ messages.__class__ }}{{ messages.__class__.mro() }}", "refuses it (access to attribute"),
        (MARKED.replace("message.role == 'assistant'", "false"), "marks no answer"),
        (CHANGES, "changes text after"),
    ],
)
def test_a_template_that_cannot_be_right_is_refused_with_line_and_name(template, part):
    made = ChatTemplate(template, "my.jinja", SPECIAL)
    message = refusal(made.render, read({"messages": TURNS}, "b.jsonl, line 7"))
    assert message.startswith("b.jsonl, line 7: the chat template my.jinja ")
    assert part in message


BAD = [
    (b'{"prompt": ', "must be a JSON object"),
    (b"\xff", "must be a JSON object"),
    (b"[1]", "must be a JSON object"),
    ({"text": "a"}, 'has neither "messages" nor "prompt"'),
    ({"prompt": "a"}, 'has neither "messages" nor "prompt"'),
    ({"prompt": ["a"], "answer": "b"}, '"prompt" must be a string'),
    ({"prompt": "a", "response": 3}, '"response" must be a string'),
    ({"prompt": "a", "answer": " \n"}, '"answer" is empty'),
    ({"messages": []}, '"messages" must be a list'),
    ({"messages": ["a"]}, '"messages" must be a list'),
    ({"messages": TURNS[:1]}, "no message is of the role 'assistant' with"),
    ({"messages": [*TURNS, {"role": "bot", "content": "a"}]}, "message 5: \"role\" = 'bot' must be one of 'system'"),
    ({"messages": [{"content": "a"}]}, 'message 1: "role" = None must be'),
    ({"messages": [{"role": "user", "content": None}]}, 'message 1: "content" must be a string'),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "has a part of type 'image'"),
    ({"messages": [TURNS[0], {"role": "assistant", "content": ""}]}, "message 2: the answer is empty"),
    ({"messages": [TURNS[0], {"role": "assistant", "content": None}]}, 'message 2: "content" must be a string'),
    ({"messages": [TURNS[0], {"role": "assistant", "tool_calls": ["add"]}]}, 'message 2: "tool_calls" must be a list'),
    ({"messages": [TURNS[0], {"role": "assistant", "tool_calls": [{"function": {}}]}]}, '"tool_calls" must be a list'),
]


@pytest.mark.parametrize(("line", "part"), BAD)
def test_a_bad_line_is_told_in_one_sentence(line, part):
    message = refusal(read, line, "c.jsonl, line 3")
    assert message.startswith("c.jsonl, line 3")
    assert part in message


def test_messages_without_a_template_say_what_to_do(folders):
    ours = ConversationEncoder(open_tokenizer(), None)
    message = refusal(ours.encode, read({"messages": TURNS}))
    assert "need a chat template" in message
    assert "model.chat_template" in message


def test_a_lone_surrogate_in_a_conversation_becomes_the_replacement_character() -> None:
    record = read(b'{"prompt": "a\\ud800b", "answer": "\\uD83D\\uDE00"}')
    assert (record["prompt"], record["answer"]) == ("a\ufffdb", "\U0001f600")
