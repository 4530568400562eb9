"""Law of the HTTP server: no request ends or fills it; each wrong one is refused in a sentence, with its status."""

import json
import socket
import threading
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from lct_inference import http_server
from lct_inference.http_server import Server
from lct_inference.openai_format import AnswerError, Ended, Piece
from lct_inference.talk import Talk
from tests.answering import WITH_TOOLS
from tests.chat_files import chat_folder
from tests.distributed.pool import free_port
from trainer.config.schema import JobConfig, Model
from trainer.data.tokenizers.tokenizer import open_tokenizer

JSON = {"Content-Type": "application/json"}
HELLO = {"messages": [{"role": "user", "content": "five"}]}


class Answered:
    """A server whose answers a thread writes, without a model. held: requests that get no answer until they leave."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        args = Namespace(
            folder=folder, host="127.0.0.1", port=self.port, tokens=8, temperature=0, top_k=0, top_p=1, seed=1
        )
        talk = Talk.of(JobConfig(model=Model(tokenizer_path=str(folder))))
        self.server = Server(args, 64, open_tokenizer(str(folder)), talk)
        self.server.start()
        self.begun, self.left = threading.Event(), threading.Event()
        threading.Thread(target=self._write, daemon=True).start()

    def _write(self) -> None:
        while self.server.next():
            waiting = self.server.current
            if waiting.request.seed == 77:
                self.begun.set()
                for _ in range(500):
                    waiting.send(Piece("."))
                    if waiting.gone.wait(0.02):
                        self.left.set()
                        break
            waiting.send(Piece("yes"))
            waiting.send(AnswerError("no room") if waiting.request.seed == 78 else Ended(1, "stop"))

    def sent(self, content: bytes, *, body: bytes = b"") -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=10)
        connection.sendall(content + body)
        return connection

    def ask(
        self, path: str, body: object = None, headers: dict | None = None, method: str = "POST"
    ) -> tuple[int, dict]:
        """Return the status and the object of an answer."""
        content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        standard = {"Host": f"127.0.0.1:{self.port}", "Content-Length": str(len(content)), "Connection": "close"}
        lines = "".join(f"{name}: {value}\r\n" for name, value in (standard | JSON | (headers or {})).items())
        return read_all(self.sent(f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode(), body=content))


def read_all(connection: socket.socket) -> tuple[int, dict]:
    with connection:
        received = b""
        while part := connection.recv(65536):
            received += part
    head, _, body = received.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body) if body.startswith(b"{") else {"text": body.decode()}


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Answered]:
    return Answered(chat_folder(tmp_path_factory.mktemp("limits") / "model", WITH_TOOLS))


def message_of(response: tuple[int, dict]) -> str:
    return response[1]["error"]["message"]


def test_the_server_says_that_it_is_there_and_which_model_it_has(server):
    assert server.ask("/health", method="GET") == (200, {"status": "ok"})
    status, model = server.ask("/v1/models/model", method="GET")
    assert (status, model["id"]) == (200, "model")
    assert server.ask("/v1/models/other", method="GET")[0] == 404
    assert server.ask("/v1/other", HELLO)[0] == 404
    assert server.ask("/v1/chat/completions", HELLO)[1]["choices"][0]["message"]["content"] == "yes"


def test_pages_of_other_origins_and_other_types_are_refused(server):
    for headers, status, words in (
        ({"Origin": "https://example.com"}, 403, "Origin = 'https://example.com' is not this machine"),
        ({"Origin": "null"}, 403, "Origin = 'null' is not this machine"),
        ({"Host": "evil.example:8000"}, 403, "Host = 'evil.example:8000' is not this machine"),
        ({"Content-Type": "text/plain"}, 415, "Content-Type = 'text/plain' must be application/json"),
        ({"Origin": "http://localhost:3000"}, 200, ""),
        ({"Host": "[::1]:8000", "Content-Type": "application/json; charset=utf-8"}, 200, ""),
    ):
        response = server.ask("/v1/chat/completions", HELLO, headers)
        assert response[0] == status, headers
        assert not words or message_of(response).startswith(words)
    assert server.ask("/v1/models", method="GET", headers={"Host": "evil.example"})[0] == 403


def test_a_long_request_is_refused_before_it_is_read(server):
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    response = read_all(server.sent(f"{head}Content-Length: 50000000\r\n\r\n".encode(), body=b"{"))
    assert response[0] == 413
    assert message_of(response) == "the request is longer than the 1,052,672 bytes that the model's window takes"
    part = b"10000\r\n" + b" " * 65536 + b"\r\n"
    response = read_all(server.sent(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode(), body=part * 17))
    assert response[0] == 413


def test_what_is_half_sent_is_closed(server, monkeypatch):
    monkeypatch.setattr(http_server, "_SECONDS", 0.2)
    started = time.monotonic()
    for half in (b"", b"POST /v1/completions HTTP/1.1\r\nHost: loc"):
        with server.sent(half) as connection:
            assert connection.recv(100) == b"", "closed"
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    response = read_all(server.sent(head + b"Content-Length: 9\r\n\r\n", body=b"{"))
    assert (response[0], message_of(response)) == (408, "the request did not end within 0.2 seconds")
    assert time.monotonic() - started < 5
    with suppress(ConnectionResetError):  # as it is closed before it is read
        assert read_all(server.sent(b"GET /health HTTP/1.1\r\nA: " + b"x" * 200_000))[0] == 400


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_answer(server, stream, capfd):
    server.begun.clear()
    server.left.clear()
    body = json.dumps(HELLO | {"seed": 77, "stream": stream}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    connection = server.sent(head + b"Content-Length: %d\r\n\r\n" % len(body), body=body)
    if stream:
        assert connection.recv(10)
    assert server.begun.wait(5)
    connection.close()
    assert server.left.wait(5)
    server.sent(head + b"Content-Length: 100\r\n\r\n{").close()  # and one that leaves in its body
    assert server.ask("/v1/chat/completions", HELLO)[0] == 200
    assert capfd.readouterr().err == ""


def test_an_answer_that_fails_is_an_error_of_the_server_and_the_next_one_is_answered(server):
    status, response = server.ask("/v1/chat/completions", HELLO | {"seed": 78})
    assert (status, response["error"]["type"], response["error"]["message"]) == (500, "server_error", "no room")
    status, response = server.ask("/v1/chat/completions", HELLO | {"seed": 78, "stream": True})
    assert status == 200, "it has begun"
    assert '"message": "no room"' in response["text"]
    assert "[DONE]" not in response["text"]
    assert server.ask("/v1/chat/completions", HELLO)[0] == 200


CHAT, TEXTS = "/v1/chat/completions", "/v1/completions"


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        (TEXTS, {"prompt": [True]}, "prompt must be one text, or the numbers of its tokens"),
        (TEXTS, {"prompt": [-1]}, "prompt has the token -1, and the model's tokens are 0 to 313"),
        (TEXTS, {"prompt": [314]}, "prompt has the token 314"),
        (TEXTS, {"prompt": []}, "the prompt has 0 tokens"),
        (TEXTS, {"prompt": "\ud800"}, "the request has one half of a surrogate pair"),
        (CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}, "the request has one half of a surrogate pair"),
        (TEXTS, b"[" * 100_000, "a request must be an object of JSON in UTF-8"),
        (TEXTS, b"[]", "a request must be an object of JSON in UTF-8"),
        (CHAT, {"messages": []}, '"messages" must be a list of objects'),
        (CHAT, {"messages": [{"role": 5, "content": "a"}]}, 'message 1: "role" = 5 must be one of'),
        (CHAT, {"messages": [{"role": "user", "content": {}}]}, 'message 1: "content" must be a string'),
        (CHAT, HELLO | {"tools": {"a": 1}}, "tools must be a list of objects"),
        (CHAT, HELLO | {"chat_template_kwargs": "x"}, '"chat_template_kwargs" must be an object'),
    ],
)
def test_a_wrong_request_is_refused_in_a_sentence(server, path, body, words):
    response = server.ask(path, body)
    assert response[0] == 400
    assert message_of(response).startswith(words)
    assert "\n" not in message_of(response)
