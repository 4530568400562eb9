"""Law of `lct serve`: a client of OpenAI's API gets the answers that transformers writes."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import openai
import pytest

from lct_inference import serve
from lct_inference.http_server import Server
from lct_inference.openai_request import Request, request_of
from lct_inference.talk import Pieces
from tests.answering import SYSTEM, TOOLS, saved_model, theirs
from tests.distributed.pool import free_port
from tests.slow import slow
from trainer.config.errors import ConfigError
from trainer.data.tokenizers.chat_template import ChatTemplate
from trainer.data.tokenizers.tokenizer import open_tokenizer

ROOT = Path(__file__).resolve().parents[2]
QUESTION = {"role": "user", "content": "two and three?"}
GREEDY = {"model": "any", "max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return saved_model(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module", params=[1, *slow(2)])
def client(request, folder) -> Iterator[openai.OpenAI]:
    port = free_port()
    command = [sys.executable, "-m", "trainer", "serve", str(folder), f"--ngpu={request.param}", f"--port={port}"]
    server = subprocess.Popen(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout.readline() == f"{folder.name} answers at http://127.0.0.1:{port}/v1; Ctrl-C ends\n"
        yield openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=600)
        server.terminate()  # as Ctrl-C, which a job in the background may be told to ignore
        assert server.wait(20) != 0, "and all ranks"
    finally:
        server.kill()


def test_a_conversation_is_answered_whole_and_in_pieces(client, folder):
    messages = [SYSTEM, QUESTION]
    wanted = theirs(folder, messages, TOOLS)
    assert wanted != theirs(folder, messages, None), "negative control: tools matter"
    asked = {"messages": messages, "tools": TOOLS, **GREEDY}
    got = client.chat.completions.create(**asked)
    assert (got.choices[0].message.role, got.choices[0].message.content) == ("assistant", wanted)
    assert got.model == folder.name == client.models.list().data[0].id
    pieces = [*client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})]
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices) == wanted
    assert len(pieces) > 4
    assert pieces[-1].usage == got.usage
    assert got.usage.completion_tokens <= 12
    assert [piece.choices[0].finish_reason for piece in pieces if piece.choices][-1] == got.choices[0].finish_reason


def test_messages_as_clients_send_them_are_those_of_data(client, folder):
    """Parts of text, arguments as a string of JSON, a call without content, and an answer as the client dumps it."""
    first = client.chat.completions.create(messages=[QUESTION], **GREEDY).choices[0].message
    arguments = {"a": 2, "to": "three"}
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    as_sent = call | {"function": {"name": "add", "arguments": json.dumps(arguments)}}
    sent = [
        {"role": "user", "content": [{"type": "text", "text": "two and "}, {"type": "text", "text": "three?"}]},
        first.model_dump(),
        QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [as_sent]},
        {"role": "tool", "tool_call_id": "1", "content": "five"},
    ]
    data = [
        QUESTION,
        {"role": "assistant", "content": first.content},
        QUESTION,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "five"},
    ]
    got = client.chat.completions.create(messages=sent, **GREEDY)
    assert got.choices[0].message.content == theirs(folder, data, None)
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}
    with pytest.raises(openai.BadRequestError, match=r"message 1: .* has a part of type 'image_url'"):
        client.chat.completions.create(messages=[image], **GREEDY)


def test_a_text_is_completed_up_to_a_stop(client, folder):
    whole = client.completions.create(prompt="the quick", **GREEDY)
    text = whole.choices[0].text
    assert (whole.choices[0].finish_reason, whole.usage.completion_tokens) == ("length", 12)
    stop = text[len(text) // 2 :][:3]
    cut = client.completions.create(prompt=["the quick"], stop=["never there", stop], **GREEDY)
    assert (cut.choices[0].text, cut.choices[0].finish_reason) == (text[: text.index(stop)], "stop")
    assert cut.usage.completion_tokens < 12
    pieces = client.completions.create(prompt="the quick", stop=stop, stream=True, **GREEDY)
    assert "".join(piece.choices[0].text for piece in pieces) == text[: text.index(stop)]
    tokens = open_tokenizer(str(folder)).encode("the quick")
    asked = GREEDY | {"prompt": tokens, "temperature": 0.9}
    drawn = [client.completions.create(**asked, seed=seed).choices[0].text for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_scores_of_tokens_come_whole_and_in_pieces(client):
    asked = {"prompt": "the quick", "logprobs": 3, "echo": True, **GREEDY | {"max_tokens": 4}}
    choice = client.completions.create(**asked).choices[0]
    scores = choice.logprobs
    assert choice.text == "".join(scores.tokens)
    assert all(choice.text[at:].startswith(t) for at, t in zip(scores.text_offset, scores.tokens, strict=True))
    assert (scores.token_logprobs[0], scores.top_logprobs[0]) == (None, None)
    written = list(zip(scores.tokens, scores.token_logprobs, scores.top_logprobs, strict=True))[-4:]
    assert all(top[token] == score == max(top.values()) for token, score, top in written), "the likeliest are taken"
    pieces = [piece.choices[0] for piece in client.completions.create(**asked, stream=True)]
    assert "".join(piece.text for piece in pieces) == choice.text
    assert [x for piece in pieces if piece.logprobs for x in piece.logprobs.token_logprobs] == scores.token_logprobs
    prompt = client.completions.create(**asked | {"max_tokens": 0}).choices[0]
    assert prompt.text == "the quick"
    assert prompt.logprobs.token_logprobs == scores.token_logprobs[:-4]
    assert client.completions.create(prompt="the quick", echo=True, **GREEDY).choices[0].text.startswith("the quick")
    answer = client.chat.completions.create(messages=[QUESTION], logprobs=True, top_logprobs=2, **GREEDY).choices[0]
    first = answer.logprobs.content[0]
    assert (first.token, first.logprob) == (first.top_logprobs[0].token, first.top_logprobs[0].logprob)
    assert answer.message.content.startswith(first.token)
    assert len(first.top_logprobs) == 2


def test_wrong_requests_are_refused_in_one_sentence_and_the_next_one_is_answered(client):
    for wrong, message in (
        ({"n": 2}, "n = 2 is not offered"),
        ({"logit_bias": {"1": 2}}, "logit_bias = .* is not offered"),
        ({"max_tokens": 0}, "max_tokens = 0 must be a whole number of at least 1"),
        ({"temperature": -1}, "temperature = -1 must be a number of at least 0"),
        ({"temperature": 1e300}, "temperature = 1e.300 must be a number of at least 0"),
        ({"seed": 2**64}, "seed = 18446744073709551616 must be a whole number"),
        ({"stop": [""]}, "must be a text, or a list of texts"),
        ({"stream": True, "extra_body": {"stream_options": "x"}}, "stream_options = 'x' must be an object"),
        ({"messages": []}, '"messages" must be a list of objects with "role" and "content"'),
        ({"messages": [{"content": "?"}]}, 'message 1: "role" = None must be one of'),
        ({"messages": [{"role": "user", "content": "five " * 600}]}, "and the model takes 1 to 511"),
    ):
        with pytest.raises(openai.BadRequestError, match=message):
            client.chat.completions.create(**{"messages": [QUESTION], **GREEDY} | wrong)
    with pytest.raises(openai.BadRequestError, match="prompt must be one text"):
        client.completions.create(prompt=["a", "b"], **GREEDY)
    for temperature in (1e-310, 0.0):  # the server is still there, and a tiny temperature takes the likeliest token
        got = client.chat.completions.create(messages=[QUESTION], **GREEDY | {"temperature": temperature})
        assert got.choices[0].message.content


def test_many_clients_wait_and_none_stops_another(client):
    """More than the server has threads, each with a stream."""
    asked = {"prompt": "the quick", "stream": True, **GREEDY | {"max_tokens": 3}}
    with ThreadPoolExecutor(60) as clients:
        answers = [
            *clients.map(lambda _: "".join(x.choices[0].text for x in client.completions.create(**asked)), range(60))
        ]
    assert len(set(answers)) == 1
    assert answers[0]


def test_numbers_that_are_none_are_refused():
    usual = Request([], 8, 0.7, 0, 1.0, -3, [])
    for value in (float("nan"), float("inf"), 10**400, "1", True):
        with pytest.raises(ConfigError, match="temperature"):
            request_of({"temperature": value}, [1], usual, 16)
    assert request_of({}, [1], usual, 16).seed == -3


def test_what_may_begin_a_stop_waits():
    tokenizer = SimpleNamespace(decode=lambda tokens: "".join(map(chr, tokens)))
    answer = Pieces(tokenizer.decode, ["\n\n", "END"])
    assert [answer.put(ord(x)) for x in "aEN\nb"] == ["", "", "a", "E", "N"]
    assert (answer.finish(), answer.stopped) == ("\nb", False)
    answer = Pieces(tokenizer.decode, ["\n\n", "END"])
    assert "".join(answer.put(ord(x)) for x in "aEND") == "a"
    assert (answer.finish(), answer.stopped) == ("", True)


def test_an_answer_has_at_most_the_tokens_that_are_left():
    usual = Request([], 1024, 0.7, 0, 1.0, 3, [])
    asked = request_of({"top_p": 0, "stop": "x"}, [1] * 10, usual, 16)
    assert (asked.tokens, asked.top_p, asked.stops, asked.seed) == (6, 0.0, ["x"], 3)
    assert request_of({"max_completion_tokens": 2, "max_tokens": 5}, [1], usual, 16).tokens == 2


def test_a_port_that_is_taken_and_a_package_that_is_missing_are_one_sentence(folder, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        args, job = serve.checked([str(folder), f"--port={taken.getsockname()[1]}"])
        tokenizer = open_tokenizer(str(folder))
        with pytest.raises(ConfigError, match=r"is not available \(.*Address already in use.*\); name another"):
            Server(args, 16, tokenizer, serve.talk_of(job)).start()
    monkeypatch.setattr(serve, "find_spec", lambda package: None)
    with pytest.raises(ConfigError, match=r"needs starlette and uvicorn; install them with pip install '\.\[serve\]'"):
        serve.checked([str(folder)])


def test_an_error_of_a_template_has_no_path_of_the_server(folder):
    args, job = serve.checked([str(folder)])
    refuses = ChatTemplate("{{ raise_exception('never') }}", "/home/me/chat_template.jinja", {})
    talk = replace(serve.talk_of(job), template=refuses)
    server = Server(args, 64, open_tokenizer(str(folder)), talk)
    with pytest.raises(ConfigError, match=r"^the chat template refuses it \(never\)"):
        server._parse({"messages": [QUESTION]}, chat=True)


def test_a_model_without_a_template_completes_texts(folder, tmp_path: Path):
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in folder.iterdir():
        (bare / file.name).write_bytes(file.read_bytes().replace(b'"chat_template"', b'"no_template"'))
    args, job = serve.checked([str(bare)])
    server = Server(args, 64, open_tokenizer(str(bare)), serve.talk_of(job))
    assert server._parse({"prompt": "the"}, chat=False).prompt
    with pytest.raises(ConfigError, match="has no chat template"):
        server._parse({"messages": [QUESTION]}, chat=True)
