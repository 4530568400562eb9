"""Sequences that measure a trained model: the beginnings of long documents, and needles in a haystack. Torch-free.

A needle is one sentence to remember in a text about other things, with a question about it at the end.

    <begin> haystack ... The magic number of Oslo is 4729183. ... haystack  What is the magic number of Oslo?
    The magic number of Oslo is 4729183
                                ^ the answer: only its tokens have labels

A generator makes the text from a seed; it is in no data set. After Kamradt's "Needle in a Haystack" (2023) and the
retrieval tasks of RULER (arXiv 2404.06654). `lct evaluate` uses both kinds.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from random import Random

import numpy as np

from trainer.config.errors import ConfigError
from trainer.data.packing import IGNORE_INDEX, PackedSequence, Sample, sample_of, together
from trainer.data.tokenizers.tokenizer import Encoded, Tokenizer

_WORDS = """\
Oslo, Lima, Cairo, Kyoto, Quito, Turin, Porto, Dakar, Hanoi, Perth, \
Riga, Seoul, Lyon, Bergen, Havana, Nairobi, Toronto, Valencia, Krakow, Santiago.
old, quiet, young, tall, careful, cheerful, tired, clever, patient, famous.
baker, sailor, teacher, gardener, painter, farmer, doctor, singer, tailor, miller.
watched, carried, painted, found, sold, repaired, hid, borrowed, praised, remembered.
lantern, boat, letter, basket, clock, table, coat, wagon, mirror, kettle.
river, market, bridge, orchard, harbour, forest, mill, garden, castle, meadow.
in the morning, after the rain, before noon, at night, during the winter, without a word.
"""
CITIES, _KINDS, _PEOPLE, _DEEDS, _THINGS, _PLACES, _TIMES = (
    line.rstrip(".").split(", ") for line in _WORDS.splitlines()
)


def long_documents(
    documents: Iterable[Encoded], seq_len: int, most: int
) -> Iterator[PackedSequence]:
    """Yield the first `seq_len` tokens of each document that has more tokens, in the order of the documents.

    Every token of a text has a label; in a conversation only answers have labels.

    Args:
        documents: Documents.
        seq_len: Tokens of a sequence.
        most: Largest number of sequences.

    Raises:
        ConfigError: No document has more than `seq_len` tokens.
    """
    longest = number = 0
    for document in documents:
        tokens, labels, _ = sample_of(document)
        longest = max(longest, len(tokens))
        if len(tokens) <= seq_len:
            continue
        yield together([Sample(tokens[:seq_len], labels[:seq_len])], seq_len)
        number += 1
        if number == most:
            return
    if not number:
        raise ConfigError(
            f"no document has more than --seq-len {seq_len} tokens (the longest has {longest:,}); use shorter "
            "sequences, or name longer documents with --dataset and --dataset-path"
        )


@dataclass(frozen=True)
class NeedlePrompt:
    """A prompt with its answer.

    Attributes:
        depth: Place of the needle, from 0 at the start of the text to 100 before the question.
        sequence: The tokens, with labels for the answer.
        answer_tokens: Number of labels.
    """

    depth: float
    sequence: PackedSequence
    answer_tokens: int


def needle_prompts(
    tokenizer: Tokenizer, length: int, depths: Sequence[float], samples: int, seed: int
) -> list[NeedlePrompt]:
    """Return `samples` prompts for each depth, one sample after another.

    The prompts of a sample differ only in the needle's place. The sequence ends before the last
    token of the answer, which is only a label.

    Args:
        tokenizer: The tokenizer of the model.
        length: Tokens of a prompt.
        depths: Places of the needle, in percent.
        samples: Number of texts.
        seed: Seed of the texts.

    Raises:
        ConfigError: The length has no room for needle and question.
    """
    randoms = (Random(f"needle {seed} {length} {sample}") for sample in range(samples))
    return [
        prompt
        for random in randoms
        for prompt in _prompts_of_text(tokenizer, length, depths, random)
    ]


def _prompts_of_text(
    tokenizer: Tokenizer, length: int, depths: Sequence[float], random: Random
) -> Iterator[NeedlePrompt]:
    city = random.choice(CITIES)
    begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    fact = tokenizer.encode(f" The magic number of {city} is")
    # encoded alone, so that needle and answer have the same tokens
    answer = tokenizer.encode(f" {random.randrange(10**6, 10**7)}")
    needle = [*fact, *answer, *tokenizer.encode(".")]
    question = [*tokenizer.encode(f" What is the magic number of {city}?"), *fact]
    room = length + 1 - len(begin) - len(needle) - len(question) - len(answer)
    if room < 1:
        raise ConfigError(
            f"--lengths {length} has no room for a text around needle and question, which have {length + 1 - room} "
            f"tokens; use at least {2 * length - 2 * room}"
        )
    text = _haystack(tokenizer, random, room)
    for depth in depths:
        place = round(depth / 100 * len(text))
        parts = chain(begin, *text[:place], needle, *text[place:], question, answer)
        ids = np.fromiter(parts, np.int64)
        labels = np.full(length, IGNORE_INDEX)
        labels[-len(answer) :] = answer
        yield NeedlePrompt(depth, together([Sample(ids[:-1], labels)], length), len(answer))


def _haystack(tokenizer: Tokenizer, random: Random, room: int) -> list[list[int]]:
    """Return the token ids of sentences, `room` tokens together. The first or last sentence may lack its beginning."""
    sentences = []
    while room > 0:
        sentences.append(tokenizer.encode(sentence(random)))
        room -= len(sentences[-1])
    # The sentences have -room tokens too many. Cut the first one, so that the text ends with a full stop.
    cut = 0 if -room < len(sentences[0]) else -1
    sentences[cut] = sentences[cut][-room:]
    return sentences


def sentence(random: Random) -> str:
    """Return a made-up sentence, with the blank before it.

    Args:
        random: The source of random words.
    """
    words = (
        random.choice(choices)
        for choices in (_KINDS, _PEOPLE, _DEEDS, _KINDS, _THINGS, _PLACES, _TIMES)
    )
    return " The {} {} {} the {} {} near the {} {}.".format(*words)
