"""Train a byte-level BPE with Llama 3's split pattern and write it in tiktoken's rank format.

    lct tokenizer train --dataset text --path 'books/*.txt' --vocab-size 32000 --output my.tiktoken
    lct tokenizer train --output trainer/assets/python_4k.tiktoken

The same text gives the same file, byte for byte.
"""

import base64
import sys
from collections.abc import Iterable
from itertools import count
from pathlib import Path

from trainer.commands.options import Parser, number
from trainer.config.errors import ConfigError
from trainer.data.sources.registry import DATASETS, DataSettings, all_documents, check_source
from trainer.data.tokenizers.as_json import byte_of_char
from trainer.data.tokenizers.tiktoken_format import SPLIT_PATTERN, split_long_runs

_REFUSED = {
    "chat": "conversations, whose template needs a tokenizer; use text or jsonl",
    "tokens": "the token ids of a tokenizer; use the text that they were made of",
}
"""Data sets without a text of their own, with the reason and the remedy."""


def train(documents: Iterable[str], vocab_size: int) -> list[bytes]:
    """Train a byte-level BPE.

    Args:
        documents: The texts.
        vocab_size: Number of tokens.

    Returns:
        The tokens, by rank: the 256 bytes first, then one per merge.

    Raises:
        ConfigError: `vocab_size` is below 256, or the text has too few different pairs to reach it.
    """
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    if vocab_size < 256:
        raise ConfigError(
            f"--vocab-size {vocab_size} must be at least 256, one token for each byte"
        )
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    # Cut long runs as the tokenizer does, so that the regex does not overflow.
    bpe.train_from_iterator(
        (piece for document in documents for piece in split_long_runs(document)), trainer
    )
    vocab = bpe.get_vocab()
    if len(vocab) != vocab_size:
        raise ConfigError(
            f"--vocab-size {vocab_size} needs more text: this gives {len(vocab)} tokens at most"
        )
    as_byte = byte_of_char()
    return [
        bytes(as_byte[char] for char in token) for token in sorted(vocab, key=vocab.__getitem__)
    ]


def main(argv: list[str]) -> int:
    """Train a tokenizer, and write its file.

    Args:
        argv: The words of the command line, without the command.

    Returns:
        The exit code.

    Raises:
        ConfigError: The data set has no text, or too little.
    """
    parser = Parser("tokenizer", __doc__)
    add = parser.add_argument
    add("action", choices=["train"], help="train a tokenizer on text")
    add("--dataset", default="python_stdlib", help=f"one of {', '.join(DATASETS)}")
    add("--path", help="file, folder or glob, for text and jsonl")
    add(
        "--vocab-size",
        type=number(int),
        default=4096,
        help="tokens without the 256 special ones",
    )
    add("--output", required=True, help="file to write, one `base64 rank` a line")
    args = parser.parse_args(argv)
    if why := _REFUSED.get(args.dataset):
        raise ConfigError(f"--dataset {args.dataset} has {why}")
    settings = DataSettings(args.dataset, args.path)
    check_source(settings)
    numbers = count()
    tokens = train(
        (text for text, _ in zip(all_documents(settings), numbers, strict=False)),
        args.vocab_size,
    )
    output = Path(args.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_bytes(
        b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))
    )
    print(
        f"{output}: {len(tokens)} tokens from {next(numbers)} documents of {args.dataset}\n"
        f"next: lct train --model.tokenizer_path {output}"
    )
    return 0
