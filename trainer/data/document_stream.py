"""Packing of documents one after another: a document that does not fit continues in the next sequence. Torch-free."""

from trainer.config.errors import ConfigError
from trainer.data.order.streams import ItemStream, Order, StreamState
from trainer.data.packing import PackedSequence, Sample, no_text, sample_of, together
from trainer.data.token_files.format import TokenFiles


class DocumentStream(ItemStream):
    """One numbered, endless stream of packed sequences over some of the documents.

    Args:
        source: All documents; each item of `order` is the index of a document.
        order: The documents of the stream, in the order of each epoch.
        seq_len: Tokens of a sequence.

    Raises:
        ValueError: seq_len is below 1.
    """

    ITEM = "document"

    def __init__(self, source: TokenFiles, order: Order, *, seq_len: int) -> None:
        if seq_len < 1:
            raise ValueError(f"seq_len = {seq_len} must be at least 1")
        self._source, self._seq_len = source, seq_len
        super().__init__(order)

    @property
    def state(self) -> StreamState:
        """The position: epoch, document in the epoch's order, its used tokens, sequences so far."""
        return super().state | {"token": self._token}

    def restart(self, state: StreamState) -> None:
        """Resume from a position.

        Args:
            state: The position; empty for the beginning.
        """
        super().restart(state)
        self._token = int(state.get("token", 0))
        self._sample: Sample | None = None  # the current document, read when it is needed

    def next_sample(self) -> PackedSequence:
        """Return the next packed sequence. The stream has no end: a new epoch follows.

        Raises:
            ConfigError: No document of this stream has a token.
        """
        barren = 0
        parts = []
        missing = self._seq_len
        while missing:
            if self._sample is None:
                self._sample = sample_of(
                    self._source[self.order.item(self._epoch, self._place)]
                )
            tokens, labels, _ = self._sample
            here = slice(self._token, self._token + missing)
            part = Sample(tokens[here], labels[here])
            taken = len(part.tokens)
            self._token += taken
            missing -= taken
            barren = 0 if taken else barren + 1
            # an epoch may end with empty documents, and the next one may begin with them
            if barren == 2 * len(self.order):
                raise ConfigError(no_text(len(self.order), self.order.stream))
            if taken:
                parts.append(part)
            if self._token >= len(tokens):
                self.advance()
        self.samples += 1
        return together(parts, self._seq_len)

    def advance(self) -> None:
        """Go to the first token of the next document."""
        self._sample, self._token = None, 0
        super().advance()
