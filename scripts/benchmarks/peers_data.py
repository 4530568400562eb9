"""What both sides of the benchmark against peers train on: conversations, preference pairs, and the order of steps.

The trainer packs and shuffles conversations by itself. `order` reads its batches, and finds each document among the
conversations by the token ids that transformers' `apply_chat_template` makes. So the peers get the same conversations
in each step, and a difference of templates ends the benchmark.
"""

import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from scripts.tiny_model import END
from trainer.config.loader import parse_command_line
from trainer.data.job_data import open_training_data
from trainer.data.loader import BatchLoader
from trainer.families.registry import from_path

LR, BETAS, EPS = 1e-4, (0.9, 0.95), 1e-8
MAX_NORM = 1.0
DPO_BETA = 0.1
_FURTHER = 7
"""A rejected answer is the answer of a conversation this many lines further on, or of the next one that differs."""


def conversations(file: Path) -> list[list[dict[str, str]]]:
    """Return the messages of each conversation.

    Args:
        file: JSON lines with `messages`.
    """
    return [json.loads(line)["messages"] for line in file.read_text(encoding="utf-8").splitlines()]


def preference_pairs(chats: Sequence[list[dict[str, str]]]) -> list[dict[str, list[dict[str, str]]]]:
    """Return a pair for each conversation: its answer is preferred to the answer of another conversation.

    Args:
        chats: Messages of each conversation, the last one an answer.
    """
    pairs = []
    for number, chat in enumerate(chats):
        others = (chats[(number + _FURTHER + i) % len(chats)][-1] for i in range(len(chats)))
        rejected = next(other for other in others if other["content"] != chat[-1]["content"])
        pairs.append({"prompt": chat[:-1], "chosen": chat[-1:], "rejected": [rejected]})
    return pairs


def token_ids(tokenizer: Any, messages: list[dict[str, str]], **options: Any) -> list[int]:
    """Return the token ids of a conversation, as transformers makes them.

    Args:
        tokenizer: transformers' tokenizer.
        messages: The conversation.
        **options: Options of `apply_chat_template`.
    """
    return list(tokenizer.apply_chat_template(messages, return_dict=False, **options))


def labelled(tokenizer: Any, messages: list[dict[str, str]]) -> dict[str, list[int]]:
    """Return token ids and hand-made labels: the last answer and its end token are learned, all else is -100.

    Args:
        tokenizer: transformers' tokenizer.
        messages: The conversation.
    """
    ids = token_ids(tokenizer, messages)
    start = len(token_ids(tokenizer, messages[:-1], add_generation_prompt=True))
    stop = len(ids) - ids[::-1].index(tokenizer.convert_tokens_to_ids(END))
    return {"input_ids": ids, "labels": [id if start <= at < stop else -100 for at, id in enumerate(ids)]}


def order(arguments: Sequence[str], data: Path, tokenizer: Any, steps: int) -> list[list[int]]:
    """Return the numbers of the conversations, or of the pairs, of each step of `lct train`.

    Args:
        arguments: Arguments of `lct train` for one rank.
        data: The conversations, or the pairs.
        tokenizer: transformers' tokenizer.
        steps: Number of steps.

    Raises:
        ValueError: The token ids of a document are not transformers' ids of any conversation.
    """
    config = from_path(parse_command_line(arguments, reading=True).config)
    loader = BatchLoader(open_training_data(config), config.training, dp_rank=0, dp_degree=1)
    lines = [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()]
    sides = [
        [line["messages"]] if "messages" in line else [line["prompt"] + line[side] for side in ("chosen", "rejected")]
        for line in lines
    ]
    numbers = {tuple(_ids(tokenizer, chat) for chat in chats): number for number, chats in enumerate(sides)}
    width = len(sides[0])
    numbers_of_steps = []
    for batch in islice(iter(loader), steps):
        documents = [ids for row in range(len(batch["tokens"])) for ids in _documents(batch, row)]
        keys = [tuple(documents[at : at + width]) for at in range(0, len(documents), width)]
        unknown = [key for key in keys if key not in numbers]
        if unknown:
            raise ValueError(f"transformers' template makes other ids than {unknown[0][0]}; compare the templates")
        numbers_of_steps.append([numbers[key] for key in keys])
    return numbers_of_steps


def _ids(tokenizer: Any, messages: list[dict[str, str]]) -> tuple[int, ...]:
    return tuple(token_ids(tokenizer, messages))


def _documents(batch: dict[str, Any], row: int) -> list[tuple[int, ...]]:
    """Return the ids of each document of a row; the padding at its end, which has no labels, is left out."""
    tokens, labels, documents = (batch[name][row] for name in ("tokens", "labels", "document_ids"))
    inside = [documents == number for number in documents.unique().tolist()]
    return [tuple(tokens[mask].tolist()) for mask in inside if (labels[mask] >= 0).any()]
