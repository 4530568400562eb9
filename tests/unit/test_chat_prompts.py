"""Law of prompts: a model is asked by the text that training writes for the same messages, whatever form they have.

The templates come with TRL; OpenAI's clients write the forms.
"""

import json
from pathlib import Path

import pytest

from lct_inference.generate import checked, to_write
from lct_inference.talk import Talk
from tests.chat_files import CALLS, chat_folder
from tests.published_templates import PUBLISHED, TOOL, answer, special_names, template, tool, user
from tests.unit.chat_encoding import SPECIAL, read
from trainer.config.errors import ConfigError
from trainer.data.tokenizers.chat_messages import read_messages
from trainer.data.tokenizers.chat_template import ChatTemplate
from trainer.data.tokenizers.tokenizer import Tokenizer, open_tokenizer

CONVERSATIONS = {
    "plain": [user("Weather?"), answer("Sun."), user("Sure?")],
    "call": [user("Weather?"), answer("", "Rome"), tool("sunny")],
    "two calls": [user("Weather?"), answer("", "Rome"), tool("sunny"), answer("", "Oslo"), tool("rain")],
}
LAST = answer("Go now.")
OPENINGS = ("<think>\n",)
"""Beginnings of an answer that a prompt has, and the text of an answer without reasoning has not."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return open_tokenizer(str(chat_folder(tmp_path_factory.mktemp("prompts"), None, specials=special_names())))


def as_sent(message: dict) -> dict:
    """Return a message as clients of OpenAI's API send it."""
    sent = dict(message)
    if message["role"] == "user":
        half = len(message["content"]) // 2
        parts = (message["content"][:half], message["content"][half:])
        sent["content"] = [{"type": "text", "text": part} for part in parts]
    if message["role"] == "assistant":
        nulls = ("tool_calls", "refusal", "annotations", "audio", "function_call")
        sent = dict.fromkeys(nulls) | sent | {"content": message["content"] or None}
    if "tool_calls" in message:
        sent["tool_calls"] = json.loads(json.dumps(message["tool_calls"]))
        for call in sent["tool_calls"]:
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return sent


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_prompt_is_what_training_writes_before_the_answer(name, tokenizer):
    talk = Talk(tokenizer, template(name), (), frozenset())
    for kind, messages in CONVERSATIONS.items():
        tools = {"tools": [TOOL]} if "call" in kind else {}
        prompts = []
        for sent in (messages, [as_sent(message) for message in messages]):
            learned = text_or_refusal(
                lambda m=sent, b=tools: template(name).render(read({"messages": [*m, LAST]} | b))[0]
            )
            asked = text_or_refusal(lambda m=sent, b=tools: tokenizer.decode(talk.prompt(m, b)))
            assert bool(learned) == bool(asked), (kind, "both or none")
            opening = next((opening for opening in OPENINGS if asked.endswith(opening)), "")
            assert learned.startswith((asked, asked.removesuffix(opening))), kind
            prompts.append(asked)
        assert prompts[0] == prompts[1], kind


def test_a_key_of_null_is_no_key():
    """A template may ask whether a key is defined; clients send null for each key without a value."""
    sent = {"role": "assistant", "content": "Sun.", "refusal": None, "audio": None, "name": "a"}
    assert read_messages([sent]) == [{"role": "assistant", "content": "Sun.", "name": "a"}]


def text_or_refusal(write) -> str:
    """Return the text that a function writes, or "" if it refuses the messages."""
    try:
        return write()
    except ConfigError:
        return ""


def test_generate_and_a_request_ask_with_the_same_tokens(tmp_path: Path):
    from tests.answering import saved_model

    folder = saved_model(tmp_path)
    args, job = checked([str(folder), "--chat", "--prompt", "two and three?"])
    _, (prompt,), _ = to_write(args, job.config, open_tokenizer(str(folder)))
    assert prompt == Talk.of(job.config).prompt([as_sent(user("two and three?"))])


def test_an_object_that_a_template_would_write_as_python_does_is_written_as_json():
    source = CALLS.replace("call.function.arguments | tojson", "call.function.arguments")
    calling = {"messages": [user("Weather?"), answer("", "Rome")]}
    text, _ = ChatTemplate(source, "my.jinja", SPECIAL).render(read(calling))
    assert '{"city": "Rome"}' in text
