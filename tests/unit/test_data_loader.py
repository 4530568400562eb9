"""Laws of the loader: one order of data for all degrees, exact resumption on any of them, memory of its own."""

import json
import subprocess
import sys
from functools import partial
from itertools import islice, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longshard.context.planning.balance import balanced
from longshard.context.planning.mask import causal, documents_of
from longshard.context.planning.options import BatchPlan, ContextParallelOptions
from tests.loading import batch_loader
from tests.numbered import Ids
from tests.packing import pack
from trainer.config.errors import ConfigError
from trainer.data import DataSettings, TextData, open_text
from trainer.data.loader import batch_hash
from trainer.data.order.shuffled import shuffled
from trainer.data.packing import IGNORE_INDEX

KEYS = ("tokens", "labels", "positions", "document_ids")
SEQ_LEN = 8


def encoded(text: str) -> list[int]:
    """Tokens that are code points between 1 and 2: readable in a failure."""
    return [1, *map(ord, text), 2] if text else []


def documents(n: int = 30) -> list[str]:
    """Documents of 0 to 30 characters (one is empty), each with a character of its own."""
    return [chr(1000 + i) * (i * 7 % 31) for i in range(n)]


def loader(source=None, *, b=1, n=4, r=0, d=1, seed=0, seq_len=SEQ_LEN, plan=None, kind=Ids):
    texts = documents() if source is None else source
    shape = {"seq_len": seq_len, "local_batch_size": b, "data_streams": n, "seed": seed, "dp_rank": r, "dp_degree": d}
    return batch_loader(TextData(kind([*map(encoded, texts)])), **shape, plan=plan)


def rows(batches) -> list[tuple]:
    """Each sample as one hashable value of all its tensors."""
    return [
        tuple(tuple(batch[key][i].tolist()) for key in KEYS) for batch in batches for i in range(len(batch["tokens"]))
    ]


def read(loaders, steps) -> list[tuple]:
    """Return the samples that D ranks read in some steps, in global order: i = r, r + D, ..."""
    per_rank = [rows(islice(iter(one), steps)) for one in loaders]
    return [sample for group in zip(*per_rank, strict=True) for sample in group]


def merged(loaders) -> dict:
    states = [one.state_dict() for one in loaders]
    result = {s: entry for state in states for s, entry in state.items()}
    assert all(entry == result[s] for state in states for s, entry in state.items())  # ranks agree on a shared stream
    return json.loads(json.dumps(result), object_hook=lambda o: {int(k) if k.isdigit() else k: v for k, v in o.items()})


DEGREES = st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4), (12, 3), (12, 4), (12, 6), (12, 12)])
SHARED = st.sampled_from([(1, 2), (1, 5), (4, 3), (4, 6), (6, 4), (12, 8), (3, 12), (5, 3)])


@settings(deadline=None)
@given(DEGREES | SHARED, st.integers(1, 3), st.integers(0, 2**63 - 1), st.integers(1, 40))
def test_the_order_does_not_depend_on_degree_or_batch_size(degrees, b, seed, seq_len):
    n, d = degrees
    steps = 24 // (d * b) + 1
    total = steps * d * b
    got = read([loader(b=b, n=n, r=r, d=d, seed=seed, seq_len=seq_len) for r in range(d)], steps)
    assert got == read([loader(n=n, seed=seed, seq_len=seq_len)], total)


def test_global_sample_i_is_number_i_div_n_of_stream_i_mod_n():
    n = 4
    source = documents()
    assigned = shuffled(len(source), 5, 0)
    expected = []
    for s in range(n):
        own = assigned[s::n]
        endless = []
        for epoch in range(6):
            endless += [source[own[i]] for i in shuffled(len(own), 5, 1, s, epoch)]
        ids = [encoded(text) for text in endless if text]
        expected.append(list(pack(ids, SEQ_LEN)))
    got = read([loader(n=n, seed=5)], 80)
    for i, (tokens, labels, positions, ids) in enumerate(got):
        row = expected[i % n][i // n]
        assert (list(tokens), list(labels)) == (row.tokens.tolist(), row.labels.tolist())
        assert (list(positions), list(ids)) == (row.positions.tolist(), row.document_ids.tolist())


def test_an_epoch_holds_every_document_once_and_the_next_in_another_order():
    source = [chr(1000 + i) * 2 for i in range(40)]  # 4 tokens each: two documents a row
    samples = [tokens for tokens, *_ in read([loader(source, n=2)], 40)]
    epochs = [[token for row in samples[i : i + 20] for token in row if token > 2] for i in (0, 20)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(ord(char) for text in source for char in text)
    assert epochs[0] != epochs[1]


def test_the_seed_changes_the_order():
    assert read([loader(seed=0)], 8) != read([loader(seed=1)], 8)


def test_shuffles_are_permutations_and_the_same_on_every_machine():
    assert shuffled(8, 0, 0).tolist() == [1, 4, 5, 6, 2, 0, 3, 7]
    assert shuffled(8, 2**63 - 1, 1, 3, 7).tolist() == [5, 4, 0, 3, 6, 7, 1, 2]
    assert sorted(shuffled(1000, 1, 0).tolist()) == list(range(1000))
    purposes = [(0,), (1,), (1, 0), (1, 0, 0), (1, 1, 0), (1, 0, 1)]
    assert len({tuple(shuffled(100, seed, *purpose)) for seed in (0, 1, 2**32) for purpose in purposes}) == 18


# --- resume


@settings(deadline=None)
@given(
    st.sampled_from([1, 2, 4, 5, 12]),
    st.lists(st.tuples(st.sampled_from([1, 2, 3, 4, 5, 6, 12]), st.integers(0, 5)), min_size=1, max_size=4),
    st.integers(1, 2),
)
def test_resume_of_a_resume_on_any_degree_is_exact(n, legs, b):
    """Some steps on D ranks, merge, resume with D' ranks, ...: each leg reads the next samples, each rank its own."""
    whole = loader(n=n)
    everything = rows(islice(iter(whole), sum(d * b * steps for d, steps in legs)))
    states, done = None, 0
    for d, steps in legs:
        loaders = [loader(b=b, n=n, r=r, d=d) for r in range(d)]
        for r, one in enumerate(loaders):
            if states is not None:
                one.load_state_dict(states)
            window = range(done, done + d * b * steps)
            assert rows(islice(iter(one), steps)) == [everything[i] for i in window if i % d == r]
        states = merged(loaders)
        done += d * b * steps
    reached = loader(n=n)
    rows(islice(iter(reached), done))
    assert states == reached.state_dict()  # the merged state does not depend on the degrees either


@pytest.mark.parametrize("k", [0, 1, 7])
def test_a_state_that_went_through_json_resumes_exactly(k):
    first = loader(b=2, r=1, d=2)
    batches = iter(first)
    rows(islice(batches, k))
    written = json.dumps(first.state_dict())
    assert len(written) < 2000  # no token buffers
    state = {int(stream): entry for stream, entry in json.loads(written).items()}
    expected = rows(islice(batches, 9))

    second = loader(b=2, r=1, d=2)
    second.load_state_dict(state)
    batches = iter(second)
    assert rows(islice(batches, 4)) == expected[:8]
    third = loader(b=2, r=1, d=2)
    third.load_state_dict(second.state_dict())
    assert rows(islice(iter(third), 5)) == expected[8:]


def test_the_state_of_streams_is_that_of_the_batches_given_so_far():
    one = loader(b=3)
    batches = iter(one)
    assert sum(entry["samples"] for entry in one.state_dict().values()) == 0
    for step in range(1, 9):
        next(batches)
        assert sum(entry["samples"] for entry in one.state_dict().values()) == 3 * step
    names = {"epoch", "document", "token", "samples", "documents", "data_streams", "seed", "content"}
    assert all(
        set(entry) == names and all(type(v) is int for v in entry.values()) for entry in one.state_dict().values()
    )


def test_loading_moves_an_iterator_that_is_in_use_and_a_second_iterator_continues():
    one = loader()
    batches = iter(one)
    start = one.state_dict()
    expected = rows(islice(batches, 6))
    one.load_state_dict(start)
    assert rows(islice(batches, 3)) == expected[:3]
    assert rows(islice(iter(one), 3)) == expected[3:]


def test_a_resumed_run_may_change_seq_len_and_continues_at_the_same_token():
    source = [chr(1000 + i) * 30 for i in range(4)]
    short = loader(source, n=1, seq_len=8)
    seen = [token for tokens, *_ in read([short], 5) for token in tokens]
    long = loader(source, n=1, seq_len=16)
    long.load_state_dict(short.state_dict())
    seen += [token for tokens, *_ in read([long], 4) for token in tokens]
    assert seen == [token for tokens, *_ in read([loader(source, n=1)], 13) for token in tokens]


def test_only_the_current_document_is_read_again():
    class Counting(Ids):
        calls = 0

        def __getitem__(self, i):
            Counting.calls += 1
            return super().__getitem__(i)

    source = ["a" * 1000] * 8
    first = loader(source, n=1)
    list(islice(iter(first), 700))
    second = loader(source, n=1, kind=Counting)
    second.load_state_dict(first.state_dict())
    next(iter(second))
    assert Counting.calls == 1


# --- batches


def test_batches_own_resizable_memory_and_have_the_right_shape():
    batches = list(islice(iter(loader(b=3)), 2))
    tensors = [batch[key] for batch in batches for key in KEYS]
    assert all(set(batch) == {*KEYS, "numbers", "padding"} for batch in batches)
    assert all(t.shape == (3, SEQ_LEN) and t.dtype == torch.int64 and t.is_contiguous() for t in tensors)
    assert all(t.untyped_storage().nbytes() == t.numel() * 8 and t.untyped_storage().resizable() for t in tensors)
    assert len({t.untyped_storage().data_ptr() for t in tensors}) == len(tensors)
    before = batches[0]["labels"].clone()
    batches[0]["tokens"].resize_(3, 4).fill_(-1)
    assert torch.equal(batches[0]["labels"], before)


def test_a_plan_is_made_with_its_batch():
    """A plan has masks and layouts for the batch's own documents; without a plan, batches are as they were."""
    options = ContextParallelOptions(load_balancer="balanced")
    planned = loader(b=3, seq_len=64, plan=partial(BatchPlan.of, degree=2, options=options))
    for batch, plain in zip(islice(iter(planned), 3), iter(loader(b=3, seq_len=64)), strict=False):
        plan = batch.pop("plan")
        assert rows([batch]) == rows([plain])
        assert batch_hash(batch | {"plan": plan}) == batch_hash(plain)
        assert plan.mask == documents_of(batch["document_ids"].numpy().copy())
        assert plan.layout == balanced(plan.mask & causal(64), 2)


def test_an_iterator_draws_nothing_from_the_global_generator():
    one = loader()
    before = torch.get_rng_state()
    next(iter(one))
    assert torch.equal(torch.get_rng_state(), before)


def test_documents_without_text_leave_no_trace():
    source = ["", "abc", "", "", "defg", ""]
    samples = read([loader(source, n=1)], 20)
    for tokens, labels, _, _ in samples:
        assert (1, 2) not in set(pairwise(tokens))  # no begin followed by an end
        assert all(label == IGNORE_INDEX for token, label in zip(tokens, labels, strict=True) if token == 2)


def test_hashes_are_63_bits_and_tell_batches_apart():
    batches = list(islice(iter(loader()), 30))
    hashes = [batch_hash(batch) for batch in batches]
    assert len(set(hashes)) == len(set(rows(batches))) > 20
    assert all(0 <= h < 2**63 for h in hashes)
    batch = batches[0]
    assert batch["tokens"].untyped_storage().resizable()  # hashing leaves the batch alone
    assert batch_hash(dict(reversed(batch.items()))) == hashes[0]
    assert batch_hash({**batch, "labels": batch["labels"].view(SEQ_LEN, 1)}) != hashes[0]
    assert batch_hash({**batch, "labels": batch["tokens"], "tokens": batch["labels"]}) != hashes[0]


@pytest.mark.slow
def test_real_batches_and_hashes_are_the_same_in_every_process():
    shape = {"seq_len": 256, "local_batch_size": 2, "data_streams": 8, "seed": 3, "dp_rank": 1, "dp_degree": 2}
    one = batch_loader(open_text(DataSettings("python_stdlib")), **shape)
    code = (
        "from itertools import islice; from tests.loading import batch_loader; from trainer.data import DataSettings,"
        "open_text; from trainer.data.loader import batch_hash; data = open_text(DataSettings('python_stdlib'));"
        f"print([batch_hash(b) for b in islice(batch_loader(data, **{shape}), 5)])"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stderr == ""  # no warnings either
    assert other.stdout.strip() == str([batch_hash(batch) for batch in islice(iter(one), 5)])


# --- refusals


def refusal(call) -> str:
    with pytest.raises(ConfigError) as error:
        call()
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("empty", [1, 3])
def test_a_stream_without_a_token_is_refused_instead_of_turning_for_ever(empty, monkeypatch):
    assert f"none of the {empty} documents of the data set holds text" in refusal(lambda: loader([""] * empty, n=1))
    monkeypatch.setattr("trainer.data.text_data.SORTED", 0)  # documents of larger data are not counted
    one = loader([""] * empty, n=1)
    assert f"none of the {empty} documents of data stream 0 holds text; leave out" in refusal(lambda: next(iter(one)))


def test_each_stream_has_text_although_most_documents_are_empty():
    documents = ["abc" if i % 10 == 0 else "" for i in range(600)]
    one = loader(documents, n=None)
    n = one.state_dict()[0]["data_streams"]
    assert n < 64
    assert len(rows(islice(iter(one), 200))) == 200
    said = refusal(lambda: loader(documents, n=64))
    assert "training.data_streams = 64 leaves a stream without text" in said
    assert f"use {n}, leave it out" in said
    full = loader(["abc"] * 600, n=None)
    assert len(full.state_dict()) == 64


def test_one_document_among_many_empty_ones_is_found():
    one = loader([""] * 50 + ["abc"] + [""] * 50, n=1)
    assert len(rows(islice(iter(one), 10))) == 10


def test_streams_that_do_not_fit_are_refused():
    assert "the data set has 30; leave it out, or use at most 30" in refusal(lambda: loader(n=32, d=4))
    assert "the data set holds no text" in refusal(lambda: loader([], n=None))


def test_one_document_is_read_by_any_number_of_ranks():
    """Without training.data_streams no data set is too small, and ranks do not change the order."""
    source = ["".join(chr(1000 + i) for i in range(200))]
    expected = read([loader(source, n=None)], 24)
    assert read([loader(source, n=None, r=r, d=8) for r in range(8)], 3) == expected


def test_the_number_of_streams_that_is_chosen_stays_with_the_run():
    first = loader(n=None)
    assert len(first.state_dict()) == 3
    everything = read([loader(n=3)], 87)
    assert rows(islice(iter(first), 7)) == everything[:7]
    states = merged([first])
    for r in range(0, 40, 9):
        (one := loader(n=None, r=r, d=40)).load_state_dict(states)
        assert rows(islice(iter(one), 2)) == [everything[i] for i in range(7, 87) if i % 40 == r]
    longer = loader([*documents(), *"abc" * 400], n=None)  # would choose 64
    longer.load_state_dict(states)
    assert rows(islice(iter(longer), 80)) == everything[7:]


def test_states_of_other_data_are_refused():
    states = merged([loader()])
    assert "training.seed = 1 is not the 0 of the saved" in refusal(lambda: loader(seed=1).load_state_dict(states))
    assert "training.data_streams = 2 is not the 4" in refusal(lambda: loader(n=2).load_state_dict(states))
    assert "has 29 documents, and had 30" in refusal(lambda: loader(documents(29)).load_state_dict(states))
    before = [chr(999), *documents()]
    assert "has 31 documents, and had 30" in refusal(lambda: loader(before).load_state_dict(states))
    other = [*documents()[:-1], "other"]
    assert "the content of the data set has changed" in refusal(lambda: loader(other).load_state_dict(states))
    del states[3]
    assert "lacks stream 3" in refusal(lambda: loader().load_state_dict(states))


def test_documents_that_were_added_behind_the_others_are_allowed_and_said(caplog):
    first = loader()
    rows(islice(iter(first), 5))
    states = merged([first])
    second = loader(documents(33))
    with caplog.at_level("INFO"):
        second.load_state_dict(states)
    assert "the data set has 3 more documents than at the start of this run, which continues with its 30" in caplog.text
    assert second.state_dict() == states
    assert rows(islice(iter(second), 40)) == rows(islice(iter(first), 40))


@pytest.mark.parametrize("older", [{}, {"data": 1}], ids=["none", "of heads and tails"])
def test_a_state_without_a_hash_of_the_data_is_taken_and_said(older, caplog):
    """Older ones have none, or one of less."""
    states = {s: {key: entry[key] for key in entry if key != "content"} for s, entry in loader().state_dict().items()}
    one = loader()
    with caplog.at_level("INFO"):
        one.load_state_dict({s: entry | older for s, entry in states.items()})
    assert one.state_dict() == loader().state_dict()
    assert "an older version wrote the checkpoint, which does not record content of its data" in caplog.text


def test_a_refused_state_changes_nothing():
    one, states = loader(), merged([loader()])
    batches = iter(one)
    next(batches)
    before = one.state_dict()
    del states[3]
    refusal(lambda: one.load_state_dict(states))
    assert one.state_dict() == before


def test_sequences_are_numbered_through_the_run():
    """On any number of ranks, and after a resume, the numbers equal the numbers of the global samples."""
    one = loader(b=2, n=4)
    assert [batch["numbers"] for batch in islice(iter(one), 3)] == [[0, 1], [2, 3], [4, 5]]
    resumed = [loader(b=1, n=4, r=r, d=2) for r in range(2)]
    for rank in resumed:
        rank.load_state_dict(one.state_dict())
    numbers = [[batch["numbers"] for batch in islice(iter(rank), 2)] for rank in resumed]
    assert numbers == [[[6], [8]], [[7], [9]]]
