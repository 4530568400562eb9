"""The chat templates that TRL ships, and messages for them."""

import re
from datetime import date
from importlib.util import find_spec
from pathlib import Path

from trainer.config.data import Chat
from trainer.data.tokenizers.chat_template import ChatTemplate

FOLDER = Path(next(iter(find_spec("trl").submodule_search_locations))) / "chat_templates"
PUBLISHED = {file.stem: file.read_text() for file in sorted(FOLDER.glob("*.jinja"))}
OF_TEXT = [name for name in PUBLISHED if not name.endswith("_training")]
# ruff: noqa: RUF001 - DeepSeek's names have a wide bar
# Names of special tokens, as the templates write them.
NAMES = re.compile(
    r"<\|[^|<>{}\s]+\|>|<｜[^｜<>]+｜>|<[a-z]+_of_[a-z]+>|</?s>|<bos>|<eos>|<\|?turn\|?>|<\|?tool_response\|?>"
)
BEGIN, END = "<|begin|>", "<|eos|>"
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "the weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "where"}}},
    },
}


def user(content: str) -> dict:
    return {"role": "user", "content": content}


def answer(content: str, *calls: str, reasoning: str = "") -> dict:
    message = {"role": "assistant", "content": content}
    if reasoning:
        message |= {"reasoning_content": reasoning, "thinking": reasoning}
    if calls:
        message["tool_calls"] = [
            {"id": f"call{i:05d}", "type": "function", "function": {"name": "get_weather", "arguments": {"city": city}}}
            for i, city in enumerate(calls)
        ]
    return message


def tool(content: str, number: int = 0) -> dict:
    return {"role": "tool", "name": "get_weather", "tool_call_id": f"call{number:05d}", "content": content}


def template(name: str) -> ChatTemplate:
    special = {"bos_token": BEGIN, "eos_token": END}
    return ChatTemplate(PUBLISHED[name], name, special, Chat(date=date.today().isoformat()), special_names())


def special_names() -> list[str]:
    return sorted(set().union(*(NAMES.findall(text) for text in PUBLISHED.values())) | {BEGIN, END})
