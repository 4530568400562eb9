"""Packing of whole documents or conversations, by best fit or one a sequence. Torch-free.

A sequence begins with the document that waits longest. Then it takes the longest waiting document that fits, until none
fits. The rest is padding: a document of its own, without labels.

waiting   5 2 7 3 4 | ...     seq_len = 10; in the order of reading
sequence  5 4 + 1 padding  |  2 7 + 1  |  3 ...

A document of more than `seq_len` tokens is cut into pieces of `seq_len`, which are sequences by themselves. Its last
piece waits as a document does. Labels are made before the cut, so that none is lost.

Waiting documents are of one epoch, at most WINDOW places of its order, and about TOKENS sequences long. The state lists
them, so that a resumed run continues with the same sequences.
"""

from bisect import bisect_right, insort

import numpy as np

from trainer.config.errors import ConfigError
from trainer.data.order.streams import ItemStream, Order, StreamState
from trainer.data.packing import (
    IGNORE_INDEX,
    PackedSequence,
    Sample,
    no_text,
    sample_of,
    together,
)
from trainer.data.sources.records import Tally
from trainer.data.token_files.format import Pairs, TokenFiles

WINDOW = 1024
TOKENS = 8


class TooLong:
    """How conversations longer than a sequence are used: not at all, or up to the end of their last answer that fits.

    A document of several parts, such as a pair, is never cut. It is also left out if one of its parts has no label.

    Args:
        drops: Whether conversations longer than a sequence are left out.
        kind: The name of the documents, for the log.
    """

    def __init__(self, *, drops: bool = False, kind: str = "conversations") -> None:
        self._drops = drops
        self.left_out = Tally(kind if drops else f"ends of {kind}")

    def pieces(self, sample: Sample, seq_len: int) -> list[Sample]:
        """Return the used part of a conversation as a list of one sample; an empty list if no label is used.

        A conversation longer than a sequence is counted in `left_out`. It is dropped, or cut after its last answer
        that fits. A pair is never cut, and is dropped if one part has no label.

        Args:
            sample: The conversation.
            seq_len: Tokens of a sequence.
        """
        tokens, labels, lengths = sample
        learned = labels != IGNORE_INDEX
        kept = len(tokens)
        if kept > seq_len:
            ends = np.flatnonzero(learned[:seq_len] & ~learned[1 : seq_len + 1])
            kept = 0 if self._drops or not len(ends) else int(ends[-1]) + 1
            self.left_out.count(
                f"{len(tokens):,} tokens, and a sequence has {seq_len:,}; {kept:,} are used"
            )
        if lengths:
            parts = np.split(learned, np.cumsum(lengths)[:-1])
            return [sample] if kept and all(part.any() for part in parts) else []
        return [Sample(tokens[:kept], labels[:kept])] if learned[:kept].any() else []


class WholeStream(ItemStream):
    """One numbered, endless stream of packed sequences over some of the documents; see `DocumentStream`.

    Each epoch has every document once.

    Args:
        source: All documents; each item of `order` is the index of a document.
        order: The documents of the stream, in the order of each epoch.
        seq_len: Tokens of a sequence.
        alone: Whether each document has a sequence of its own.
        conversations: How documents longer than a sequence are used; None: they are cut into pieces.
    """

    ITEM = "document"

    def __init__(
        self,
        source: TokenFiles | Pairs,
        order: Order,
        *,
        seq_len: int,
        alone: bool = False,
        conversations: TooLong | None = None,
    ) -> None:
        self._source = source
        self._seq_len = seq_len
        self._alone = alone
        self._conversations = conversations
        self._enough = 1 if alone else TOKENS * seq_len
        super().__init__(order)

    @property
    def state(self) -> StreamState:
        """The position: epoch, place in its order, samples so far, waiting documents and pieces.

        "waiting" has the places of waiting documents in the epoch's order, ascending. "pieces" counts the whole pieces
        left of the document before the current place; its last piece may already be in a sequence.
        """
        return super().state | {"waiting": [*self._waiting], "pieces": self._whole_left}

    @property
    def oldest(self) -> int:
        """Place in the order of the oldest document that still has unused tokens."""
        return min(next(iter(self._waiting), self._place), self._place - bool(self._whole_left))

    @property
    def passes(self) -> float:
        """Passes over the documents so far; a waiting document does not count."""
        return self.order.passes(self._epoch, self._place - len(self._waiting))

    def restart(self, state: StreamState) -> None:
        """Resume from a position. The next sample reads the waiting documents again.

        Args:
            state: The position; empty for the beginning.
        """
        super().restart(state)
        self._whole_left = int(state.get("pieces", 0))
        # by place, ascending; None: not read yet
        self._waiting: dict[int, Sample | None] = dict.fromkeys(state.get("waiting", ()))
        # (tokens, -place) of waiting documents, ascending
        self._lengths: list[tuple[int, int]] | None = None
        self._tokens = 0
        self._whole: list[Sample] = []
        """Whole pieces of the document read last; the last `_whole_left` of them are still to be returned."""

    def next_sample(self) -> PackedSequence:
        """Return the next packed sequence. Documents are read as needed; at the end of an epoch the next one begins.

        Raises:
            ConfigError: No document of this stream has a label within a sequence.
        """
        epoch = self._epoch
        while not self._fill():
            if self._epoch > epoch:
                raise ConfigError(self._nothing())
            self._next_epoch()
        self.samples += 1
        chosen = self._chosen()
        if not (self._waiting or self._whole_left) and self._place == len(self.order):
            self._next_epoch()
        return together(chosen, self._seq_len)

    def _chosen(self) -> list[Sample]:
        if self._whole_left:
            self._whole_left -= 1
            return [self._whole[-1 - self._whole_left]]
        chosen = [self._take(next(iter(self._waiting)))]
        missing = self._seq_len - len(chosen[0].tokens)
        while (
            self._fill()
            and not self._alone
            and (fitting := bisect_right(self._lengths, (missing, 1)))
        ):
            chosen.append(self._take(-self._lengths[fitting - 1][1]))
            missing -= len(chosen[-1].tokens)
        return chosen

    def _fill(self) -> bool:
        """Read documents until enough tokens wait. Return whether a piece is left: False only at the end of the epoch.

        It stops early at the end of the order, when whole pieces of a document are left, or if the oldest waiting
        document is WINDOW places back.
        """
        if self._lengths is None:  # after a restart from a saved state
            self._lengths = []
            left = self._whole_left
            for place in list(self._waiting):
                self._read(place)
            if left and self._place - 1 not in self._waiting:
                self._whole = self._pieces(self._place - 1)[:-1]
            self._whole_left = min(
                left, len(self._whole)
            )  # fewer if the documents have changed
        while (
            self._place < len(self.order)
            and self._tokens < self._enough
            and not self._whole_left
            and self._place - next(iter(self._waiting), self._place) < WINDOW
        ):
            self._read(self._place)
            self._place += 1
        return bool(self._waiting or self._whole_left)

    def _pieces(self, place: int) -> list[Sample]:
        sample = sample_of(self._source[self.order.item(self._epoch, place)])
        tokens, labels, _ = sample
        seq_len = self._seq_len
        if self._conversations is not None:
            return self._conversations.pieces(sample, seq_len)
        # The last token has no label; a piece of it alone would teach nothing.
        starts = range(0, len(tokens) - 1, seq_len)
        return [
            Sample(tokens[start : start + seq_len], labels[start : start + seq_len])
            for start in starts
        ]

    def _nothing(self) -> str:
        """Return the message for a stream whose documents have no piece."""
        number = len(self.order)
        stream = self.order.stream
        if self._conversations is None:
            return no_text(number, stream)
        return (
            f"the {number} conversations of data stream {stream} have no answer within {self._seq_len} tokens that may "
            "be used (chat.too_long); raise the sequence length or give more data"
        )

    def _read(self, place: int) -> None:
        """Read the document at a place in the epoch's order, and add its last piece to the waiting ones.

        The pieces before, of `seq_len` tokens each, become `_whole`, which had no pieces left. Each becomes a sequence
        by itself. A document without pieces, such as one without labels, does not wait.
        """
        pieces = self._pieces(place)
        self._whole = pieces[:-1]
        self._whole_left = len(self._whole)
        if not pieces:
            self._waiting.pop(place, None)
            return
        self._waiting[place] = last = pieces[-1]
        insort(self._lengths, (len(last.tokens), -place))
        self._tokens += len(last.tokens)

    def _take(self, place: int) -> Sample:
        sample = self._waiting.pop(place)
        self._tokens -= len(sample.tokens)
        del self._lengths[bisect_right(self._lengths, (len(sample.tokens), -place)) - 1]
        return sample

    def _next_epoch(self) -> None:
        self._epoch += 1
        self._place = 0
