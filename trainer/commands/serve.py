"""Answer requests in the format of OpenAI's API, with the model of a run or of a Hugging Face folder.

serve outputs/chat
serve ./Qwen3-8B --ngpu 4 --context-parallel 4 --port 8080

Clients find it at http://127.0.0.1:8000/v1: /chat/completions through the chat template, /completions and /models.
All ranks answer one request after the other. Ctrl-C ends.
"""

import argparse
import asyncio
import json
import queue
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from trainer.commands.generate import job_of, model_parser
from trainer.commands.openai_format import Ended, Reply, Request, request_of
from trainer.commands.options import Parser, number
from trainer.commands.ranks import run
from trainer.commands.talk import PATIENCE_SECONDS, Pieces, Talk, ends_of, talk_options, text_tokens
from trainer.config.errors import ConfigError
from trainer.data.tokenizers.tokenizer import Tokenizer, open_tokenizer
from trainer.job import ResolvedJob

if TYPE_CHECKING:
    import torch
    from starlette.requests import Request as HTTPRequest
    from starlette.responses import Response


def parser() -> Parser:
    """Return the parser of the options."""
    described = model_parser("serve", __doc__)
    add = described.add_argument
    add("--host", default="127.0.0.1", help="address to listen at; 0.0.0.0: from other machines (default: 127.0.0.1)")
    add("--port", type=number(int, 1, most=65535), default=8000, help="port to listen at (default: 8000)")
    talk_options(described, tools=False)
    return described


def checked(argv: list[str]) -> tuple[argparse.Namespace, ResolvedJob]:
    """Return the arguments and the job of all ranks."""
    args = parser().parse_args(argv)
    if missing := [package for package in ("starlette", "uvicorn") if find_spec(package) is None]:
        raise ConfigError(
            f"lct serve needs {' and '.join(missing)}; install them with pip install '.[serve]' in the folder of this "
            f"program, or with pip install {' '.join(missing)}"
        )
    return args, job_of(args, command="lct serve")


class Server:
    """The HTTP server of rank 0, in a thread of its own: it queues requests, and sends what the ranks write."""

    def __init__(self, args: argparse.Namespace, longest: int, tokenizer: Tokenizer, talk: Talk | ConfigError) -> None:
        """longest: tokens of prompt and answer; talk: or why the model cannot be talked to."""
        self._args, self._longest, self._tokenizer, self._talk, self._number = args, longest, tokenizer, talk, 0
        self._name = args.folder.resolve().name
        self._requests: queue.Queue[tuple[Request, Callable[[str | Ended], None]]] = queue.Queue()
        self._usual = Request([], args.tokens, args.temperature, args.top_k, args.top_p, args.seed, [])

    def start(self) -> None:
        """Listen, and print where; ConfigError if the address is not available."""
        import uvicorn
        from starlette.applications import Starlette
        from starlette.routing import Route

        host, port = self._args.host, self._args.port
        try:
            listening = socket.create_server((host, port))
        except OSError as error:
            raise ConfigError(f"--host {host} --port {port} is not available ({error}); name another") from None
        paths = {"/v1/chat/completions": True, "/v1/completions": False}
        routes = [Route(path, partial(self._answer, chat=chat), methods=["POST"]) for path, chat in paths.items()]
        app = Starlette(routes=[*routes, Route("/v1/models", self._models)])
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        threading.Thread(target=server.run, args=([listening],), daemon=True).start()
        print(f"{self._name} answers at http://{host}:{port}/v1; Ctrl-C ends", flush=True)

    def next(self) -> bytes:
        """Wait for the next request, and return it. `put` then takes the pieces of its answer, and how it ended."""
        while True:
            with suppress(queue.Empty):
                request, self.put = self._requests.get(timeout=0.5)  # so that a signal ends the wait
                return json.dumps(asdict(request)).encode()

    # ---- in the server's thread

    async def _models(self, _: "HTTPRequest") -> "Response":
        from starlette.responses import JSONResponse

        model = {"id": self._name, "object": "model", "created": int(time.time()), "owned_by": "lct"}
        return JSONResponse({"object": "list", "data": [model]})

    async def _answer(self, request: "HTTPRequest", *, chat: bool) -> "Response":
        from starlette.concurrency import run_in_threadpool
        from starlette.responses import JSONResponse, StreamingResponse

        try:
            body = await request.json()
            if not isinstance(body, dict):
                raise ConfigError("a request must be an object of JSON")
            asked = await run_in_threadpool(self._asked, body, chat=chat)
            if not isinstance(options := body.get("stream_options") or {}, dict):
                raise ConfigError(f"stream_options = {options!r} must be an object")
        except (ConfigError, ValueError, TypeError, RecursionError) as error:
            wrong = {"message": str(error), "type": "invalid_request_error", "param": None, "code": None}
            return JSONResponse({"error": wrong}, status_code=400)
        pieces: asyncio.Queue[str | Ended] = asyncio.Queue()
        self._requests.put((asked, partial(asyncio.get_running_loop().call_soon_threadsafe, pieces.put_nowait)))
        reply = Reply(self._name, chat, len(asked.prompt), self._talk.opening(asked.prompt) if chat else "")
        if body.get("stream"):
            events = reply.events(_all(pieces), with_usage=bool(options.get("include_usage")))
            return StreamingResponse(events, media_type="text/event-stream")
        return JSONResponse(await reply.whole(_all(pieces)))

    def _asked(self, body: Mapping[str, Any], *, chat: bool) -> Request:
        self._number += 1
        usual = replace(self._usual, seed=self._usual.seed + self._number)
        return request_of(body, self._conversation(body) if chat else self._text(body), usual, self._longest)

    def _conversation(self, body: Mapping[str, Any]) -> list[int]:
        if isinstance(self._talk, ConfigError):
            raise self._talk
        return self._talk.prompt(body.get("messages"), body)

    def _text(self, body: Mapping[str, Any]) -> list[int]:
        given = body.get("prompt")
        if isinstance(given, list) and len(given) == 1 and not isinstance(given[0], int):
            (given,) = given
        if isinstance(given, list) and all(isinstance(x, int) and 0 <= x < self._tokenizer.vocab_size for x in given):
            return given
        if not isinstance(given, str):
            raise ConfigError("prompt must be one text, or the numbers of its tokens")
        return text_tokens(self._tokenizer, given)


def _talk_of(job: ResolvedJob) -> Talk | ConfigError:
    """Return how the model is talked to, or why it cannot be: one without a chat template completes texts."""
    try:
        return Talk.of(job.config)
    except ConfigError as error:
        return error


async def _all(pieces: "asyncio.Queue[str | Ended]") -> AsyncIterator[str | Ended]:
    """Yield the pieces of an answer as they come, up to its end."""
    while isinstance(piece := await pieces.get(), str):
        yield piece
    yield piece


def work(args: argparse.Namespace, job: ResolvedJob, device: "torch.device") -> str:
    """Answer requests for ever. A collective over all ranks; rank 0 has the server."""
    from trainer.commands.finished_run import loaded_model
    from trainer.components.generation import Sampling, generate
    from trainer.runtime.agreement import raise_on_all_ranks, read_once
    from trainer.runtime.process_group import set_timeout

    tokenizer, talk = open_tokenizer(job.config.model.tokenizer_file), _talk_of(job)
    ends = talk.ends if isinstance(talk, Talk) else ends_of(job.config, tokenizer)
    model, dims = loaded_model(job, device)
    server = Server(args, job.config.training.seq_len, tokenizer, talk) if dims.rank("world") == 0 else None
    raise_on_all_ranks(server.start if server else lambda: None, device)
    set_timeout(PATIENCE_SECONDS)  # the other ranks wait for a request

    def answer(asked: Request, send: Callable[[str | Ended], None]) -> None:
        text = Pieces(tokenizer.decode, asked.stops)

        def put(_: int, token: int) -> bool:
            send(text.put(token))
            return text.stopped

        sampling = Sampling(asked.temperature, asked.top_k, asked.top_p)
        settings = {"tokens": asked.tokens, "sampling": sampling, "seed": asked.seed, "ends": ends}
        (written,) = generate(model, job, dims, [asked.prompt], **settings, on_token=put)
        send(text.finish())
        send(Ended(len(written), "length" if len(written) == asked.tokens and not text.stopped else "stop"))

    while given := read_once(server.next if server else bytes, over=dims["world"]):
        answer(Request(**json.loads(given)), server.put if server else lambda _: None)
    return ""


main = partial(run, __name__)
