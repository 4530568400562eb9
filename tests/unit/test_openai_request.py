"""Law of fields of requests: each is obeyed, or changes nothing by its meaning, or is refused by its name."""

import pytest

from lct_inference.openai_request import Request, check_fields, request_of
from trainer.config.errors import ConfigError

USUAL = Request([], 8, 0.7, 0, 1.0, 3, [])


def asked(body: dict, *, chat: bool = False) -> Request:
    check_fields(body, chat=chat)
    return request_of(body, [1, 2], USUAL, 16, chat=chat)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"min_p": 0.1}, "min_p = 0.1 is not offered; leave it out, or write 0"),
        ({"repetition_penalty": 1.1}, "repetition_penalty = 1.1 is not offered"),
        ({"min_tokens": 4}, "min_tokens = 4 is not offered"),
        ({"ignore_eos": True}, "ignore_eos = True is not offered"),
        ({"best_of": 3}, "best_of = 3 is not offered"),
        ({"n": 2}, "n = 2 is not offered; leave it out, or write 1"),
        ({"logit_bias": {"5": 1}}, "logit_bias = {'5': 1} is not offered"),
        ({"continue_final_message": True}, "continue_final_message = True is not offered"),
        ({"tool_choice": "required"}, "tool_choice = 'required' is not offered; write 'auto' or 'none'"),
        ({"response_format": {"type": "json_object"}}, "response_format = {'type': 'json_object'} is not offered"),
        ({"reasoning_effort": "high"}, "reasoning_effort is not offered; leave it out"),
        ({"prompt": "a"}, "prompt is not offered"),
        ({"echo": True}, "echo = True is not offered"),
        ({"top_p": 2}, "top_p = 2 must be a number from 0 to 1"),
        ({"max_tokens": 3.5}, "max_tokens = 3.5 must be a whole number of at least 1"),
        ({"max_tokens": 0}, "max_tokens = 0 must be a whole number of at least 1"),
        ({"top_logprobs": 2}, "top_logprobs = 2 needs logprobs = true"),
        ({"top_logprobs": 30, "logprobs": True}, "top_logprobs = 30 must be a whole number from 0 to 20"),
        ({"logprobs": 2}, "logprobs = 2 must be true or false"),
        ({"add_generation_prompt": "no"}, "add_generation_prompt = 'no' must be true or false"),
        ({"stream": "yes"}, "stream = 'yes' must be true or false"),
    ],
)
def test_a_field_without_an_effect_is_refused_by_its_name(body, words):
    with pytest.raises(ConfigError) as error:
        asked(body, chat=True)
    assert str(error.value).startswith(words)


def test_a_value_that_changes_nothing_is_taken():
    nothing = {
        "n": 1,
        "best_of": 1,
        "logit_bias": {},
        "frequency_penalty": 0.0,
        "response_format": {"type": "text"},
        "tool_choice": "auto",
        "user": "me",
        "metadata": {"a": "b"},
        "store": True,
        "stream_options": {"include_usage": True},
        "echo": False,
        "min_p": None,
        "never_heard_of": None,
    }
    assert asked(nothing, chat=True) == request_of({}, [1, 2], USUAL, 16)


def test_values_are_those_that_were_asked_for():
    assert asked({"max_tokens": 3.0, "top_p": 0}).tokens == 3
    assert asked({"top_p": 0}).top_p == 0
    assert asked({"max_tokens": 0, "echo": True, "logprobs": 5}) == request_of(
        {"max_tokens": 0, "echo": True, "logprobs": 5}, [1, 2], USUAL, 16
    )
    assert (asked({"logprobs": 0}).scores, asked({}).scores) == (0, None)
    assert asked({"logprobs": True, "top_logprobs": 3}, chat=True).scores == 3
    assert asked({"logprobs": True}, chat=True).scores == 0
    assert asked({"logprobs": False}, chat=True).scores is None


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"stream_options": []}, "stream_options = [] must be an object"),
        ({"stream_options": 0}, "stream_options = 0 must be an object"),
        ({"stream_options": ""}, "stream_options = '' must be an object"),
        ({"stop": 0}, "stop = 0 must be a text, or a list of texts"),
        ({"stop": False}, "stop = False must be a text, or a list of texts"),
        ({"stop": ""}, "stop = [''] must be a text, or a list of texts"),
        ({"stop": {}}, "stop = {} must be a text, or a list of texts"),
    ],
)
def test_an_empty_value_of_another_type_is_refused(body, words):
    with pytest.raises(ConfigError) as error:
        asked(body)
    assert str(error.value) == words
    assert asked({"stop": [], "stream_options": {}}) == asked({"stop": None, "stream_options": None}) == asked({})
