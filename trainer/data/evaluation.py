"""Sequences that a trained model is measured on: the beginnings of long documents, and needles in a haystack.

A needle is one sentence to remember in a text about other things, with a question about it at the end.

    <begin> haystack ... The magic number of Oslo is 4729183. ... haystack  What is the magic number of Oslo?
    The magic number of Oslo is 4729183
                                ^ the answer, whose tokens alone have labels

The text is made by a generator from a seed, and is no text of a data set. After Kamradt's "Needle in a Haystack" (2023)
and the retrieval tasks of RULER (arXiv 2404.06654). Torch-free.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from random import Random

import numpy as np

from trainer.config.errors import ConfigError
from trainer.data.packing import IGNORE_INDEX, PackedSequence, Sample, sample_of, together
from trainer.data.tokenizers.tokenizer import Encoded, Tokenizer

CITIES = (
    "Oslo",
    "Lima",
    "Cairo",
    "Kyoto",
    "Quito",
    "Turin",
    "Porto",
    "Dakar",
    "Hanoi",
    "Perth",
    "Riga",
    "Seoul",
    "Lyon",
    "Bergen",
    "Havana",
    "Nairobi",
    "Toronto",
    "Valencia",
    "Krakow",
    "Santiago",
)
_KINDS = (
    "old",
    "quiet",
    "young",
    "tall",
    "careful",
    "cheerful",
    "tired",
    "clever",
    "patient",
    "famous",
)
_PEOPLE = (
    "baker",
    "sailor",
    "teacher",
    "gardener",
    "painter",
    "farmer",
    "doctor",
    "singer",
    "tailor",
    "miller",
)
_DEEDS = (
    "watched",
    "carried",
    "painted",
    "found",
    "sold",
    "repaired",
    "hid",
    "borrowed",
    "praised",
    "remembered",
)
_THINGS = (
    "lantern",
    "boat",
    "letter",
    "basket",
    "clock",
    "table",
    "coat",
    "wagon",
    "mirror",
    "kettle",
)
_PLACES = (
    "river",
    "market",
    "bridge",
    "orchard",
    "harbour",
    "forest",
    "mill",
    "garden",
    "castle",
    "meadow",
)
_TIMES = (
    "in the morning",
    "after the rain",
    "before noon",
    "at night",
    "during the winter",
    "without a word",
)


def long_documents(
    documents: Iterable[Encoded], seq_len: int, most: int
) -> Iterator[PackedSequence]:
    """Yield the first `seq_len` tokens of documents that have more, in their order; at most `most` of them.

    Every token has a label.

    Raises:
        ConfigError: no document has more tokens.
    """
    longest = found = 0
    for document in documents:
        tokens, labels, _ = sample_of(document)
        longest = max(longest, len(tokens))
        if len(tokens) <= seq_len:
            continue
        yield together([Sample(tokens[:seq_len], labels[:seq_len])], seq_len)
        found += 1
        if found == most:
            return
    if not found:
        raise ConfigError(
            f"no document has more than --seq-len {seq_len} tokens (the longest has {longest:,}); use shorter "
            "sequences, or name longer documents with --dataset and --dataset-path"
        )


@dataclass(frozen=True)
class NeedlePrompt:
    """A prompt with its answer.

    depth: place of the needle, from 0 at the start of the text to 100 before the question; answer_tokens: its labels.
    """

    depth: float
    sequence: PackedSequence
    answer_tokens: int


def needle_prompts(
    tokenizer: Tokenizer, length: int, depths: Sequence[float], samples: int, seed: int
) -> list[NeedlePrompt]:
    """Return `samples` prompts of `length` tokens for each depth, one sample after another.

    The prompts of a sample differ in the place of the needle alone. The last token of the answer is no part of the
    sequence, but the last label.

    Raises:
        ConfigError: the length has no room for needle and question.
    """
    randoms = (Random(f"needle {seed} {length} {sample}") for sample in range(samples))
    return [
        prompt
        for random in randoms
        for prompt in _of_one_text(tokenizer, length, depths, random)
    ]


def _of_one_text(
    tokenizer: Tokenizer, length: int, depths: Sequence[float], random: Random
) -> Iterator[NeedlePrompt]:
    city = random.choice(CITIES)
    number = random.randrange(10**6, 10**7)
    begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    fact = tokenizer.encode(f" The magic number of {city} is")
    # encoded alone, so that needle and answer have the same tokens
    answer = tokenizer.encode(f" {number}")
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
        parts = (begin, *text[:place], needle, *text[place:], question, answer)
        ids = np.fromiter(chain(*parts), np.int64)
        labels = np.full(length, IGNORE_INDEX)
        labels[-len(answer) :] = answer
        yield NeedlePrompt(depth, together([Sample(ids[:-1], labels)], length), len(answer))


def _haystack(tokenizer: Tokenizer, random: Random, room: int) -> list[list[int]]:
    """Return sentences that have `room` tokens together; the first one may lack its beginning."""
    sentences: list[list[int]] = []
    while room > 0:
        sentences.append(tokenizer.encode(sentence(random)))
        room -= len(sentences[-1])
    # The last one has -room tokens too many. The first one is cut instead, so that the text ends with a full stop.
    too_many = -room
    first = sentences[0]
    if too_many >= len(first):
        sentences[-1] = sentences[-1][too_many:]
    else:
        sentences[0] = first[too_many:]
    return sentences


def sentence(random: Random) -> str:
    """Return a made-up sentence, with the blank before it."""
    words = (
        random.choice(of) for of in (_KINDS, _PEOPLE, _DEEDS, _KINDS, _THINGS, _PLACES, _TIMES)
    )
    return " The {} {} {} the {} {} near the {} {}.".format(*words)
