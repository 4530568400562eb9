"""The HTTP server of `lct serve`: it checks requests, queues them, and sends their answers. It runs in its own thread.

The server limits size and time of the headers and the body of a request while it reads them, and the number of
connections. If a client disconnects, its answer ends.
"""

import argparse
import asyncio
import json
import queue
import socket
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from lct_inference.openai_format import (
    AnswerError,
    Ended,
    Object,
    Piece,
    Reply,
    error_object,
    model_object,
)
from lct_inference.openai_request import Body, Request, check_fields, request_of
from lct_inference.talk import Talk, text_tokens
from trainer.config.errors import ConfigError
from trainer.data.tokenizers.tokenizer import Tokenizer

_CONNECTIONS = 512
_HEADER_BYTES = 64 * 1024
_SECONDS = 30.0
"""How long a client may take to send headers, and to send a body."""
_BYTES_PER_TOKEN = 64  # of JSON: text with escapes has 4 to 30
_FURTHER_BYTES = 2**20  # for tools, names of roles and settings
_LOOPBACK = ("127.0.0.1", "localhost", "::1")

Part = Piece | Ended | AnswerError


@dataclass(frozen=True)
class Waiting:
    """A request that waits for its answer.

    Attributes:
        request: The request.
        send: Takes the parts of the answer.
        gone: Set when the client has left.
    """

    request: Request
    send: Callable[[Part], object]
    gone: threading.Event = field(default_factory=threading.Event)


@dataclass
class Server:
    """The server of rank 0: it queues requests, and sends the parts of their answers.

    Attributes:
        args: The options of the command line.
        longest: Largest number of tokens of prompt and answer together.
        tokenizer: The tokenizer.
        talk: The chat template, or the error that says why the model has none.
        current: The request that `next` returned last.
    """

    args: argparse.Namespace
    longest: int
    tokenizer: Tokenizer
    talk: Talk | ConfigError

    def __post_init__(self) -> None:
        args = self.args
        self._most_bytes = _FURTHER_BYTES + _BYTES_PER_TOKEN * self.longest
        self._name = args.folder.resolve().name
        self._requests: queue.Queue[Waiting] = queue.Queue()
        self._usual = Request(
            [], args.tokens, args.temperature, args.top_k, args.top_p, args.seed, []
        )
        self._number = 0
        # One thread at a time: encoding changes whether the tokenizer reads names of special tokens as text.
        self._reading = threading.Lock()

    def start(self) -> None:
        """Listen in a thread, and print the address. This returns at once.

        Raises:
            ConfigError: The address is not available.
        """
        host = self.args.host
        port = self.args.port
        try:
            listening = socket.create_server((host, port))
        except OSError as error:
            raise ConfigError(
                f"--host {host} --port {port} is not available ({error}); name another"
            ) from None
        settings = uvicorn.Config(
            self._app(),
            http=_Bounded,
            ws="none",
            lifespan="off",
            log_level="error",
            limit_concurrency=_CONNECTIONS,
            h11_max_incomplete_event_size=_HEADER_BYTES,
        )
        threading.Thread(
            target=uvicorn.Server(settings).run, args=([listening],), daemon=True
        ).start()
        print(f"{self._name} answers at http://{host}:{port}/v1; Ctrl-C ends", flush=True)

    def next(self) -> bytes:
        """Return the next request of a connected client as JSON, and keep it as `current`. Wait for it if necessary."""
        while True:
            with suppress(queue.Empty):
                self.current = self._requests.get(timeout=0.5)  # so that a signal ends the wait
                if not self.current.gone.is_set():
                    return json.dumps(asdict(self.current.request)).encode()

    # ---- in the server's thread

    def _app(self) -> Starlette:
        routes = [
            Route("/v1/chat/completions", partial(self._answer, chat=True), methods=["POST"]),
            Route("/v1/completions", partial(self._answer, chat=False), methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._model),
            Route("/health", self._health),
        ]
        handlers = {
            404: _wrong_path,
            405: _wrong_path,
            HTTPException: _refused,
            ConfigError: _refused,
        }
        return Starlette(routes=routes, exception_handlers=handlers)

    async def _health(self, request: HTTPRequest) -> Response:
        return self._checked(request, {"status": "ok"})

    async def _models(self, request: HTTPRequest) -> Response:
        return self._checked(request, {"object": "list", "data": [model_object(self._name)]})

    async def _model(self, request: HTTPRequest) -> Response:
        name = request.path_params["name"]
        if name == self._name:
            return self._checked(request, model_object(name))
        return self._checked(
            request, error_object(f"there is no model {name!r}; {self._name!r} is one"), 404
        )

    def _checked(self, request: HTTPRequest, content: Object, status: int = 200) -> Response:
        check_origin(request.headers, self.args.host)
        return JSONResponse(content, status)

    async def _answer(self, request: HTTPRequest, *, chat: bool) -> Response:
        try:
            check_origin(request.headers, self.args.host)
            body = read_body(await self._content(request))
            parsed = await run_in_threadpool(self._parse, body, chat=chat)
        except ClientDisconnect:
            return Response(status_code=400)  # nobody reads it
        return await self._send(request, body, parsed, chat=chat)

    async def _content(self, request: HTTPRequest) -> bytes:
        """Return the body of a JSON request. Raise HTTPException if it has another type, or is too long or too late."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise HTTPException(415, f"Content-Type = {kind[:60]!r} must be application/json")
        length = request.headers.get("content-length", "")
        rule = f"the request is longer than the {self._most_bytes:,} bytes that the model's window takes"
        too_long = HTTPException(413, rule)
        if length.isdigit() and int(length) > self._most_bytes:
            raise too_long

        async def read() -> bytes:
            content = bytearray()
            async for part in request.stream():
                content += part
                if len(content) > self._most_bytes:
                    raise too_long
            return bytes(content)

        try:
            return await asyncio.wait_for(read(), _SECONDS)
        except asyncio.TimeoutError:
            raise HTTPException(
                408, f"the request did not end within {_SECONDS:g} seconds"
            ) from None

    async def _send(
        self, request: HTTPRequest, body: Body, parsed: Request, *, chat: bool
    ) -> Response:
        parts = asyncio.Queue()
        waiting = Waiting(
            parsed, partial(asyncio.get_running_loop().call_soon_threadsafe, parts.put_nowait)
        )
        self._requests.put(waiting)
        leaves = asyncio.create_task(_leaves(request, waiting.gone, parts))
        opening = (
            self.talk.opening(parsed.prompt) if chat and isinstance(self.talk, Talk) else ""
        )
        scored = parsed.scores is not None
        reply = Reply(
            self._name, chat, len(parsed.prompt), opening, self.tokenizer.decode, scored
        )
        answer = _all(parts, leaves)
        if body.get("stream"):
            options = body.get("stream_options") or {}
            events = reply.events(answer, with_usage=bool(options.get("include_usage")))
            return StreamingResponse(events, media_type="text/event-stream")
        try:
            return JSONResponse(await reply.whole(answer))
        except AnswerError as error:
            return JSONResponse(error_object(str(error), "server_error"), 500)

    def _parse(self, body: Body, *, chat: bool) -> Request:
        check_fields(body, chat=chat)
        with self._reading:
            self._number += 1
            usual = replace(self._usual, seed=self._usual.seed + self._number)
            prompt = self._conversation(body) if chat else self._text(body)
        return request_of(body, prompt, usual, self.longest, chat=chat)

    def _conversation(self, body: Body) -> list[int]:
        if isinstance(self.talk, ConfigError):
            raise self.talk
        try:
            return self.talk.prompt(body.get("messages"), body)
        except ConfigError as error:  # clients do not see paths of this machine
            raise ConfigError(str(error).replace(f" {self.talk.template.name}", "")) from None

    def _text(self, body: Body) -> list[int]:
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
            (prompt,) = prompt
        if isinstance(prompt, str):
            return text_tokens(self.tokenizer, prompt)
        size = self.tokenizer.vocab_size
        if not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
            raise ConfigError("prompt must be one text, or the numbers of its tokens")
        for token in prompt:
            if not 0 <= token < size:
                raise ConfigError(
                    f"prompt has the token {token}, and the model's tokens are 0 to {size - 1}; send its own tokens"
                )
        return prompt


def check_origin(headers: Mapping[str, str], host: str) -> None:
    """Check that a request to a server at a loopback address comes from no web page of another host.

    Args:
        headers: The headers of the request.
        host: The address of the server.

    Raises:
        HTTPException: The header Host or Origin names another host.
    """
    if host not in _LOOPBACK:
        return
    for name in ("Host", "Origin"):
        address = headers.get(name.lower())
        if address is None:
            continue
        with suppress(ValueError):
            if urlsplit(address if "//" in address else f"//{address}").hostname in _LOOPBACK:
                continue
        reason = f"is not this machine, and the server answers at {host} alone"
        raise HTTPException(403, f"{name} = {address[:60]!r} {reason}")


def read_body(content: bytes) -> Object:
    """Return the JSON object of a request.

    Args:
        content: The body.

    Raises:
        ConfigError: The body is no object of JSON in UTF-8, is nested too deeply, or has half of a surrogate pair.
    """
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise ConfigError("a request must be an object of JSON in UTF-8")
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except RecursionError:
        raise ConfigError("the request is nested too deeply") from None
    except UnicodeEncodeError:
        raise ConfigError(
            "the request has one half of a surrogate pair, which is no character; leave it out"
        ) from None
    return body


async def _refused(_: HTTPRequest, error: Exception) -> Response:
    if isinstance(error, ConfigError):
        return JSONResponse(error_object(str(error)), 400)
    closed = {"Connection": "close"}  # the server does not read the remaining body
    return JSONResponse(error_object(error.detail), error.status_code, closed)


async def _wrong_path(_: HTTPRequest, error: HTTPException) -> Response:
    content = error_object("there is no such path or method; /v1/models is one")
    return JSONResponse(content, error.status_code)


async def _leaves(
    request: HTTPRequest, gone: threading.Event, parts: asyncio.Queue[Part]
) -> None:
    """Wait until the client has left; then set `gone` and end its answer."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    gone.set()
    parts.put_nowait(AnswerError("the client has left"))


async def _all(
    parts: asyncio.Queue[Part], leaves: asyncio.Task[None]
) -> AsyncIterator[Piece | Ended]:
    """Yield the pieces of an answer, then its `Ended`; raise an AnswerError if the answer fails."""
    try:
        while isinstance(part := await parts.get(), Piece):
            yield part
        if isinstance(part, AnswerError):
            raise part
        yield part
    finally:
        leaves.cancel()


class _Bounded(H11Protocol):
    """uvicorn's protocol, which closes connections that do not send a whole header in time."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._wait_no_longer()
        elif self._deadline is None:
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait_no_longer()
        super().connection_lost(exc)

    def _wait(self) -> None:
        self._deadline = self.loop.call_later(_SECONDS, self.transport.close)

    def _wait_no_longer(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None
