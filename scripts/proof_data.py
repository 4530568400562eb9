"""Data of `proof.py`: made-up documents with needles and questions, and a tokenizer that has each of their words.

    The magic number of Oslo is 4729183. The old baker sold the tall clock near the mill at night. ...
    What is the magic number of Oslo? The magic number of Oslo is 4729183. ...
                                                                 ^ learned: the numbers behind questions alone

The sentences come from `lct evaluate --tasks needle`. A document has many facts and questions, because a model
learns to look back only from many answers in a step.
"""

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from random import Random

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from trainer.data.evaluation import CITIES, sentence

PLACES = (
    *CITIES,
    *map(
        "".join,
        product(
            ("Bal", "Cor", "Den", "Fal", "Gar", "Hol", "Kar", "Mor", "Nor", "Sel"),
            ("ia", "ow", "ham", "ton", "ville", "berg", "ford", "mouth"),
        ),
    ),
)
END = "<|end|>"
# A number is cut into pairs of digits, so that numbers have few different tokens, and training sees each often.
_SPLIT = r" ?\p{L}+| ?\p{N}{1,2}| ?[^\s\p{L}\p{N}]+|\s+"
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
# Tokens of a sentence (about), of a fact, and of a question with its answer.
_SENTENCE, _FACT, _QUESTION = 14, 11, 19
_FACTS = (1, 1, 2, 4, 8, 12)  # numbers of facts of a document of up to 2,048 tokens


def write_tokenizer(folder: Path) -> None:
    """Write tokenizer.json of a byte-level BPE, its settings, and a template that joins messages without marks.

    Args:
        folder: The folder of the files.
    """
    random = Random("tokenizer")
    words = [sentence(random) for _ in range(4000)] + [_question(place) for place in PLACES] * 20
    numbers = [f" {i}" for i in range(10, 100)] + [f"{i:02}" for i in range(100)] + list("0123456789")
    bpe = Tokenizer(models.BPE())
    pieces = pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated")
    bpe.pre_tokenizer = pre_tokenizers.Sequence([pieces, pre_tokenizers.ByteLevel(False, use_regex=False)])
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        [*words, *numbers * 3],
        trainers.BpeTrainer(vocab_size=8192, initial_alphabet=alphabet, special_tokens=[END], show_progress=False),
    )
    folder.mkdir(parents=True, exist_ok=True)
    bpe.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def _question(place: str) -> str:
    return f" What is the magic number of {place}? The magic number of {place} is"


def document(random: Random, tokens: int, facts: int) -> list[dict[str, str]]:
    """Return the messages of a document, with questions for each fact at random places after the fact.

    There is one question for a fact, and one more for each 8,192 tokens of a longer document: a model answers a second
    question from the first answer, which is nearer than the fact.

    Args:
        random: The source of random numbers.
        tokens: Number of tokens, about.
        facts: Number of facts.
    """
    times = 1 + tokens // 8192
    pieces: list[tuple[float, str, str]] = []  # place, text, answer
    for name in random.sample(PLACES, facts):
        number = random.randrange(10**6, 10**7)
        place = random.random()
        pieces.append((place, f" The magic number of {name} is {number}.", ""))
        pieces += [(random.uniform(place, 1), _question(name), f" {number}") for _ in range(times)]
    for _ in range((tokens - facts * (_FACT + times * _QUESTION)) // _SENTENCE):
        pieces.append((random.random(), sentence(random), ""))
    messages = []
    text = ""
    for _, words, answer in sorted(pieces):
        text += words
        if answer:
            messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
            text = "."
    return messages


def documents(seed: str, shortest: int, longest: int, tokens: int) -> Iterator[list[dict[str, str]]]:
    """Yield documents of random lengths. Longer documents are rarer.

    A document has one to twelve facts if there is room, a longer one up to four times this number. (`lct evaluate` asks
    for one fact among many sentences.)

    Args:
        seed: The seed.
        shortest: Number of tokens of the shortest documents; other lengths are doubles of it.
        longest: Largest number of tokens of a document.
        tokens: Number of tokens of all documents together, about.
    """
    random = Random(seed)
    made = 0
    lengths = [shortest << i for i in range(20) if shortest << i <= longest]
    while made < tokens:
        (length,) = random.choices(lengths, [n**-0.5 for n in lengths])
        room = int(length * random.uniform(0.7, 0.95))
        most = max(1, room // (_FACT + _QUESTION))
        yield document(random, room, min(most, random.choice(_FACTS) * min(4, 1 + length // 4096)))
        made += length


def write_documents(file: Path, seed: str, shortest: int, longest: int, tokens: int) -> None:
    """Write `documents` as lines of JSON for `training.dataset = "chat"`.

    Args:
        file: The file.
        seed: See `documents`.
        shortest: See `documents`.
        longest: See `documents`.
        tokens: See `documents`.
    """
    with file.open("w") as lines:
        for messages in documents(seed, shortest, longest, tokens):
            lines.write(json.dumps({"messages": messages}) + "\n")
