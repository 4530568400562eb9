"""Laws of conversations: texts and tokens are those of transformers, labels are on answers, bad lines are told."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from tests.chat_files import CALLS, CHATML, INSTRUCT, LLAMA3, MARKED, TEMPLATES, chat_folder, conversations
from trainer.config.data import Chat
from trainer.config.errors import ConfigError, MissingFile
from trainer.data.packing import IGNORE_INDEX, Sample, sample_of
from trainer.data.sources.conversations import conversation
from trainer.data.sources.records import BadRecord
from trainer.data.tokenizers.chat_template import ChatTemplate, ConversationEncoder, find_template
from trainer.data.tokenizers.tokenizer import Tokenizer, default_tokenizer_path, open_tokenizer

SPECIAL = {"bos_token": "<|begin|>", "eos_token": "<|eos|>"}
TURNS = [
    {"role": "user", "content": "two and three?"},
    {"role": "assistant", "content": "five"},
    {"role": "user", "content": "sure?"},
    {"role": "assistant", "content": "yes, the quick fox\n"},
]


def read(line: object, where: str = "a.jsonl, line 1") -> dict:
    content = line if isinstance(line, bytes) else json.dumps(line).encode()
    found = conversation(content, lambda: where)
    if isinstance(found, BadRecord):
        raise found
    return found


def refusal(call, *args) -> str:
    with pytest.raises(ConfigError) as error:
        call(*args)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("chat")
    return {name: chat_folder(root / name, text, file=name == "chatml") for name, text in TEMPLATES.items()}


def encoder(folder: Path) -> ConversationEncoder:
    return ConversationEncoder(open_tokenizer(str(folder)), find_template(str(folder), None))


def sampled(ours: ConversationEncoder, found: dict) -> Sample:
    return sample_of(ours.encode(found))


def learnt(sample, tokenizer: Tokenizer) -> str:
    return tokenizer.decode(sample.labels[sample.labels != IGNORE_INDEX].tolist())


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
        found = read(line)
        given = {"tools": line.get("tools"), "date_string": "26 Jul 2024"}  # a template has no clock here
        wanted = theirs.apply_chat_template(line["messages"], tokenize=False, **given)
        assert template.render(found)[0] == wanted
        ids = theirs.apply_chat_template(line["messages"], return_dict=False, **given)
        assert sampled(ours, (found)).tokens.tolist() == ids


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


# --- plain text, and borders

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


@given(TEXT, TEXT.filter(str.strip))
def test_plain_text_is_begin_prompt_answer_end(prompt, answer):
    tokenizer = open_tokenizer()
    sample = sampled(ConversationEncoder(tokenizer, None), (read({"prompt": prompt, "completion": answer})))
    assert sample.tokens.tolist() == tokenizer.encode(prompt + answer, bos=True, eos=True)
    first = int(np.argmax(sample.labels != IGNORE_INDEX))
    assert (sample.labels[first:-1] == sample.tokens[first + 1 :]).all()
    # Tokens before the first label have all bytes of the prompt, and the last of them has one.
    before = [len(token) for token in tokenizer._encoding.decode_tokens_bytes(sample.tokens[1 : first + 1].tolist())]
    assert sum(before) >= len(prompt.encode())
    assert not before or sum(before[:-1]) < len(prompt.encode())


@pytest.mark.parametrize("name", ["tiktoken", "json"])
def test_a_token_across_the_border_has_no_label(name, folders):
    """` the` is one token: with the blank in the prompt, it is a part of the prompt."""
    tokenizer = open_tokenizer(default_tokenizer_path() if name == "tiktoken" else str(folders["llama3"]))
    assert len(tokenizer.encode(" the")) == 1
    ours = ConversationEncoder(tokenizer, None)
    for prompt, answer, wanted in (("and ", "the fox", " fox"), ("and", " the fox", " the fox")):
        sample = sampled(ours, (read({"prompt": prompt, "answer": answer})))
        assert learnt(sample, tokenizer) == wanted + tokenizer.decode([tokenizer.eos_id])


def test_names_of_special_tokens_are_text_in_plain_text_and_tokens_in_rendered_text(folders):
    json_folder = str(folders["llama3"])
    for tokenizer, name in ((open_tokenizer(), "<|eot_id|>"), (open_tokenizer(json_folder), "<|end|>")):
        text = f"naïve 漢字 😀{name} x"
        ids, places = tokenizer.encode_with_places(text, special=False)
        assert ids.tolist() == tokenizer.encode(text)
        special, places = tokenizer.encode_with_places(text, special=True)
        assert len(special) < len(ids)
        (at,) = [i for i, (a, b) in enumerate(places.tolist()) if text[a:b] == name]
        assert tokenizer.decode([special[at]]) == name
        assert tokenizer.decode(special.tolist()) == text
        assert (places[1:, 0] >= places[:-1, 0]).all()
        assert places[0, 0] == 0
        assert places[-1, 1] == len(text)


def test_llama_3_in_both_formats(tmp_path):
    """A file of ranks has no settings beside it: begin and end are those of the format."""
    (tmp_path / "t.jinja").write_text("{{ bos_token }}{% for m in messages %}{{ m.content }}<|eot_id|>{% endfor %}")
    tokenizer = open_tokenizer()
    ends = {"bos_token": "<|begin_of_text|>"}
    template = find_template(default_tokenizer_path(), str(tmp_path / "t.jinja"), ends=ends)
    sample = sampled(ConversationEncoder(tokenizer, template), (read({"messages": TURNS[:2]})))
    assert tokenizer.decode(sample.tokens.tolist()) == "<|begin_of_text|>two and three?<|eot_id|>five<|eot_id|>"
    assert learnt(sample, tokenizer) == "five<|eot_id|>"


# --- tools

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"a": {"type": "number"}}}}
CALL = {"id": "1", "function": {"name": "add", "arguments": {"a": 2, "to": "thrée", "more": [True, None]}}}
CALLING = [
    TURNS[0],
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": '{"sum": 5}'},
    {"role": "assistant", "content": "five"},
]


def test_calls_are_learnt_as_transformers_writes_them(folders):
    theirs = AutoTokenizer.from_pretrained(folders["calls"])
    sample = sampled(encoder(folders["calls"]), (read({"messages": CALLING})))
    assert sample.tokens.tolist() == theirs.apply_chat_template(CALLING, return_dict=False)
    call = '<call>add{"a": 2, "to": "thrée", "more": [true, null]}</call><|end|>'
    assert learnt(sample, open_tokenizer(str(folders["calls"]))) == f"{call}five<|end|>"


def test_openais_format_is_the_same_conversation(folders):
    """Arguments are a string of JSON, and the content beside a call is null or missing."""
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


SHORT = {"role": "assistant", "content": "a"}


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
        # A short content is not found in the place of an earlier message.
        (
            without("loop.last"),
            [*TURNS[:3], {"role": "assistant", "content": "a"}],
            "the answer of message 4 (assistant)",
        ),
    ],
)
def test_a_message_that_the_template_leaves_out_is_refused(template, messages, missing):
    found = read({"messages": messages}, "b.jsonl, line 7")
    assert refusal(ChatTemplate(template, "my.jinja", SPECIAL).render, found) == (
        f"b.jsonl, line 7: the chat template my.jinja does not write {missing}; use the template of a model that has "
        "it, or leave the line out"
    )


# --- where a template is found


def test_a_file_goes_before_the_configuration_and_a_key_before_both(tmp_path):
    folder = chat_folder(tmp_path / "model", CHATML)
    texts = []
    found = read({"messages": TURNS[:2]})
    texts.append(find_template(str(folder), None).render(found)[0])
    (folder / "chat_template.jinja").write_text(INSTRUCT)
    texts.append(find_template(str(folder / "tokenizer.json"), None).render(found)[0])
    (tmp_path / "mine.jinja").write_text(LLAMA3)
    texts.append(find_template(str(folder), str(tmp_path / "mine.jinja")).render(found)[0])
    assert [text[:9] for text in texts] == ["<|head|>u", "<|begin|>", "<|begin|>"]
    assert texts[1] != texts[2]
    assert find_template(str(folder), "none") is None
    assert find_template(str(chat_folder(tmp_path / "bare", None)), None) is None
    several = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": CHATML}]
    config = json.dumps({"chat_template": several, "bos_token": {"content": "<|begin|>"}})
    (tmp_path / "bare" / "tokenizer_config.json").write_text(config)
    assert find_template(str(tmp_path / "bare"), None).render(found)[0] == texts[0]


def test_a_template_that_is_not_there_or_no_template_is_refused(tmp_path):
    folder = chat_folder(tmp_path, None)
    with pytest.raises(MissingFile, match=r"model.chat_template = 'no.jinja' cannot be read"):
        find_template(str(folder), "no.jinja")
    assert "is no Jinja template" in refusal(ChatTemplate, "{% if %}", "x.jinja", {})


# --- refused

REWRITES = CHATML.replace("message['content'] + ", "message['content'] + ('' if loop.last else ' (old)') + ")
HEADERS = CHATML[: CHATML.index("{% if add_generation")]
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
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "images, cannot be trained on"),
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
    found = read(b'{"prompt": "a\\ud800b", "answer": "\\uD83D\\uDE00"}')
    assert (found["prompt"], found["answer"]) == ("a\ufffdb", "\U0001f600")


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
    found = read({"messages": [{"role": "system", "content": "be lazy"}, *TURNS]})
    text, spans = find_template(str(folder), None).render(found)
    assert text.index("be lazy") > text.index("five"), "a prompt before the first answer is written otherwise"
    assert [text[start:stop] for start, stop in spans] == [" five<|eos|>", " yes, the quick fox\n<|eos|>"]
