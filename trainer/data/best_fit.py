"""Whole conversations in sequences of `seq_len` tokens by best fit, none of them cut. Torch-free.

A sequence begins with the oldest conversation that waits. Then it takes the longest one that still fits, until none
does. The rest is padding: a document of its own, without labels.

waiting   5 2 7 3 4 | ...     seq_len = 10; the order in which they were read
sequence  5 4 + 1 padding  |  2 7 + 1  |  3 ...

Those that wait are of one epoch, at most WINDOW places of its order, and about TOKENS sequences long. The state says
which ones wait, so that a resumed run goes on with the same sequences.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Mapping

import numpy as np

from trainer.config.errors import ConfigError
from trainer.data.chat import ConversationEncoder, Sample
from trainer.data.datasets import DocumentSource
from trainer.data.packing import IGNORE_INDEX, PackedSequence
from trainer.data.streams import ItemStream, StreamState

WINDOW = 1024
TOKENS = 8


class ConversationStream(ItemStream):
    """One numbered, endless stream of packed sequences over some of the conversations; see `DocumentStream`.

    Each epoch has every conversation once. One that is longer than a sequence loses its end. It is left out if no
    label remains.
    """

    ITEM = "document"

    def __init__(
        self,
        source: DocumentSource,
        encoder: ConversationEncoder,
        documents: np.ndarray,
        *,
        stream: int,
        seq_len: int,
        seed: int,
    ) -> None:
        self._source, self._encoder, self._seq_len = source, encoder, seq_len
        super().__init__(documents, stream=stream, seed=seed)

    @property
    def state(self) -> StreamState:
        """The position: epoch, place in its order, samples given so far, and which conversations wait.

        Bit i of `waiting`: the conversation i + 1 places back waits.
        """
        waiting = sum(1 << (self._place - 1 - place) for place in self._waiting)
        return super().state | {"waiting": waiting}

    @property
    def passes(self) -> float:
        """Passes over the conversations so far; one that waits does not count."""
        return self._epoch + (self._place - len(self._waiting)) / len(self._items)

    def restart(self, state: Mapping[str, int]) -> None:
        """Resume from `state`, or from the beginning if it is empty."""
        super().restart(state)
        bits = int(state.get("waiting", 0))
        places = (self._place - 1 - bit for bit in reversed(range(bits.bit_length())) if bits >> bit & 1)
        self._waiting: dict[int, Sample | None] = dict.fromkeys(places)  # by place, ascending; None: not read yet
        self._lengths: list[tuple[int, int]] | None = None  # (tokens, -place) of those that wait, ascending
        self._tokens = 0

    def next_sequence(self) -> PackedSequence:
        """Return the next packed sequence.

        Raises:
            ConfigError: no conversation of this stream has a label within a sequence.
        """
        epoch = self._epoch
        while not self._fill():
            if self._epoch > epoch:
                raise ConfigError(
                    f"the {len(self._items)} conversations of data stream {self._stream} have no answer within "
                    f"{self._seq_len} tokens; raise the sequence length or give more data"
                )
            self._next_epoch()
        chosen = [self._take(next(iter(self._waiting)))]
        missing = self._seq_len - len(chosen[0].tokens)
        while self._fill() and (fitting := bisect_right(self._lengths, (missing, 1))):
            chosen.append(self._take(-self._lengths[fitting - 1][1]))
            missing -= len(chosen[-1].tokens)
        if not self._waiting and self._place == len(self._items):
            self._next_epoch()
        self.samples += 1
        return together(chosen, self._seq_len)

    def pass_over(self) -> None:
        self.next_sequence()

    def _fill(self) -> bool:
        """Read conversations until enough of them wait; return whether any does."""
        if self._lengths is None:  # those of a saved state
            self._lengths = []
            for place in list(self._waiting):
                self._read(place)
        while self._place < len(self._items) and self._tokens < TOKENS * self._seq_len:
            if self._waiting and self._place - next(iter(self._waiting)) >= WINDOW:
                break
            self._read(self._place)
            self._place += 1
        return bool(self._waiting)

    def _read(self, place: int) -> None:
        """Make the sample of a place in the epoch's order wait, unless it has no label."""
        text = self._source[self._item_at(place)]
        sample = self._encoder.sample_within(self._seq_len, text) if text else None  # a bad record has no text
        if sample is None or (sample.labels == IGNORE_INDEX).all():
            self._waiting.pop(place, None)
            return
        self._waiting[place] = sample
        insort(self._lengths, (len(sample.tokens), -place))
        self._tokens += len(sample.tokens)

    def _take(self, place: int) -> Sample:
        sample = self._waiting.pop(place)
        self._tokens -= len(sample.tokens)
        del self._lengths[bisect_right(self._lengths, (len(sample.tokens), -place)) - 1]
        return sample

    def _next_epoch(self) -> None:
        self._epoch, self._place, self._order = self._epoch + 1, 0, None


def together(samples: list[Sample], seq_len: int) -> PackedSequence:
    """Return samples in one sequence, and padding behind them: token 0 without a label, a document of its own."""
    lengths = [len(sample.tokens) for sample in samples]
    lengths.append(seq_len - sum(lengths))
    sequence = PackedSequence(
        tokens=np.zeros(seq_len, dtype=np.int64),
        labels=np.full(seq_len, IGNORE_INDEX, dtype=np.int64),
        positions=np.concatenate([np.arange(length, dtype=np.int64) for length in lengths]),
        document_ids=np.repeat(np.arange(len(lengths), dtype=np.int64), lengths),
    )
    used = seq_len - lengths[-1]
    sequence.tokens[:used] = np.concatenate([sample.tokens for sample in samples])
    sequence.labels[:used] = np.concatenate([sample.labels for sample in samples])
    return sequence
