"""The beginnings of long documents, a sequence each: a token's position is what the model has seen before it."""

from collections.abc import Iterator

from trainer.config.errors import ConfigError
from trainer.data.datasets import DocumentSource, ids_of_document
from trainer.data.packing import PackedSequence, SequenceBuilder
from trainer.data.tokenizer import Tokenizer


def long_documents(source: DocumentSource, tokenizer: Tokenizer, seq_len: int, most: int) -> Iterator[PackedSequence]:
    """Yield the first `seq_len` tokens of documents that have more, in the order of the source; at most `most` of them.

    Every token has a label.

    Raises:
        ConfigError: no document has more tokens.
    """
    longest = found = 0
    for number in range(len(source)):
        document = source[number]
        # No token is shorter than a byte; begin and end.
        if isinstance(document, str) and len(document.encode("utf-8", "replace")) + 2 <= seq_len:
            continue
        ids = ids_of_document(document, tokenizer)
        longest = max(longest, len(ids))
        if len(ids) <= seq_len:
            continue
        builder = SequenceBuilder(seq_len)
        builder.add(ids)
        yield builder.finish()
        found += 1
        if found == most:
            return
    if not found:
        seen = f"the longest has {longest:,}" if longest else "all are much shorter"
        raise ConfigError(
            f"no document has more than --seq-len {seq_len} tokens ({seen}); use shorter sequences, or name longer "
            "documents with --dataset and --dataset-path"
        )
