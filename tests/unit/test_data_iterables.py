"""Laws of iterables of a package: a resumed run reads what the others would have read, on any number of ranks."""

import json
import sys
from collections.abc import Callable, Iterator
from itertools import islice, product
from random import Random
from types import ModuleType

import numpy as np
import pytest

from tests.loading import batch_loader
from tests.slow import slow
from trainer.config.errors import ConfigError
from trainer.config.loader import parse_command_line
from trainer.data import DataSettings, open_text
from trainer.data.iterable_data import loader_of
from trainer.data.loader import BatchLoader
from trainer.data.sources.registry import DATASETS
from trainer.data.tokenizers.tokenizer import Encoded
from trainer.extensions import register_iterable
from trainer.job import resolve

SEQ_LEN = 32


def texts(stream: int, streams: int, epoch: int = 0) -> list[str]:
    """Documents of 0 to 60 characters, other ones in each pass."""
    return [f"{i} {epoch} " + "x" * (i * 7 % 60) if i % 5 else "" for i in range(stream, 23, streams)]


class Plain:
    """An iterable without a state."""

    epoch = 0

    def __init__(self, stream: int, streams: int) -> None:
        self.stream, self.streams = stream, streams

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[object]:
        yield from texts(self.stream, self.streams, self.epoch)


class WithState(Plain):
    """One that resumes by itself, and counts the documents that it makes."""

    made = 0

    def __init__(self, stream: int, streams: int) -> None:
        super().__init__(stream, streams)
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]

    def __iter__(self) -> Iterator[object]:
        documents = texts(self.stream, self.streams, self.epoch)
        while self.next < len(documents):
            self.next += 1
            WithState.made += 1
            yield {"text": documents[self.next - 1]}


def datasets_stream(stream: int, streams: int) -> object:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": texts(stream, streams)}).to_iterable_dataset(num_shards=2)
    return rows.shuffle(seed=3, buffer_size=1, max_buffer_input_shards=1)


class OfIterator(Plain):
    """One whose iterator keeps the state."""

    def __init__(self, stream: int, streams: int, documents: list | None = None) -> None:
        super().__init__(stream, streams)
        self.documents = documents

    def __iter__(self) -> Iterator[object]:
        return iter(_Position(self.documents or texts(self.stream, self.streams, self.epoch)))


class _Position(list):
    """An iterator with a state, which it takes over with its next document, as `datasets` does."""

    place = 0
    loaded: int | None = None

    def __iter__(self) -> Iterator[object]:
        return self

    def __next__(self) -> object:
        self.place, self.loaded = self.place if self.loaded is None else self.loaded, None
        if self.place == len(self):
            raise StopIteration
        self.place += 1
        return self[self.place - 1]

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loaded = state["place"]


def buffered(stream: int, streams: int) -> object:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": texts(stream, streams)}).to_iterable_dataset(num_shards=2)
    return rows.shuffle(seed=3, buffer_size=5, max_buffer_input_shards=1).map(lambda row: {"text": row["text"] + "!"})


OPENED: dict[str, Callable[[int, int], object]] = {
    "plain": Plain,
    "stateful": WithState,
    "iterator": OfIterator,
    "sequence": texts,
    "datasets": datasets_stream,
    "buffered": buffered,
}


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A package with an iterable of each kind."""
    module = ModuleType("package_of_iterables")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    before = dict(DATASETS)
    for name, function in OPENED.items():
        setattr(module, name, lambda path, stream, streams, function=function: function(stream, streams))
        register_iterable(name, f"{module.__name__}:{name}")
    yield module
    DATASETS.clear()
    DATASETS.update(before)


def loader(name: str, packing: str | None = None, *, r: int = 0, d: int = 1, n: int | None = None, **settings: object):
    data = open_text(DataSettings(name, **settings), packing)
    shape = {"seq_len": SEQ_LEN, "local_batch_size": 1, "data_streams": n, "seed": 0}
    return batch_loader(data, **shape, dp_rank=r, dp_degree=d)


def read(loaders: list[BatchLoader], steps: int, first: int = 0) -> list[tuple]:
    """Return the samples that the ranks read in some steps, in global order.

    first: number of the first sample.
    """
    rows_of_ranks = [[tuple(b["tokens"][0].tolist()) for b in islice(iter(one), steps)] for one in loaders]
    return [
        sample
        for step in zip(*rows_of_ranks[first % len(loaders) :], *rows_of_ranks[: first % len(loaders)], strict=True)
        for sample in step
    ]


def merged(loaders: list[BatchLoader]) -> dict:
    states = {s: state for one in loaders for s, state in one.state_dict().items()}
    return json.loads(json.dumps(states), object_hook=lambda x: {int(k) if k.isdigit() else k: v for k, v in x.items()})


QUICK = (("plain", "concatenate"), ("plain", "best_fit"), ("stateful", "pad"), ("datasets", "concatenate"))
ALL = list(product(OPENED, ("concatenate", "best_fit", "pad")))
CHAINS = (*QUICK, ("datasets", "best_fit"), ("iterator", "best_fit"), ("buffered", "concatenate"))


@pytest.mark.parametrize(("name", "packing"), [*QUICK, *slow(*(case for case in ALL if case not in QUICK))])
def test_a_resumed_run_reads_the_rest_on_any_number_of_ranks(name: str, packing: str) -> None:
    whole = read([loader(name, packing, r=r, d=2) for r in range(2)], 24)
    for stop in (0, 3, 11):
        first = [loader(name, packing, r=r, d=2) for r in range(2)]
        assert read(first, stop) == whole[: 2 * stop]
        for degree in (1, 4):
            loaders = [loader(name, packing, r=r, d=degree) for r in range(degree)]
            for one in loaders:
                one.load_state_dict(merged(first))
            steps = (48 - 2 * stop) // degree
            assert read(loaders, steps, 2 * stop) == whole[2 * stop : 2 * stop + steps * degree], (stop, degree)


@pytest.mark.parametrize(("name", "packing"), [*CHAINS, *slow(*(case for case in ALL if case not in CHAINS))])
def test_any_chain_of_resumes_reads_each_sample_once(name: str, packing: str) -> None:
    whole = read([loader(name, packing, n=2)], 40 if name in ("plain", "iterator") else 28)
    random = Random(f"{name} {packing}")
    for chain in range(4 if name in ("plain", "iterator") else 1):
        done, states = 0, {}
        while done < len(whole):
            degree = 1 if chain == 0 else random.choice([1, 2, 4])
            ranks = [loader(name, packing, r=r, d=degree, n=2) for r in range(degree)]
            for one in ranks if states else []:
                one.load_state_dict(states)
            steps = 1 if chain == 0 else random.randrange(4)
            here = read(ranks, steps, done)[: len(whole) - done]
            assert here == whole[done : done + len(here)], (chain, done, degree)
            done, states = done + len(here), merged(ranks)


def test_documents_that_were_packed_before_a_restart_are_behind_it(package: ModuleType) -> None:
    """The last document that waits is in the middle of the pass; those behind it are in a sequence already."""
    lengths = (20, 20, 20, 4, 4, 4)
    package.iterator = lambda *_: OfIterator(0, 1, [[n + 1] * length for n, length in enumerate(lengths)])
    whole = read([loader("iterator", "best_fit")], 9)
    states: dict = {}
    for sample in whole:
        one = loader("iterator", "best_fit")
        if states:
            one.load_state_dict(states)
        assert read([one], 1) == [sample]
        states = merged([one])


def test_a_pass_that_is_shorter_after_a_restart_is_one_sentence(package: ModuleType) -> None:
    one = loader("plain", n=1)
    read([one], 6)
    package.plain = lambda *_: iter(["a"])
    with pytest.raises(ConfigError, match=r"pass 1 of stream 0 of 1 has 1 documents, and number \d+ is asked"):
        loader("plain", n=1).load_state_dict(merged([one]))


def test_passes_differ_if_the_iterable_knows_them() -> None:
    one = loader("plain")
    first = read([one], 1)
    while one.epoch < 1:
        last = read([one], 1)
    assert first != last
    assert one.epoch == 1


def test_one_that_keeps_its_state_makes_no_document_twice() -> None:
    one = loader("stateful")
    read([one], 9)
    state, WithState.made = merged([one]), 0
    again = loader("stateful")
    WithState.made = 0
    again.load_state_dict(state)
    read([again], 1)
    assert WithState.made <= 4


def test_documents_are_texts_or_token_ids(package: ModuleType) -> None:
    ids = [5, 6, 7]
    documents = [ids, np.array(ids), {"text": ids}, Encoded(np.array(ids), np.array([False, False, True]))]
    package.plain = lambda *_: documents
    (batch,) = islice(iter(loader("plain", "best_fit")), 1)
    assert batch["tokens"][0, :12].tolist() == ids * 4
    labels = batch["labels"][0, :12].tolist()
    assert labels == [6, 7, -100] * 3 + [-100, 7, -100]


@pytest.mark.parametrize(
    ("document", "sentence"),
    [
        ([3.5], "document 1, is of type float; give a text"),
        ([{"body": "x"}], "document 1, is of type dict"),
        ([[1, 10**6]], "has the token id 1000000"),
        ([np.zeros((2, 2), int)], r"an array of shape \(2, 2\)"),
        ([], "has 0 documents"),
        (7, "TypeError"),
    ],
)
def test_what_is_no_document_is_one_sentence(package: ModuleType, document: object, sentence: str) -> None:
    package.plain = lambda *_: document
    with pytest.raises(ConfigError, match=sentence):
        next(iter(loader("plain")))


def test_bad_documents_can_be_left_out(package: ModuleType) -> None:
    package.plain = lambda *_: [3.5, "abc", None]
    batch = next(iter(loader("plain", "pad", skips=True)))
    assert batch["padding"] > 0


def test_errors_of_the_package_are_one_sentence(package: ModuleType) -> None:
    def fails(*_: object) -> Iterator[str]:
        yield "first"
        raise RuntimeError("the network is away")

    package.plain = fails
    one = loader("plain")
    with pytest.raises(ConfigError, match=r"document 2 of stream 0 cannot be read \(RuntimeError: the network is away"):
        read([one], 20)
    del package.plain
    with pytest.raises(ConfigError, match="package_of_iterables:plain fails"):
        loader("plain")


def test_a_state_that_is_not_json_is_refused(package: ModuleType) -> None:
    class Odd(WithState):
        def state_dict(self) -> dict[str, object]:
            return {"next": {1, 2}}

    package.stateful = lambda path, stream, streams: Odd(stream, streams)
    with pytest.raises(ConfigError, match=r"its state_dict\(\) is not JSON"):
        read([loader("stateful")], 1)


def test_another_number_of_streams_and_other_data_are_refused() -> None:
    one = loader("plain", n=3)
    read([one], 3)
    with pytest.raises(ConfigError, match=r"training\.data_streams = 2 is not the 3"):
        loader("plain", n=2).load_state_dict(merged([one]))
    files = batch_loader(
        open_text(DataSettings("python_stdlib")), seq_len=SEQ_LEN, local_batch_size=1, data_streams=None, seed=0,
        dp_rank=0, dp_degree=1,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="is an iterable"):
        loader("plain").load_state_dict(merged([files]))


def test_validation_needs_documents_that_stay() -> None:
    config = parse_command_line(
        ["--training.dataset=plain", "--validation.enable", "--training.steps=1", "--validation.dataset=plain"]
    ).config
    with pytest.raises(ConfigError, match="each validation must read the same documents"):
        resolve(config, 1, "cpu")


def test_a_count_of_torchdata_is_not_saved() -> None:
    one = loader("plain", n=1)
    read([one], 3)
    (state,) = merged([one]).values()
    assert state["iterable"] == ""
    assert state["iterable_document"] > 0


def test_a_stream_of_datasets_is_resumed_by_its_state_where_that_is_right() -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": texts(0, 1)}).to_iterable_dataset(num_shards=3)

    def keeps_state(stream: object) -> bool:
        return hasattr(loader_of(stream, 0).dataset, "state_dict")

    assert keeps_state(rows)
    assert keeps_state(rows.shuffle(seed=3, buffer_size=1, max_buffer_input_shards=1))
    assert not keeps_state(rows.shuffle(seed=3, buffer_size=2, max_buffer_input_shards=1).take(9))
    assert not keeps_state(rows.shuffle(seed=3, buffer_size=1))  # of Parquet files it waits without an end
    assert not keeps_state(datasets.interleave_datasets([rows, rows.shuffle(seed=3)]))
