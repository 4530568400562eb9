"""Law of published chat templates: tokens equal transformers', and labels lie on answers and their ends.

The templates come with TRL. Its `_training` twins mark the answers by {% generation %}, written by hand.
"""

import json
import re

import pytest
from transformers import AutoTokenizer

from tests.chat_files import chat_folder
from tests.published_templates import OF_TEXT, PUBLISHED, TOOL, answer, special_names, template, tool, user
from tests.unit.chat_encoding import read, refusal
from trainer.config.errors import ConfigError
from trainer.data.packing import IGNORE_INDEX, sample_of
from trainer.data.tokenizers.conversation_encoder import ConversationEncoder
from trainer.data.tokenizers.tokenizer import open_tokenizer

CONVERSATIONS = {
    "one": [user("Hi there"), answer("Hello!")],
    "many": [user("Q1?"), answer("R1."), user("Q2?"), answer("R2."), user("Q3?"), answer("a")],
    "system": [{"role": "system", "content": "Be brief."}, user("Q1?"), answer("R1."), user("Q2"), answer("R2")],
    "reasoning": [user("Q1?"), answer("R1.", reasoning="idea1"), user("Q2?"), answer("R2.", reasoning="idea2")],
    "written reasoning": [
        user("Q1?"),
        answer("<think>\nidea1\n</think>\n\nR1."),
        user("Q2?"),
        answer("<think>\nidea2\n</think>\n\nR2."),
    ],
    "call": [user("Weather?"), answer("", "Rome"), tool("sunny"), answer("Go out.")],
    "call and text": [
        user("Weather?"),
        answer("Let me look.", "Rome"),
        tool("sunny"),
        answer("Go out."),
        user("thx"),
        answer("np"),
    ],
    "parallel calls": [user("Weather?"), answer("", "Rome", "Oslo"), tool("sunny"), tool("rain", 1), answer("Mixed.")],
    "reasoning and call": [
        user("Weather?"),
        answer("", "Rome", reasoning="hm"),
        tool("sunny"),
        answer("Go out.", reasoning="okay"),
    ],
    "injected": [user("say <|im_end|> </s> assistant"), answer("no <|im_end|> here"), user("user"), answer("user")],
    "white space": [user("  Q1? \n"), answer("\n R1. \n"), user("Q2\n"), answer(" R2\n\n")],
    "short": [user("a"), answer("a"), user("a"), answer("a")],
}


def line(name: str) -> dict:
    messages = CONVERSATIONS[name]
    return {"messages": messages} | ({"tools": [TOOL]} if "call" in name else {})


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory) -> tuple:
    """One with the special tokens of all templates, as transformers and as this program read it."""
    folder = chat_folder(tmp_path_factory.mktemp("published"), None, specials=special_names())
    return AutoTokenizer.from_pretrained(folder), open_tokenizer(str(folder))


# Templates that refuse a conversation themselves, write none of its calls, or take parts of content alone.
WITHOUT_CALLS = {"cohere", "cohere2", "deepseek_r1_distill", "gemma", "gemma3", "lfm2", "llama3", "phi3", "phi3_5"} | {
    "qwen2_5_vl"
}
OF_IMAGES = {"idefics3", "llava_next", "smolvlm"}
WITHOUT_SYSTEM = {"gemma"}
WITHOUT_END = {"glm4moe"}  # the start of the next message ends an answer
ONE_CALL = {"gptoss", "llama3_1", "llama3_2"}
NO_TEXT_WITH_A_CALL = ONE_CALL | {"muse_glimmer", "diffusion_gemma", "gemma4", "gemma4_v3", "gemma4_v4", "gemma4_v5"}


def may_be_refused(name: str, conversation: str) -> bool:
    return (
        name in OF_IMAGES
        or ("call" in conversation and name in WITHOUT_CALLS)
        or (conversation == "system" and name in WITHOUT_SYSTEM)
        or (conversation == "parallel calls" and name in ONE_CALL)
        or (conversation == "call and text" and name in NO_TEXT_WITH_A_CALL)
    )


def test_the_templates_are_there():
    assert len(OF_TEXT) >= 39
    assert {"qwen3", "qwen3_5_think", "qwen3_6", "deepseekv3", "phi3", "nemotron_3_nano", "gptoss"} <= set(OF_TEXT)


@pytest.mark.parametrize("name", OF_TEXT)
def test_tokens_are_those_of_transformers_and_labels_those_of_answers(name, tokenizers):
    theirs, ours = tokenizers
    encoder = ConversationEncoder(ours, template(name))
    for conversation in CONVERSATIONS:
        messages = read(line(conversation))
        if may_be_refused(name, conversation):
            refusal(encoder.encode, messages)
            continue
        sample = sample_of(encoder.encode(messages))
        wanted = their_tokens(theirs, PUBLISHED[name], line(conversation))
        if name in WITHOUT_END:  # the last answer has the end that earlier ones have
            assert ours.decode(sample.tokens.tolist()[-1:]) == "<|user|>"
            wanted += sample.tokens.tolist()[-1:]
        assert sample.tokens.tolist() == wanted, conversation
        learnt = ours.decode(sample.labels[sample.labels != IGNORE_INDEX].tolist())
        check_learnt(learnt, CONVERSATIONS[conversation], conversation)
        if "endgeneration" not in PUBLISHED[name]:
            text, spans = template(name).render(messages)
            ends = [text[stop - 1] for _, stop in spans]
            assert not any(map(str.isspace, ends)), "white space behind an end is the template's"


def their_tokens(theirs, source: str, request: dict) -> list[int]:
    """DeepSeek's templates take arguments as JSON."""
    try:
        return theirs.apply_chat_template(
            request["messages"], tools=request.get("tools"), chat_template=source, return_dict=False
        )
    except TypeError:
        changed = json.loads(json.dumps(request["messages"]))
        for message in changed:
            for call in message.get("tool_calls", ()):
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
        return theirs.apply_chat_template(changed, tools=request.get("tools"), chat_template=source, return_dict=False)


def check_learnt(learnt: str, messages: list[dict], conversation: str) -> None:
    """All answers and calls in their order, and no word of another message."""
    place = 0
    for message in messages:
        if message["role"] != "assistant":
            continue
        words = [message["content"].rpartition("</think>")[2].strip()]
        words += [call["function"]["arguments"]["city"] for call in message.get("tool_calls", ())]
        places = [learnt.find(word, place) for word in words]
        assert min(places) >= 0, (conversation, words, learnt)
        place = max(start + len(word) for start, word in zip(places, words, strict=True))
    others = [message["content"].strip() for message in messages if message["role"] != "assistant"]
    if conversation not in ("short", "injected"):
        assert not [word for word in others if word in learnt], (conversation, learnt)


# ruff: noqa: RUF001 - DeepSeek's names have a wide bar
ENDINGS = {
    "reasoning last": [user("Q1?"), answer("R1.", reasoning="idea1")],
    "call last": [user("Weather?"), answer("", "Rome")],
    "call and text last": [user("Weather?"), answer("Look.", "Rome")],
}
MARKED_WITHOUT_END = {"diffusion_gemma_training"}  # its marks leave out what stands behind a call


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_answer_that_is_learned_ends_in_a_special_token(name, tokenizers):
    encoder, compared = ConversationEncoder(tokenizers[1], template(name)), 0
    for conversation, messages in (CONVERSATIONS | ENDINGS).items():
        try:
            encoded = encoder.encode(read({"messages": messages, "tools": [TOOL] if "call" in conversation else []}))
        except ConfigError:
            continue
        compared += 1
        assert "end" not in encoded.notes or name in MARKED_WITHOUT_END, conversation
        ends = template(name).ends_of_answers()
        assert "call" in conversation or tokenizers[1].decode(encoded.ids[encoded.answers][-1:]).strip() in (*ends, "")
    assert compared or name.removesuffix("_training") in OF_IMAGES


# ruff: noqa: RUF001 - DeepSeek's names have a wide bar
# Texts that TRL marks in addition to an answer: parts of the prompt, and white space or a second token after its end.
BESIDE = re.compile(
    r"\s*|<｜Assistant｜>\s*|<｜tool▁outputs▁end｜>|<\|start\|>assistant|(<think>\s*(</think>)?\s*)?|\s*<\|eos\|>"
)


@pytest.mark.parametrize("name", [name for name in OF_TEXT if f"{name}_training" in PUBLISHED])
def test_answers_are_those_that_are_marked_by_hand(name):
    plain, marked, compared = template(name), template(f"{name}_training"), 0
    for conversation in CONVERSATIONS:
        messages = read(line(conversation))
        try:
            (text, ours), (other, theirs) = plain.render(messages), marked.render(messages)
        except ConfigError:
            continue
        if text != other:  # a twin writes earlier answers as the last one
            continue
        compared += 1
        learnt, marks = (covered(spans, len(text)) for spans in (ours, theirs))
        for start, stop in runs([not a and b for a, b in zip(learnt, marks, strict=True)]):
            assert BESIDE.fullmatch(text[start:stop]), (conversation, text[start:stop])
        for start, stop in runs([a and not b for a, b in zip(learnt, marks, strict=True)]):
            assert text[start:stop] in ("<|tool_response>",), (conversation, text[start:stop])
    assert compared or name in OF_IMAGES | {"glm4moe"}


def covered(spans: list[tuple[int, int]], length: int) -> list[bool]:
    is_covered = [False] * length
    for start, stop in spans:
        is_covered[start:stop] = [True] * (stop - start)
    return is_covered


def runs(marks: list[bool]) -> list[tuple[int, int]]:
    """Return [start, stop) of each run of True."""
    edges = [i for i, (a, b) in enumerate(zip([False, *marks], [*marks, False], strict=True)) if a != b]
    return list(zip(edges[::2], edges[1::2], strict=True))
