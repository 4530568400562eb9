"""An iterable of a package as an opened data set: each data stream has an iterable of its own, and packs its documents.

The documents come in the order of the iterable; a pass over it is an epoch. So their order depends on the number of
streams, which is the number of data-parallel ranks of the first start if `training.data_streams` does not say it, and
not on the number of ranks that resume.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer.config.errors import ConfigError
from trainer.data.order.streams import AGAIN, StreamState, streams_of_rank
from trainer.data.packing.concatenate import DocumentStream
from trainer.data.packing.whole import WholeStream
from trainer.data.sources.iterables import IterableDocuments
from trainer.data.sources.registry import DataSettings
from trainer.data.token_files.made import made_by


class _OfIterable:
    """What a stream of packed sequences does otherwise if its documents are those of an iterable."""

    _source: IterableDocuments

    @property
    def state(self) -> StreamState:
        """The position, and that of the iterable before the oldest document that is still needed."""
        return super().state | self._source.state(self._epoch, self.oldest)

    @property
    def passes(self) -> float:
        """Whole passes over the iterable: nobody knows how long one is."""
        return float(self._epoch)

    def restart(self, state: Mapping[str, Any]) -> None:
        super().restart(state)
        self._source.start(self._epoch, state)

    def _item_at(self, place: int) -> Any:
        return self._epoch, place


class IterableDocumentStream(_OfIterable, DocumentStream):
    """Documents of an iterable one after another."""


class IterableWholeStream(_OfIterable, WholeStream):
    """Whole documents of an iterable."""


@dataclass(frozen=True)
class IterableData:
    """The documents of an iterable, and how they are packed; it is used as `TextData` is."""

    settings: DataSettings
    packing: str

    items = 0
    """Number of documents: not known."""

    def check(self, data_streams: int | None) -> None:
        """Nothing is known before the documents are read."""

    def streams(
        self, items: int, seq_len: int, data_streams: int, seed: int, dp_rank: int, dp_degree: int
    ) -> dict[int, IterableDocumentStream | IterableWholeStream]:
        """Return the streams that a data-parallel rank reads, by number."""
        found = {}
        for s in streams_of_rank(data_streams, dp_rank, dp_degree):
            source, how = IterableDocuments(self.settings, s, data_streams), {"seq_len": seq_len, "seed": seed}
            if self.packing == "concatenate":
                found[s] = IterableDocumentStream(source, source, stream=s, **how)
            else:
                found[s] = IterableWholeStream(source, source, stream=s, **how, alone=self.packing == "pad")
        return found

    def describe(self, items: int, seq_len: int) -> dict[str, int]:
        """Return what the meaning of a position depends on, besides seed and number of streams."""
        return made_by(self.settings) | ({} if self.packing == "concatenate" else {"seq_len": seq_len})

    def items_of(self, saved: Mapping[str, int]) -> int:
        """Return 0: the number of documents is not known; ConfigError for a position in files."""
        if saved and "iterable" not in saved:
            raise ConfigError(
                f"the checkpoint's positions are in a data set of files, and {self.settings.keys.dataset} = "
                f"{self.settings.dataset!r} is an iterable; resume with the data set of the checkpoint, {AGAIN}"
            )
        return 0
