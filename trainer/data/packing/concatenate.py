"""Documents one after another; one that does not fit continues in the next sequence. Torch-free."""

from collections.abc import Mapping, Sequence

from trainer.config.errors import ConfigError
from trainer.data.order.streams import ItemStream, StreamState
from trainer.data.packing.sequence import PackedSequence, Sample, sample_of, together
from trainer.data.token_files.reader import TokenFiles


class DocumentStream(ItemStream):
    """One numbered, endless stream of packed sequences over some of the documents.

    documents: their numbers in the source, in the order in which they were assigned.
    """

    ITEM = "document"

    def __init__(self, source: TokenFiles, documents: Sequence[int], *, stream: int, seq_len: int, seed: int) -> None:
        if seq_len < 1:
            raise ValueError(f"seq_len = {seq_len} must be at least 1")
        self._source, self._seq_len = source, seq_len
        super().__init__(documents, stream=stream, seed=seed)

    @property
    def state(self) -> StreamState:
        """The position: epoch, document in the epoch's order, tokens already used of it, sequences given so far."""
        return {"epoch": self._epoch, "document": self._place, "token": self._token, "samples": self.samples}

    def restart(self, state: Mapping[str, int]) -> None:
        """Resume from `state`, or from the beginning if it is empty."""
        super().restart(state)
        self._token = int(state.get("token", 0))
        self._sample: Sample | None = None  # the current document, read when it is needed

    def next_sample(self) -> PackedSequence:
        """Return the next packed sequence; ConfigError if no document of this stream holds a token."""
        barren, parts, missing = 0, [], self._seq_len
        while missing:
            if self._sample is None:
                self._sample = sample_of(self._source[self._item_at(self._place)])
            tokens, labels, _ = self._sample
            here = slice(self._token, self._token + missing)
            parts.append(Sample(tokens[here], labels[here]))
            taken = len(parts[-1].tokens)
            self._token, missing = self._token + taken, missing - taken
            barren = 0 if taken else barren + 1
            if barren == 2 * len(self.items):  # an epoch may end, and the next begin, with all the empty ones
                raise ConfigError(
                    f"none of the {len(self.items)} documents of data stream {self._stream} holds text; leave out "
                    "documents without text"
                )
            if not taken:
                parts.pop()
            if self._token >= len(tokens):
                self.advance()
        self.samples += 1
        return together(parts, self._seq_len)

    def advance(self) -> None:
        """Go to the first token of the next document."""
        self._sample, self._token = None, 0
        super().advance()
