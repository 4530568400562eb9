"""A copy of a Hugging Face folder with more special tokens: in its tokenizer, and as rows of its embedding and output.

A new row is the mean of the rows of all tokens before, in float64 (Hewitt, 2021, "Initializing new word embeddings"):
a new token is then about as likely as any, and what is likely without it stays so.
"""

import json
import math
import tempfile
from collections.abc import Sequence
from functools import reduce
from pathlib import Path

import torch

from trainer.config.errors import ConfigError
from trainer.hugging_face.config_json import CONFIG_FILE, read_config
from trainer.hugging_face.files import read_folder
from trainer.hugging_face.reader import DTYPES, FLOATS, read_part
from trainer.hugging_face.writer import NewFolder, carry

_EMBEDDING, _OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
_BLOCK = 4096  # rows that are summed at once


def add_tokens(source: Path, output: Path, tokens: Sequence[str]) -> tuple[list[int], int]:
    """Write a copy of the folder, and return the ids of the tokens and the rows of its embedding.

    Spare rows are used first. Others are added up to a multiple of the power of two, at most 128, that divides the
    rows before, so that tensor parallelism still divides them. Each tensor is in memory once.

    Raises:
        ConfigError: a token is there already, is empty or comes twice, or the folder has no embedding or tokenizer.
        OSError: the folder cannot be written.
    """
    found, config = read_folder(source), read_config(source)
    if _EMBEDDING not in found:
        raise ConfigError(f"{source} has no tensor {_EMBEDDING}, so that no rows can be added; name a language model")
    if quantised := next((name for name, stored in found.items() if DTYPES[stored.dtype] not in FLOATS.values()), None):
        raise ConfigError(
            f"{source} has quantised weights, such as {quantised} in {found[quantised].dtype}, to which no rows are "
            f"added; name a folder that a run has exported"
        )
    with tempfile.TemporaryDirectory() as carried:
        carry(source, Path(carried))
        ids = _added_to_tokenizer(Path(carried), source, tokens)
        before = found[_EMBEDDING].shape[0]
        unit = math.gcd(before, 128)
        rows = max(before, -(-(max(ids) + 1) // unit) * unit)
        grown = {name: (rows, *found[name].shape[1:]) for name in (_EMBEDDING, _OUTPUT) if name in found}
        shapes = {name: stored.shape for name, stored in found.items()} | grown
        dtype = reduce(torch.promote_types, (DTYPES[stored.dtype] for stored in found.values()))
        with NewFolder(output, shapes, dtype) as folder:
            for name, stored in found.items():
                tensor = read_part(stored, [0] * len(stored.shape), stored.shape)
                folder.put(name, _with_rows(tensor, rows, ids[0]) if name in grown else tensor)
                del tensor
            folder.finish({CONFIG_FILE: {**config.content, "vocab_size": rows}}, Path(carried))
    return ids, rows


def _with_rows(tensor: torch.Tensor, rows: int, first: int) -> torch.Tensor:
    """Return the rows before `first`, and behind them their mean."""
    sums = sum(block.double().sum(0) for block in tensor[:first].split(_BLOCK))
    longer = (sums / first).to(tensor.dtype).expand(rows, -1).clone()
    longer[:first] = tensor[:first]
    return longer


def _added_to_tokenizer(folder: Path, source: Path, tokens: Sequence[str]) -> list[int]:
    """Add the tokens to the files of a tokenizer, in place, and return their ids, which rise by one."""
    from tokenizers import AddedToken, Tokenizer

    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(f"{source} has no tokenizer.json to which tokens can be added; save its tokenizer there")
    tokenizer = Tokenizer.from_file(str(file))
    for token in tokens:
        if not token.strip() or tokenizer.token_to_id(token) is not None or tokens.count(token) > 1:
            raise ConfigError(
                f"the token {token!r} must be a name that the tokenizer does not have, once; write another, such as "
                "'<|tool|>'"
            )
    added = [AddedToken(token, special=True, normalized=False) for token in tokens]
    tokenizer.add_special_tokens(added)
    tokenizer.save(str(file))
    ids, settings = [tokenizer.token_to_id(token) for token in tokens], folder / "tokenizer_config.json"
    if settings.is_file() and "added_tokens_decoder" in (content := json.loads(settings.read_text(encoding="utf-8"))):
        flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
        content["added_tokens_decoder"] |= {
            str(i): {"content": token} | flags for i, token in zip(ids, tokens, strict=True)
        }
        settings.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return ids
