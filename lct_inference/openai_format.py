"""Answers in the format of OpenAI's API (platform.openai.com/docs/api-reference). Torch-free."""

import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any
from uuid import uuid4

Object = dict[str, Any]
"""An object of JSON."""
_LEAST = -9999.0  # as OpenAI writes minus infinity, for which JSON has no number


@dataclass(frozen=True)
class Score:
    """The log-probability of a token.

    Attributes:
        token: The token.
        log_probability: Its log-probability; None at the start of a text.
        likeliest: The likeliest tokens at this place, with their log-probabilities.
    """

    token: int
    log_probability: float | None
    likeliest: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Piece:
    """A part of an answer: its text, and the scores of its tokens if the request asks for scores."""

    text: str
    scores: tuple[Score, ...] = ()


@dataclass(frozen=True)
class Ended:
    """The end of an answer: the number of generated tokens, and the reason of the end, "stop" or "length"."""

    tokens: int
    reason: str


class AnswerError(Exception):
    """The generation of an answer has failed, and not because of the request."""


def error_object(message: str, kind: str = "invalid_request_error") -> Object:
    """Return an error in the form that clients of OpenAI's API expect.

    Args:
        message: The message.
        kind: The type of the error.
    """
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


def model_object(name: str) -> Object:
    """Return the entry of a model in the list of models.

    Args:
        name: The name of the model.
    """
    return {"id": name, "object": "model", "created": int(time.time()), "owned_by": "lct"}


@dataclass
class Reply:
    """Turns the `Piece`s and the `Ended` of one answer into JSON objects.

    Attributes:
        model: The name of the model.
        chat: Whether the request is for a chat; otherwise the model continues a text.
        prompt_tokens: Number of tokens of the prompt.
        opening: The beginning of the answer, if the prompt ends with it.
        decode: Returns the text of tokens.
        scored: Whether the request asks for scores.
        id: The identifier of the answer.
        created: When the answer began, in seconds since 1970.
    """

    model: str
    chat: bool
    prompt_tokens: int
    opening: str = ""
    decode: Callable[[Sequence[int]], str] = str
    scored: bool = False
    id: str = field(default_factory=lambda: uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))
    _offset: int = 0

    async def whole(self, pieces: AsyncIterator[Piece | Ended]) -> Object:
        """Return the whole answer as one object.

        Args:
            pieces: The parts of the answer; the last one is `Ended`.
        """
        *parts, ended = [piece async for piece in pieces]
        text = self.opening + "".join(part.text for part in parts)
        content = (
            {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        )
        scores = self._scores([score for part in parts for score in part.scores])
        return self._object(content, ended.reason, scores) | {"usage": self._usage(ended)}

    async def events(
        self, pieces: AsyncIterator[Piece | Ended], *, with_usage: bool
    ) -> AsyncIterator[str]:
        """Yield server-sent events: one for each part, one for the reason of the end, one for the usage, and `[DONE]`.

        If the answer fails, the last event is the error.

        Args:
            pieces: The parts of the answer; the last one is `Ended`.
            with_usage: Whether to send the numbers of tokens of prompt and answer.
        """
        if self.chat:
            yield _event(self._chunk({"role": "assistant", "content": self.opening}))
        try:
            async for piece in pieces:
                if isinstance(piece, Piece):
                    if piece.text or piece.scores:
                        yield _event(
                            self._chunk(
                                {"content": piece.text}, scores=self._scores(piece.scores)
                            )
                        )
                    continue
                yield _event(self._chunk({}, piece.reason))
                if with_usage:
                    yield _event(self._chunk({}) | {"choices": [], "usage": self._usage(piece)})
        except AnswerError as error:
            yield _event(error_object(str(error), "server_error"))
            return
        yield "data: [DONE]\n\n"

    def _chunk(
        self, delta: dict[str, str], reason: str | None = None, scores: Object | None = None
    ) -> Object:
        content = {"delta": delta} if self.chat else {"text": delta.get("content", "")}
        return self._object(content, reason, scores, kind="chat.completion.chunk")

    def _object(
        self,
        content: Object,
        reason: str | None,
        scores: Object | None,
        kind: str = "chat.completion",
    ) -> Object:
        choice = {"index": 0, **content, "logprobs": scores, "finish_reason": reason}
        about = {
            "id": self.id,
            "object": kind if self.chat else "text_completion",
            "created": self.created,
        }
        return about | {"model": self.model, "choices": [choice]}

    def _usage(self, ended: Ended) -> dict[str, int]:
        read = self.prompt_tokens
        written = ended.tokens
        return {
            "prompt_tokens": read,
            "completion_tokens": written,
            "total_tokens": read + written,
        }

    def _scores(self, scores: Sequence[Score]) -> Object | None:
        if not self.scored:
            return None
        if self.chat:
            return {"content": [self._chat_score(score) for score in scores], "refusal": None}
        texts = [self.decode([score.token]) for score in scores]
        *offsets, self._offset = accumulate(map(len, texts), initial=self._offset)
        return {
            "tokens": texts,
            "token_logprobs": [
                None if x.log_probability is None else _finite(x.log_probability)
                for x in scores
            ],
            "top_logprobs": [self._by_text(score) for score in scores],
            "text_offset": offsets,
        }

    def _by_text(self, score: Score) -> dict[str, float] | None:
        """Return text -> score of the likeliest tokens and the drawn one; None if the token has no score.

        Of equal texts, the likelier token counts.
        """
        if score.log_probability is None:
            return None
        scores_by_text = {}
        for token, value in (*score.likeliest, (score.token, score.log_probability)):
            scores_by_text.setdefault(self.decode([token]), _finite(value))
        return scores_by_text

    def _chat_score(self, score: Score) -> Object:
        likeliest = [self._named(token, value) for token, value in score.likeliest]
        return self._named(score.token, score.log_probability or 0.0) | {
            "top_logprobs": likeliest
        }

    def _named(self, token: int, value: float) -> Object:
        text = self.decode([token])
        as_bytes = None if "\ufffd" in text else list(text.encode())  # a part of a character
        return {"token": text, "logprob": _finite(value), "bytes": as_bytes}


def _finite(value: float) -> float:
    return max(value, _LEAST)


def _event(content: Object) -> str:
    return f"data: {json.dumps(content)}\n\n"
