"""The beginnings of long documents, a sequence each: a token's position is what the model has seen before it."""

from collections.abc import Iterable, Iterator

from trainer.config.errors import ConfigError
from trainer.data.packing.sequence import PackedSequence, Sample, sample_of, together
from trainer.data.tokenizers.encoders import Encoded


def long_documents(documents: Iterable[Encoded], seq_len: int, most: int) -> Iterator[PackedSequence]:
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
