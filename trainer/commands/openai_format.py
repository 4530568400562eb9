"""Requests and answers in the format of OpenAI's API (platform.openai.com/docs/api-reference). Torch-free."""

import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from trainer.config.errors import ConfigError

_NOT_OFFERED = ("logprobs", "logit_bias", "frequency_penalty", "presence_penalty", "response_format", "echo", "suffix")


@dataclass(frozen=True)
class Request:
    """What all ranks need to know of a request. stops: texts that end the answer, which does not have them."""

    prompt: list[int]
    tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int
    stops: list[str]


@dataclass(frozen=True)
class Ended:
    """How an answer has ended: its tokens, and "stop" or "length"."""

    tokens: int
    reason: str


def request_of(body: Mapping[str, Any], prompt: list[int], usual: Request, longest: int) -> Request:
    """Return what a request asks for.

    usual: the values that it may leave out; longest: tokens of prompt and answer that the model takes.

    Raises:
        ConfigError: a wrong value, or something that is not offered.
    """

    def given(key: str, kind: type, default: Any, *, least: float = 0) -> Any:
        value = body.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, kind)) or not least <= value < 2**63:
            raise ConfigError(f"{key} = {value!r} must be a number of at least {least}")
        return kind(value)

    for key in _NOT_OFFERED:
        if body.get(key):
            raise ConfigError(f"{key} is not offered; leave it out")
    if body.get("n") not in (None, 1):
        raise ConfigError(f"n = {body['n']!r} is not offered; ask again for another answer")
    if not 0 < len(prompt) < longest:
        raise ConfigError(f"the prompt has {len(prompt)} tokens, and the model takes 1 to {longest - 1}")
    most = given("max_completion_tokens", int, given("max_tokens", int, usual.tokens, least=1), least=1)
    stops = body.get("stop") or []
    stops = [stops] if isinstance(stops, str) else stops
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise ConfigError(f"stop = {stops!r} must be a text, or a list of texts")
    return Request(
        prompt,
        min(most, longest - len(prompt)),
        given("temperature", float, usual.temperature),
        given("top_k", int, usual.top_k),
        given("top_p", float, usual.top_p) or 1.0,
        given("seed", int, usual.seed),
        stops,
    )


@dataclass(frozen=True)
class Reply:
    """How one request is answered: pieces of text and an `Ended` become objects of JSON.

    opening: text of the answer that its prompt has.
    """

    model: str
    chat: bool
    prompt_tokens: int
    opening: str = ""
    id: str = field(default_factory=lambda: uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    async def whole(self, pieces: AsyncIterator[str | Ended]) -> dict[str, Any]:
        """Return the answer when it has ended."""
        *texts, ended = [piece async for piece in pieces]
        text = self.opening + "".join(texts)
        content = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        return self._object(content, ended.reason) | {"usage": self._usage(ended)}

    async def events(self, pieces: AsyncIterator[str | Ended], *, with_usage: bool) -> AsyncIterator[str]:
        """Yield server-sent events: the pieces as they come, how it ended, and how many tokens there were if asked."""
        if self.chat:
            yield _event(self._chunk({"role": "assistant", "content": self.opening}))
        async for piece in pieces:
            if isinstance(piece, str):
                if piece:
                    yield _event(self._chunk({"content": piece}))
                continue
            yield _event(self._chunk({}, piece.reason))
            if with_usage:
                yield _event(self._chunk({}) | {"choices": [], "usage": self._usage(piece)})
        yield "data: [DONE]\n\n"

    def _chunk(self, delta: dict[str, str], reason: str | None = None) -> dict[str, Any]:
        content = {"delta": delta} if self.chat else {"text": delta.get("content", "")}
        return self._object(content, reason, kind="chat.completion.chunk")

    def _object(self, content: dict[str, Any], reason: str | None, kind: str = "chat.completion") -> dict[str, Any]:
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": reason}
        about = {"id": self.id, "object": kind if self.chat else "text_completion", "created": self.created}
        return about | {"model": self.model, "choices": [choice]}

    def _usage(self, ended: Ended) -> dict[str, int]:
        read, written = self.prompt_tokens, ended.tokens
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"
