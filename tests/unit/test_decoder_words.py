"""A decoder in words names each of its parts, with its numbers."""

import pytest

from tests.hf_families import MODELS
from trainer.families.decoder_words import decoder_words


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("smollm3", "4 layers of width 32, 4 query and 2 key/value heads of 8"),
        ("gemma4", "4 key/value heads of 12, in 2 layers 2 key/value heads of 16"),
        ("qwen3_next", "linear attention with"),
        ("deepseek_v3", "heads, latents of"),
        ("olmoe", "of 6 experts of width 24 a token"),
    ],
)
def test_each_part_is_named(family: str, words: str) -> None:
    assert words in decoder_words(MODELS[family][1])
