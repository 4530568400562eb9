"""Whole documents, one after another: what the tests of packing and of the loader compare with."""

import json
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

import numpy as np

from tests.numbered import Ids
from trainer.data.document_stream import DocumentStream
from trainer.data.loader import BatchLoader
from trainer.data.order.streams import Shuffled
from trainer.data.packing import PackedSequence


class InOrder(Shuffled):
    """Documents in their own order."""

    def item(self, epoch: int, place: int) -> int:
        return place


def pack(documents: Iterable[np.ndarray], seq_len: int) -> Iterator[PackedSequence]:
    """Yield the full sequences of whole documents (n,), each with its begin and end tokens; drop an incomplete one."""
    source = Ids([*documents, [0]])
    stream = DocumentStream(source, InOrder(range(len(source)), stream=0, seed=0), seq_len=seq_len)
    yield from (stream.next_sample() for _ in range((sum(source.sizes) - 1) // seq_len))


def assert_exact_in_legs(
    loader: Callable[..., BatchLoader], rows: Callable[[Iterable], list[tuple]], legs: list[tuple[int, int]]
) -> dict[int, dict[str, int]]:
    """Read in legs of (data-parallel degree, steps), each resumed from the one before, and compare with one loader.

    loader: makes the loader of rank `r` of `d`, with one sequence a batch. Return the last state.
    """
    everything = rows(islice(iter(loader()), sum(d * steps for d, steps in legs)))
    states, done = None, 0
    for d, steps in legs:
        ranks = [loader(r=r, d=d) for r in range(d)]
        for r, one in enumerate(ranks):
            if states is not None:
                one.load_state_dict(states)
            window = range(done, done + d * steps)
            assert rows(islice(iter(one), steps)) == [everything[i] for i in window if i % d == r]
        merged = {s: entry for one in ranks for s, entry in one.state_dict().items()}
        states = {int(s): entry for s, entry in json.loads(json.dumps(merged)).items()}
        done += d * steps
    return states
