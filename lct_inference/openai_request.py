"""Requests in the format of OpenAI's API (platform.openai.com/docs/api-reference). Torch-free.

A field of a request (openai_fields.toml) is used, or has no meaning for a model on this machine, or is refused by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lct_inference.talk import check_length
from trainer.config.errors import ConfigError
from trainer.config.toml import load_toml
from trainer.data.tokenizers.chat_messages import are_objects

Body = Mapping[str, Any]
"""The object of a request."""
_FIELDS = load_toml(Path(__file__).with_name("openai_fields.toml"))
_ONE_VALUE = _FIELDS["one_value"]
_MOST_SCORES = 20


@dataclass(frozen=True)
class Request:
    """The part of a request that all ranks need.

    Attributes:
        prompt: The tokens of the prompt.
        tokens: Largest number of tokens of the answer.
        temperature: The temperature of sampling; 0 for the likeliest token.
        top_k: Sample among this number of likeliest tokens; 0 for all.
        top_p: Sample among the likeliest tokens with this total probability.
        seed: The seed of sampling.
        stops: Texts that end the answer. The answer does not contain them.
        scores: Number of likeliest tokens to report with each token; None for no log-probabilities.
        echo: Whether the answer begins with the prompt.
    """

    prompt: list[int]
    tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int
    stops: list[str]
    scores: int | None = None
    echo: bool = False


def check_fields(body: Body, *, chat: bool) -> None:
    """Check that the server supports each field of a request, its value and its type.

    A field of null counts as missing. Fields that the server ignores pass. `request_of` checks numbers and `stop`.

    Args:
        body: The request.
        chat: Whether the request is for a chat.

    Raises:
        ConfigError: The server does not support a field, its value or its type; the message names the field.
    """
    used = _FIELDS["used"] + _FIELDS["used_by_chat" if chat else "used_by_texts"]
    for key, value in body.items():
        if value is None or key in used or key in _FIELDS["unused"]:
            continue
        if key not in _ONE_VALUE:
            raise ConfigError(f"{key} is not offered; leave it out")
        if value != _ONE_VALUE[key]:
            raise ConfigError(
                f"{key} = {_short(value)} is not offered; leave it out, or write {_ONE_VALUE[key]!r}"
            )
    if chat and body.get("tool_choice") not in (None, "auto", "none"):
        raise ConfigError(
            f"tool_choice = {_short(body['tool_choice'])} is not offered; write 'auto' or 'none'"
        )
    tools = body.get("tools")
    if tools is not None and not are_objects(tools):
        raise ConfigError("tools must be a list of objects")
    for key in ("stream", "echo", "add_generation_prompt"):
        if not isinstance(body.get(key, False), bool | None):
            raise ConfigError(f"{key} = {_short(body[key])} must be true or false")
    if not isinstance(body.get("stream_options"), dict | None):
        raise ConfigError(
            f"stream_options = {_short(body['stream_options'])} must be an object"
        )


def request_of(
    body: Body, prompt: list[int], usual: Request, longest: int, *, chat: bool = False
) -> Request:
    """Return the record of a request. `check_fields` must have checked its fields.

    Args:
        body: The request.
        prompt: The tokens of the prompt.
        usual: The values of missing fields.
        longest: Largest number of tokens of prompt and answer together; the answer gets at most the rest.
        chat: Whether the request is for a chat.

    Raises:
        ConfigError: A value is wrong, or the prompt is too long.
    """
    read_number = partial(_number, body)
    check_length(prompt, longest)
    echo = bool(body.get("echo"))
    least = 0 if echo else 1
    most = read_number(
        "max_completion_tokens",
        int,
        read_number("max_tokens", int, usual.tokens, least=least),
        least=least,
    )
    return Request(
        prompt,
        min(most, longest - len(prompt)),
        read_number("temperature", float, usual.temperature),
        read_number("top_k", int, usual.top_k),
        read_number("top_p", float, usual.top_p, most=1),
        read_number("seed", int, usual.seed),
        _stops(body.get("stop")),
        _chat_scores(body) if chat else read_number("logprobs", int, None, most=_MOST_SCORES),
        echo,
    )


def _number(
    body: Body, key: str, kind: type, default: Any, *, least: float = 0, most: float = 2**63 - 1
) -> Any:
    """Return the number of a field, or the default if the field is missing; raise a ConfigError if it is wrong.

    kind: int or float. least, most: the smallest and the largest number.
    """
    value = body.get(key)
    if value is None:
        return default
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not least <= value <= most or (kind is int and value != int(value)):
        number = "whole number" if kind is int else "number"
        limit = f"of at least {least}" if most > 2**62 else f"from {least} to {most}"
        raise ConfigError(f"{key} = {_short(value)} must be a {number} {limit}")
    return kind(value)


def _stops(value: Any) -> list[str]:
    stops = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise ConfigError(f"stop = {_short(stops)} must be a text, or a list of texts")
    return stops


def _chat_scores(body: Body) -> int | None:
    wanted = body.get("logprobs")
    if wanted is not None and not isinstance(wanted, bool):
        raise ConfigError(
            f"logprobs = {_short(wanted)} must be true or false; top_logprobs says how many"
        )
    scores = _number(body, "top_logprobs", int, 0, most=_MOST_SCORES)
    if scores and not wanted:
        raise ConfigError(f"top_logprobs = {scores} needs logprobs = true")
    return scores if wanted else None


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
