"""Laws of conversations: texts and tokens equal transformers', and answers have labels."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.chat_files import CHATML, TEMPLATES, chat_folder, conversations
from tests.unit.chat_encoding import CALL, CALLING, SPECIAL, TURNS, learnt, read, refusal, sampled
from trainer.config.data import Chat
from trainer.data.packing import IGNORE_INDEX
from trainer.data.sources.conversations import conversation
from trainer.data.tokenizers.chat_template import ChatTemplate
from trainer.data.tokenizers.conversation_encoder import ConversationEncoder
from trainer.data.tokenizers.template_files import find_template
from trainer.data.tokenizers.tokenizer import open_tokenizer


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("chat")
    return {name: chat_folder(root / name, text, file=name == "chatml") for name, text in TEMPLATES.items()}


def encoder(folder: Path) -> ConversationEncoder:
    return ConversationEncoder(open_tokenizer(str(folder)), find_template(str(folder), None))


# --- equal to transformers


@pytest.mark.parametrize("name", TEMPLATES)
def test_text_and_tokens_are_those_of_transformers(name, folders):
    theirs = AutoTokenizer.from_pretrained(folders[name])
    template, ours = find_template(str(folders[name]), None), encoder(folders[name])
    lines = [
        *conversations(20),
        {"messages": TURNS},
        {"messages": [{"role": "user", "content": "<|end|> x"}, TURNS[1]]},
    ]
    lines += [{"messages": [{"role": "system", "content": " be brief "}, *TURNS]}] if name != "instruct" else []
    lines += [{"messages": TURNS, "tools": [{"name": "é<"}]}]
    for line in lines:
        messages = read(line)
        options = {"tools": line.get("tools"), "date_string": "26 Jul 2024"}  # a template has no clock here
        wanted = theirs.apply_chat_template(line["messages"], tokenize=False, **options)
        assert template.render(messages)[0] == wanted
        ids = theirs.apply_chat_template(line["messages"], return_dict=False, **options)
        assert sampled(ours, (messages)).tokens.tolist() == ids


def test_marked_answers_are_those_of_transformers(folders):
    theirs, ours = AutoTokenizer.from_pretrained(folders["marked"]), encoder(folders["marked"])
    for line in conversations(30):
        out = theirs.apply_chat_template(line["messages"], return_dict=True, return_assistant_tokens_mask=True)
        sample = sampled(ours, (read(line)))
        pairs = zip(out["input_ids"][1:], out["assistant_masks"][1:], strict=True)
        assert sample.labels[:-1].tolist() == [i if mask else IGNORE_INDEX for i, mask in pairs]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("llama3", "five<|end|>yes, the quick fox<|end|>"),
        ("chatml", "five<|end|>yes, the quick fox\n<|end|>"),
        ("marked", "five<|end|>yes, the quick fox\n<|end|>"),
        ("instruct", " five<|eos|> yes, the quick fox\n<|eos|>"),
    ],
)
def test_labels_are_the_answers_and_their_ends(name, wanted, folders):
    sample = sampled(encoder(folders[name]), (read({"messages": TURNS})))
    assert learnt(sample, open_tokenizer(str(folders[name]))) == wanted
    assert sample.labels[-1] == IGNORE_INDEX
    has = sample.labels[:-1] != IGNORE_INDEX
    assert (sample.labels[:-1][has] == sample.tokens[1:][has]).all()


def test_a_header_that_is_not_asked_for_is_no_answer(tmp_path):
    """The template has no generation prompt, and writes the header of an answer with it."""
    folder = chat_folder(tmp_path / "headers", HEADERS)
    sample = sampled(encoder(folder), read({"messages": TURNS}))
    assert learnt(sample, open_tokenizer(str(folder))) == "five<|end|>yes, the quick fox\n<|end|>"


def test_both_ways_to_find_answers_agree(folders):
    both = [encoder(folders[name]) for name in ("chatml", "marked")]
    for line in conversations(30, seed=1):
        a, b = (sampled(one, (read(line))) for one in both)
        assert (a.labels == b.labels).all()


def test_a_prompt_and_its_answer_are_a_conversation_for_a_template(folders):
    ours = encoder(folders["llama3"])
    samples = [sampled(ours, (read({"prompt": "two and three?", key: "five"}))) for key in ("answer", "response")]
    wanted = sampled(ours, (read({"messages": TURNS[:2]})))
    assert all((sample.tokens == wanted.tokens).all() for sample in samples)


def test_the_number_of_a_line_is_counted_for_messages_only():
    """It takes a look at all bytes before the line."""
    conversation(b'{"prompt": "a", "answer": "b"}', lambda: pytest.fail("counted"))


def test_parts_of_text_are_joined(folders):
    parts = [{"type": "text", "text": "fi"}, {"type": "text", "text": "ve"}]
    assert (
        read({"messages": [TURNS[0], {"role": "assistant", "content": parts, "name": None}]})["messages"] == TURNS[:2]
    )


# --- tools

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"a": {"type": "number"}}}}


def test_calls_are_learnt_as_transformers_writes_them(folders):
    theirs = AutoTokenizer.from_pretrained(folders["calls"])
    sample = sampled(encoder(folders["calls"]), (read({"messages": CALLING})))
    assert sample.tokens.tolist() == theirs.apply_chat_template(CALLING, return_dict=False)
    call = '<call>add{"a": 2, "to": "thrée", "more": [true, null]}</call><|end|>'
    assert learnt(sample, open_tokenizer(str(folders["calls"]))) == f"{call}five<|end|>"


def test_openais_format_is_the_same_conversation(folders):
    """Arguments are a string of JSON, and the content of a message with a call is null or missing."""
    arguments = json.dumps(CALL["function"]["arguments"], ensure_ascii=False)
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    wanted = sampled(encoder(folders["calls"]), (read({"messages": CALLING})))
    for content in ({"content": None}, {}, {"content": ""}):
        messages = [CALLING[0], {"role": "assistant", "tool_calls": [call], **content}, *CALLING[2:]]
        sample = sampled(encoder(folders["calls"]), (read({"messages": messages})))
        assert (sample.tokens == wanted.tokens).all()
        assert (sample.labels == wanted.labels).all()


def test_tools_may_be_a_string_of_json(folders):
    lines = [
        {"messages": TURNS, "tools": tools} for tools in ([TOOL], json.dumps([TOOL]), json.dumps([TOOL], indent=1))
    ]
    texts = {find_template(str(folders["marked"]), None).render(read(line))[0] for line in lines}
    assert len(texts) == 1
    assert '{"type": "number"}' in texts.pop()
    for tools in ("not JSON", '{"a": 1}', ["add"], 3):
        assert '"tools" must be a list of objects' in refusal(read, {"messages": TURNS, "tools": tools})
    assert "tools" not in read({"messages": TURNS, "tools": "[]"})


HEADERS = CHATML[: CHATML.index("{% if add_generation")]


# --- other formats, and which answers are learnt


def test_lines_of_other_programs_are_the_same_conversation():
    wanted = [{"role": message["role"], "content": message["content"]} for message in TURNS]
    names = {"user": "human", "assistant": "gpt"}
    share = [{"from": names[message["role"]], "value": message["content"]} for message in TURNS]
    assert read({"conversations": share})["messages"] == wanted
    system = {"role": "system", "content": "Be brief."}
    assert read({"conversations": share, "system": "Be brief."})["messages"] == [system, *wanted]
    assert read({"conversations": TURNS})["messages"] == wanted
    assert "must be one of" in refusal(read, {"conversations": [{"from": "robot", "value": "a"}]})


def test_prompt_and_completion_as_messages_teach_the_completion(folders):
    sample = sampled(encoder(folders["chatml"]), read({"prompt": TURNS[:3], "completion": TURNS[3:]}))
    assert learnt(sample, open_tokenizer(str(folders["chatml"]))) == "yes, the quick fox\n<|end|>"


@pytest.mark.parametrize("name", ["chatml", "marked"])
def test_some_answers_alone_are_learnt(name, folders):
    """By the weight of a message, or the last one of each conversation; the tokens stay the same."""
    folder, tokenizer = folders[name], open_tokenizer(str(folders[name]))
    light = [TURNS[0], TURNS[1] | {"weight": 0}, *TURNS[2:]]
    last = ConversationEncoder(tokenizer, find_template(str(folder), None, Chat(answers="last")))
    both = sampled(encoder(folder), read({"messages": TURNS}))
    for sample in (sampled(encoder(folder), read({"messages": light})), sampled(last, read({"messages": TURNS}))):
        assert learnt(sample, tokenizer) == "yes, the quick fox\n<|end|>"
        assert (sample.tokens == both.tokens).all()
    assert "with a weight above 0" in refusal(read, {"messages": light[:2]})
    assert '"weight" = 0.5 must be 0' in refusal(read, {"messages": [TURNS[0], TURNS[1] | {"weight": 0.5}]})


def test_arguments_of_the_template_come_from_the_configuration_and_the_line():
    source = "{{ who | default('nobody') }} {{ strftime_now('%d.%m.%Y') }} " + CHATML
    chat = Chat(arguments=("who=Ann", "n = [1, 2]"), date="2026-02-01")
    template = ChatTemplate(source, "my.jinja", SPECIAL, chat)
    assert chat.values == {"who": "Ann", "n": [1, 2]}
    assert template.render(read({"messages": TURNS}))[0].startswith("Ann 01.02.2026 <|head|>user")
    own = {"messages": TURNS, "chat_template_kwargs": {"who": "Bob"}}
    assert template.render(read(own))[0].startswith("Bob 01.02.2026")
    assert template.identity != ChatTemplate(source, "my.jinja", SPECIAL).identity
    assert "'a b' is not name=value" in refusal(lambda: Chat(arguments=("a b",)).values)
    assert "is no date" in refusal(lambda: Chat(date="tomorrow").values)
    assert "must be an object" in refusal(read, {"messages": TURNS, "chat_template_kwargs": 3})


# As Qwen's: reasoning is written in the last answer only, and asked for by the prompt.
REASONING = CHATML.replace(
    "message['content'] + ",
    "('<think>' + message.reasoning_content + '</think>' if loop.last and message.reasoning_content else '') + "
    "message['content'] + ",
)


def test_an_answer_is_found_that_is_written_otherwise_when_others_follow(tmp_path):
    folder = chat_folder(tmp_path / "reasoning", REASONING)
    turns = [message | {"reasoning_content": "two"} if i % 2 else message for i, message in enumerate(TURNS)]
    sample = sampled(encoder(folder), read({"messages": turns}))
    learned = "five<|end|><think>two</think>yes, the quick fox\n<|end|>"
    assert learnt(sample, open_tokenizer(str(folder))) == learned


# As Mistral's with a system message: it stands before the last content of a user.
LAST = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set rest = messages[1:] %}"
    "{% else %}{% set rest = messages %}{% endif %}"
    "{% set users = rest | selectattr('role', 'equalto', 'user') | list %}"
    "{{ bos_token }}{% for m in rest %}{% if m.role == 'user' %}{{ '[INST] ' }}"
    "{% if system and m == users[-1] %}{{ system + '\\n\\n' }}{% endif %}{{ m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)


def test_answers_are_found_where_a_system_message_moves_with_the_last_user(tmp_path):
    folder = chat_folder(tmp_path / "last", LAST)
    messages = read({"messages": [{"role": "system", "content": "be lazy"}, *TURNS]})
    text, spans = find_template(str(folder), None).render(messages)
    assert text.index("be lazy") > text.index("five"), "a prompt before the first answer is written otherwise"
    assert [text[start:stop] for start, stop in spans] == [" five<|eos|>", " yes, the quick fox\n<|eos|>"]
