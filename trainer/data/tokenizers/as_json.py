"""A rank file as the files that transformers reads: tokenizer.json and tokenizer_config.json.

In both formats, the pair whose merged token has the lowest rank is merged first. A rank file only lists merged tokens,
so every pair of tokens that forms a token becomes a merge. A piece of text that is a token itself is one token.
"""

from collections.abc import Iterator
from typing import Any

from trainer.data.tokenizers.tiktoken_format import SPECIAL_TOKENS, SPLIT_PATTERN, read_ranks


def json_files(file: str, longest: int) -> dict[str, Any]:
    """Return the files by name: tokenizer.json as text, tokenizer_config.json as a dict. Neither file is written.

    Args:
        file: The rank file.
        longest: Most tokens of a text of the model.

    Raises:
        ConfigError: The file is no rank file.
    """
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        pre_tokenizers,
        processors,
    )

    ranks = read_ranks(file, file)
    spelling = {byte: char for char, byte in byte_of_char().items()}
    text_of = {token: "".join(spelling[byte] for byte in token) for token in ranks}
    merges = [(text_of[left], text_of[right]) for left, right in _merges(ranks)]
    vocab = {text_of[token]: rank for token, rank in ranks.items()}
    made = Tokenizer(models.BPE(vocab, merges, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in SPECIAL_TOKENS]
    )
    begin, end = SPECIAL_TOKENS[:2]
    made.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A",
        pair=f"{begin} $A {begin}:1 $B:1",
        special_tokens=[(begin, len(ranks))],
    )
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": begin,
        "eos_token": end,
        "model_max_length": longest,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    return {"tokenizer.json": made.to_str(), "tokenizer_config.json": settings}


def _merges(ranks: dict[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """Yield every pair of tokens that forms a token, in the order of the ranks of the formed tokens."""
    for token in sorted(ranks, key=ranks.__getitem__):
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [(left, right) for left, right in pairs if left in ranks and right in ranks]
        yield from sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))


def byte_of_char() -> dict[str, int]:
    """Return the byte that each of GPT-2's 256 characters spells.

    A printable character of Latin-1 spells its own code. The characters from 256 on spell the other bytes, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in printable]
    return {chr(value): value for value in printable} | {
        chr(256 + i): value for i, value in enumerate(others)
    }
