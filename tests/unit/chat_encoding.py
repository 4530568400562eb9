"""Conversations that tests read and encode."""

import json

import pytest

from trainer.config.errors import ConfigError
from trainer.data.packing import IGNORE_INDEX, Sample, sample_of
from trainer.data.sources.conversations import conversation
from trainer.data.sources.records import BadRecord
from trainer.data.tokenizers.conversation_encoder import ConversationEncoder
from trainer.data.tokenizers.tokenizer import Tokenizer

SPECIAL = {"bos_token": "<|begin|>", "eos_token": "<|eos|>"}
TURNS = [
    {"role": "user", "content": "two and three?"},
    {"role": "assistant", "content": "five"},
    {"role": "user", "content": "sure?"},
    {"role": "assistant", "content": "yes, the quick fox\n"},
]


def read(line: object, where: str = "a.jsonl, line 1") -> dict:
    content = line if isinstance(line, bytes) else json.dumps(line).encode()
    result = conversation(content, lambda: where)
    if isinstance(result, BadRecord):
        raise result
    return result


def refusal(call, *args) -> str:
    with pytest.raises(ConfigError) as error:
        call(*args)
    assert "\n" not in str(error.value)
    return str(error.value)


def sampled(ours: ConversationEncoder, messages: dict) -> Sample:
    return sample_of(ours.encode(messages))


def learnt(sample, tokenizer: Tokenizer) -> str:
    return tokenizer.decode(sample.labels[sample.labels != IGNORE_INDEX].tolist())


CALL = {"id": "1", "function": {"name": "add", "arguments": {"a": 2, "to": "thrée", "more": [True, None]}}}
CALLING = [
    TURNS[0],
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": '{"sum": 5}'},
    {"role": "assistant", "content": "five"},
]
