"""Laws of packed conversations: each once an epoch and whole, little padding, the same data on every degree."""

import json
import logging
from collections import Counter
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tests.numbered
from tests.loading import batch_loader
from trainer.config.errors import ConfigError
from trainer.data.order.streams import Shuffled
from trainer.data.packing import IGNORE_INDEX, NO_POSITION
from trainer.data.text_data import TextData
from trainer.data.tokenizers.tokenizer import Encoded
from trainer.data.whole_stream import WINDOW, TooLong, WholeStream

KEYS = ("tokens", "labels", "positions", "document_ids")


class Numbers(tests.numbered.Numbers):
    """Conversations whose second half is an answer."""

    def __getitem__(self, i: int) -> Encoded:
        ids = super().__getitem__(i).ids
        return Encoded(ids, np.arange(len(ids)) > len(ids) // 2)


def log_normal(n: int, seed: int = 0, *, longest: int = 64) -> list[int]:
    """Lengths from 4, with a median of 12."""
    return np.clip(np.random.default_rng(seed).lognormal(2.5, 0.8, n), 4, longest).astype(int).tolist()


def loader(lengths, *, n=4, r=0, d=1, seq_len=64, b=1, seed=0):
    settings = {"data_streams": n, "seed": seed, "dp_rank": r, "dp_degree": d}
    return batch_loader(
        TextData(Numbers(lengths), "best_fit", conversations=TooLong()), seq_len=seq_len, local_batch_size=b, **settings
    )


class Turns(tests.numbered.Numbers):
    """Conversations in turns of 10 tokens: 6 of a user, 4 of an answer."""

    def __getitem__(self, i: int) -> Encoded:
        ids = super().__getitem__(i).ids
        return Encoded(ids, np.arange(len(ids)) % 10 >= 6)


def stream_of(lengths, seq_len=64, *, kind=Numbers, drops=False) -> WholeStream:
    order = Shuffled(range(len(lengths)), stream=0, seed=0)
    return WholeStream(kind(lengths), order, seq_len=seq_len, conversations=TooLong(drops=drops))


def documents(sequence) -> list[tuple[int, ...]]:
    """Return the whole conversations of a sequence; check that its padding is padding."""
    ids, pieces = sequence.document_ids, []
    for number in range(int(ids[-1]) + 1):
        inside = ids == number
        tokens, labels = sequence.tokens[inside], sequence.labels[inside]
        if (tokens == 0).all():
            assert number == ids[-1]
            assert (sequence.positions[inside] == NO_POSITION).all()
            assert (labels == IGNORE_INDEX).all()
            continue
        assert sequence.positions[inside].tolist() == list(range(inside.sum()))
        length = len(tokens)
        assert tokens.tolist() == [int(tokens[0]) + i for i in range(length)]
        assert labels.tolist() == [IGNORE_INDEX] * (length // 2) + tokens[length // 2 + 1 :].tolist() + [IGNORE_INDEX]
        pieces.append((int(tokens[0]) // 1000, len(tokens)))
    assert ids.tolist() == sorted(ids.tolist())
    return pieces


def an_epoch(stream) -> list:
    epoch, sequences = stream.state["epoch"], []
    while stream.state["epoch"] == epoch:
        sequences.append(stream.next_sample())
    return sequences


@settings(deadline=None)
@given(st.lists(st.integers(3, 20), min_size=1, max_size=60))
def test_an_epoch_has_every_conversation_once_and_whole(lengths):
    stream = stream_of(lengths, seq_len=20)
    orders = []
    for epoch in range(3):
        assert stream.passes == epoch
        conversations = [document for sequence in an_epoch(stream) for document in documents(sequence)]
        assert sorted(conversations) == list(enumerate(lengths))
        orders.append(conversations)
    assert len(lengths) < 6 or len({tuple(order) for order in orders}) > 1


def test_a_sequence_begins_with_the_oldest_and_leaves_out_nothing_that_waits_and_fits():
    stream = stream_of(log_normal(300))
    while stream.state["epoch"] == 0:
        sequence = stream.next_sample()
        padding = int((sequence.tokens == 0).sum())
        assert all(len(sample.tokens) > padding for sample in stream._waiting.values())


def test_there_is_little_padding():
    """Conversations of log-normal lengths with a median of a fifth of a sequence, against packing in order."""
    for seed in range(3):
        lengths = np.clip(np.random.default_rng(seed).lognormal(6, 1, 4000), 4, 2048).astype(int).tolist()
        sequences = an_epoch(stream_of(lengths, seq_len=2048))
        in_order, room = 1, 2048
        for length in lengths:
            in_order, room = (in_order + 1, 2048 - length) if length > room else (in_order, room - length)
        shares = [1 - sum(lengths) / 2048 / number for number in (len(sequences), in_order)]
        assert shares[0] < 0.01
        assert shares[1] > 0.15
        assert sum(int((sequence.tokens == 0).sum()) for sequence in sequences) == 2048 * len(sequences) - sum(lengths)


def test_memory_is_bounded():
    stream = stream_of([4] * 3000, seq_len=4096)
    stream.next_sample()
    assert len(stream._waiting) <= WINDOW
    assert len(stream.state["waiting"]) <= WINDOW
    stream = stream_of([50] * 3000)
    stream.next_sample()
    assert len(stream._waiting) <= 8 * 64 // 50 + 1


# --- order and resumption


def rows(batches) -> list[tuple]:
    return [
        tuple(tuple(batch[key][i].tolist()) for key in KEYS) for batch in batches for i in range(len(batch["tokens"]))
    ]


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.sampled_from([1, 2, 4]), st.integers(0, 9)), min_size=1, max_size=5), st.integers(1, 2))
def test_resume_on_any_degree_is_exact(legs, b):
    """Some steps on D ranks, merge through JSON, resume with D' ranks: each leg reads the next samples."""
    lengths = log_normal(90)
    everything = rows(islice(iter(loader(lengths)), sum(d * b * steps for d, steps in legs)))
    states, done = None, 0
    for d, steps in legs:
        ranks = [loader(lengths, r=r, d=d, b=b) for r in range(d)]
        for r, one in enumerate(ranks):
            if states is not None:
                one.load_state_dict(states)
            window = range(done, done + d * b * steps)
            assert rows(islice(iter(one), steps)) == [everything[i] for i in window if i % d == r]
        merged = {s: entry for one in ranks for s, entry in one.state_dict().items()}
        states = {int(s): entry for s, entry in json.loads(json.dumps(merged)).items()}
        done += d * b * steps
    numbers = [value for entry in states.values() for name, value in entry.items() if name != "waiting"]
    places = [place for entry in states.values() for place in entry["waiting"]]
    assert all(type(value) is int for value in (*numbers, *places))


def test_a_resume_in_the_middle_of_a_buffer():
    """Negative control: without who waits, others come."""
    lengths = log_normal(200)
    first = loader(lengths, n=1)
    rows(islice(iter(first), 7))
    states = first.state_dict()
    waiting = states[0]["waiting"]
    assert waiting[-1] == states[0]["document"] - 1
    assert waiting != [*range(waiting[0], waiting[-1] + 1)]  # some of the places have gone before others
    expected = rows(islice(iter(first), 40))
    second = loader(lengths, n=1)
    second.load_state_dict(states)
    assert rows(islice(iter(second), 40)) == expected
    second.load_state_dict({0: states[0] | {"waiting": []}})
    assert rows(islice(iter(second), 40)) != expected
    older = {name: x for name, x in states[0].items() if name != "pieces"} | {"waiting": 5}
    with pytest.raises(ConfigError, match=r"an older version, which had bits .* resume with that version, or read"):
        second.load_state_dict({0: older})


def test_states_of_the_other_packing_are_refused():
    lengths = log_normal(20)
    shape = {"seq_len": 8, "local_batch_size": 1, "data_streams": 4, "seed": 0, "dp_rank": 0, "dp_degree": 1}
    other = batch_loader(TextData(tests.numbered.Numbers([4] * 20)), **shape)
    for one, states in ((loader(lengths), other.state_dict()), (other, loader(lengths).state_dict())):
        with pytest.raises(ConfigError, match=r"another training\.dataset"):
            one.load_state_dict(states)


# --- too long, or without labels


@pytest.mark.parametrize("drops", [False, True])
def test_a_long_conversation_is_cut_behind_an_answer_or_left_out_and_counted(drops, caplog):
    caplog.set_level(logging.WARNING, logger="trainer")
    stream = stream_of([40, 10, 24, 7, 29], seq_len=23, kind=Turns, drops=drops)
    with caplog.at_level(logging.WARNING, logger="trainer"):
        logging.getLogger("trainer").addHandler(caplog.handler)
        sequences = an_epoch(stream)
        logging.getLogger("trainer").removeHandler(caplog.handler)
    numbers = Counter(int(token) // 1000 for sequence in sequences for token in sequence.tokens if token)
    # The last token of an answer is a label alone: nothing behind it is learned.
    assert numbers == {1: 10, 3: 7} | ({} if drops else {0: 19, 2: 19, 4: 19})
    for sequence in sequences:
        for number in (0, 2, 4):
            inside = (sequence.tokens // 1000 == number) & (sequence.tokens > 0)
            labels = sequence.labels[inside]
            learned = sorted(labels[labels != IGNORE_INDEX] % 1000)
            assert not inside.any() or learned == [*range(7, 11), *range(17, 21)]
    (first,) = {record.getMessage() for record in caplog.records}
    noun, used = ("conversations", 0) if drops else ("ends of conversations", 19)
    assert first.startswith(f"{noun} left out so far: 1; this one: ")
    assert first.endswith(f" tokens, and a sequence has 23; {used} are used")
    assert stream._conversations.left_out.number == 3


def test_a_stream_without_an_answer_is_refused_instead_of_turning_for_ever():
    with pytest.raises(ConfigError, match="the 3 conversations of data stream 0 have no answer within 4 tokens"):
        stream_of([20, 30, 40], seq_len=4).next_sample()
    stream = stream_of([20, 4, 40], seq_len=4)
    assert [documents(stream.next_sample()) for _ in range(3)] == [[(1, 4)]] * 3
