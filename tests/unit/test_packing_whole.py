"""Laws of documents that are packed whole: every token once an epoch, none cut that fits, padding counted, resumed."""

import json
from collections import Counter
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.loading import batch_loader
from tests.numbered import Numbers
from tests.packing import InOrder, assert_exact_in_legs
from trainer.config.errors import ConfigError
from trainer.config.loader import parse_command_line
from trainer.data.document_stream import DocumentStream
from trainer.data.job_data import open_text
from trainer.data.loader import BatchLoader
from trainer.data.order.streams import Shuffled
from trainer.data.packing import IGNORE_INDEX, NO_POSITION
from trainer.data.sources.registry import DataSettings
from trainer.data.text_data import TextData
from trainer.data.whole_stream import WholeStream
from trainer.job import resolve

KEYS = ("tokens", "labels", "positions", "document_ids")
LENGTHS = st.lists(st.integers(0, 45), min_size=1, max_size=40).filter(lambda lengths: max(lengths) > 1)


def stream_of(lengths: list[int], *, seq_len: int = 20, alone: bool = False) -> WholeStream:
    order = Shuffled(range(len(lengths)), stream=0, seed=0)
    return WholeStream(Numbers(lengths), order, seq_len=seq_len, alone=alone)


def pieces(sequence) -> list[tuple[list[int], list[int]]]:
    """Return tokens and labels of each part of a document in a sequence; check that its padding is padding."""
    ids, parts = sequence.document_ids, []
    used = len(ids) - sequence.padding
    assert (sequence.tokens[used:] == 0).all()
    assert (sequence.labels[used:] == IGNORE_INDEX).all()
    assert (sequence.positions[used:] == NO_POSITION).all()
    assert ids.tolist() == sorted(ids.tolist())
    for number in range(int(ids[-1]) + 1):
        inside = ids == number
        if sequence.tokens[inside][0]:
            assert sequence.positions[inside].tolist() == list(range(inside.sum()))
            parts.append((sequence.tokens[inside].tolist(), sequence.labels[inside].tolist()))
    assert len(parts) == int(ids[-1]) + 1 - (sequence.padding > 0)
    assert sum(len(tokens) for tokens, _ in parts) == used
    return parts


def an_epoch(stream: WholeStream) -> list:
    epoch, sequences = stream.state["epoch"], []
    while stream.state["epoch"] == epoch:
        sequences.append(stream.next_sample())
    return sequences


@pytest.mark.parametrize("alone", [False, True], ids=["best_fit", "pad"])
@settings(deadline=None)
@given(LENGTHS)
def test_each_token_of_each_document_is_trained_exactly_once_an_epoch(alone: bool, lengths: list[int]) -> None:
    stream, seq_len = stream_of(lengths, alone=alone), 20
    wanted = Counter((1000 * i + t, 1000 * i + t + 1) for i, length in enumerate(lengths) for t in range(1, length))
    for epoch in range(3):
        assert stream.passes == epoch
        sequences = [pieces(sequence) for sequence in an_epoch(stream)]
        assert not alone or all(len(parts) == 1 for parts in sequences)
        parts = [part for sequence in sequences for part in sequence]
        trained = Counter(pair for part in parts for pair in zip(*part, strict=True) if pair[1] != IGNORE_INDEX)
        assert trained == wanted
        for i, length in enumerate(lengths):
            pieces_of_document = [tokens for tokens, _ in parts if tokens[0] // 1000 == i]
            whole, remainder = divmod(length, seq_len)
            # A rest of one token has no label.
            assert (
                sorted(map(len, pieces_of_document)) == sorted([seq_len] * whole + [remainder] * (remainder > 1))
                or length < 2
            )


def test_one_document_a_sequence_comes_in_the_order_of_the_stream() -> None:
    """The pieces of a long document follow each other."""
    stream = stream_of([50, 3, 20, 41, 7], alone=True)
    order = [stream.order.item(0, place) for place in range(5)]
    first_pieces = [pieces(sequence)[0][0] for sequence in an_epoch(stream)]
    assert [tokens[0] // 1000 for tokens in first_pieces] == sorted(
        (tokens[0] // 1000 for tokens in first_pieces), key=order.index
    )
    assert [tokens[0] % 1000 for tokens in first_pieces if tokens[0] < 1000] == [1, 21, 41]


def test_best_fit_pads_less_than_one_document_a_sequence_and_cuts_less_than_concatenation() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(3, 1, 800), 2, 900).astype(int).tolist()
    shares, cut = {}, {}
    for alone in (False, True):
        sequences = an_epoch(stream_of(lengths, seq_len=128, alone=alone))
        shares[alone] = sum(sequence.padding for sequence in sequences) / 128 / len(sequences)
        cut[alone] = sum(len(pieces(sequence)) for sequence in sequences) - len(lengths)
    assert shares[False] < 0.01
    assert shares[True] > 0.5
    assert cut[False] == cut[True] == sum((length - 2) // 128 for length in lengths)


# --- order and resumption


def loader(lengths: list[int], *, alone: bool, r: int = 0, d: int = 1, b: int = 1, n: int = 4) -> BatchLoader:
    shape = {"seq_len": 20, "local_batch_size": b, "data_streams": n, "seed": 0, "dp_rank": r, "dp_degree": d}
    return batch_loader(TextData(Numbers(lengths), "pad" if alone else "best_fit"), **shape)


def rows(batches) -> list[tuple]:
    return [
        tuple(tuple(batch[key][i].tolist()) for key in KEYS) for batch in batches for i in range(len(batch["tokens"]))
    ]


@pytest.mark.parametrize("alone", [False, True], ids=["best_fit", "pad"])
@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.sampled_from([1, 2, 3, 4]), st.integers(0, 9)), min_size=1, max_size=5))
def test_resume_on_any_degree_is_exact(alone: bool, legs: list[tuple[int, int]]) -> None:
    """Some runs stop inside a document that has several pieces."""
    lengths = [5, 90, 13, 150, 40, 8, 19, 61, 2, 1, 17, 33] * 4
    assert_exact_in_legs(partial(loader, lengths, alone=alone), rows, legs)


def test_a_resume_between_the_pieces_of_a_document_needs_their_number() -> None:
    """Negative control: without it, the resumed run gives other sequences."""
    lengths = [150] * 6
    first = loader(lengths, alone=True, n=1)
    rows(islice(iter(first), 3))
    states = first.state_dict()
    expected = rows(islice(iter(first), 20))
    (second := loader(lengths, alone=True, n=1)).load_state_dict(states)
    assert rows(islice(iter(second), 20)) == expected
    second.load_state_dict({0: states[0] | {"pieces": 0}})
    assert rows(islice(iter(second), 20)) != expected


@pytest.mark.parametrize("lengths", [[18] * 9 + [42, 10], [10] + [0] * 1023 + [42]], ids=["some wait", "none waits"])
def test_no_piece_is_lost_of_a_document_whose_rest_fills_up_a_sequence_before(lengths: list[int]) -> None:
    """A document of three pieces, which is read in the middle of a sequence; also after a resume from there."""
    stream = stream_of(lengths)
    stream.order = order = InOrder(range(len(lengths)), stream=0, seed=0)
    first = stream.next_sample()
    assert [len(tokens) for tokens, _ in pieces(first)] == [lengths[0], 2]
    (resumed := stream_of(lengths)).restart(stream.state)
    resumed.order = order
    sequences, again = an_epoch(stream), an_epoch(resumed)
    assert [one.tokens.tolist() for one in again] == [one.tokens.tolist() for one in sequences]
    tokens = [token for sequence in (first, *sequences) for part, _ in pieces(sequence) for token in part]
    assert len(tokens) == len(set(tokens)) == sum(lengths)


def test_the_packing_of_whole_documents_may_change_at_a_resume_and_loses_nothing() -> None:
    lengths = [7, 3, 55, 12, 9, 4, 31, 18] * 3
    one = stream_of(lengths)
    sequences = [one.next_sample() for _ in range(6)]
    other = stream_of(lengths, alone=True)
    other.restart(one.state)
    sequences += an_epoch(other)
    tokens = [token for sequence in sequences for part, _ in pieces(sequence) for token in part]
    assert len(tokens) == len(set(tokens)) == sum(lengths)


def test_states_of_a_packing_that_cuts_are_refused() -> None:
    lengths = [30] * 8
    shape = {"seq_len": 20, "local_batch_size": 1, "data_streams": 4, "seed": 0, "dp_rank": 0, "dp_degree": 1}
    cuts = batch_loader(TextData(Numbers(lengths)), **shape)
    whole = loader(lengths, alone=False)
    for one, states in ((whole, cuts.state_dict()), (cuts, whole.state_dict())):
        with pytest.raises(ConfigError, match=r"belongs to another training\.dataset or training\.packing"):
            one.load_state_dict(states)


def test_a_batch_says_how_much_of_it_is_padding() -> None:
    batches = list(islice(iter(loader([5] * 16, alone=True, b=3)), 4))
    assert [batch["padding"] for batch in batches] == [45] * 4


# --- settings


def test_what_packs_each_kind_of_data(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "some words, and more of them"}) + "\n")
    kinds = {}
    for packing in (None, "concatenate", "best_fit", "pad"):
        data = open_text(DataSettings("jsonl", str(tmp_path)), packing)
        stream = data.packed(Shuffled(range(1), stream=0, seed=0), 64)
        kinds[packing] = type(stream), stream.next_sample().padding
    assert kinds[None] == kinds["concatenate"] == (DocumentStream, 0)
    assert kinds["best_fit"] == kinds["pad"]
    assert kinds["pad"][0] is WholeStream
    assert kinds["pad"][1] > 40


def test_conversations_are_not_cut() -> None:
    arguments = ["--training.dataset=chat", "--training.dataset_path=x.jsonl", "--training.packing=concatenate"]
    with pytest.raises(ConfigError, match=r"'concatenate' would cut conversations .*; use 'best_fit' or 'pad'"):
        resolve(parse_command_line(arguments).config, 1, missing=[])


def test_a_stream_without_text_is_refused_instead_of_turning_for_ever() -> None:
    with pytest.raises(ConfigError, match="none of the 3 documents of data stream 0 holds text"):
        stream_of([0, 1, 0]).next_sample()
