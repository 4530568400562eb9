"""Laws of the order of many documents: a bijection, another one for each purpose, as even as chance, without memory."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.loading import batch_loader
from tests.numbered import Numbers
from trainer.config.errors import ConfigError
from trainer.data.loader import BatchLoader
from trainer.data.order import shuffled as orders
from trainer.data.order.shuffled import SORTED, Permutation, shuffled
from trainer.data.order.streams import assigned
from trainer.data.text_data import TextData

KEYS = list(range(1, 9))


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 3000), st.lists(st.integers(0, 2**64 - 1), min_size=8, max_size=8))
def test_every_item_has_one_place(n: int, keys: list[int]) -> None:
    """Any number of items works, also if the grid has more cells than items."""
    assert sorted(Permutation(n, keys)) == list(range(n))


def test_many_items_are_a_bijection_and_the_same_on_every_machine() -> None:
    order = shuffled(SORTED + 7, 3, 1, 5)
    assert isinstance(order, Permutation)
    assert np.array_equal(np.sort(np.array(list(order))), np.arange(SORTED + 7))
    assert [order[i] for i in range(4)] == [65425, 34032, 13160, 44277]
    assert [shuffled(365_000_000, 0, 0)[i] for i in (0, 1, 364_999_999)] == [98945861, 44806805, 246505443]
    with pytest.raises(IndexError):
        order[SORTED + 7]


def test_each_seed_purpose_and_epoch_has_another_order() -> None:
    n = 1 << 20
    purposes = [(0,), (1, 0, 0), (1, 0, 1), (1, 1, 0), (1, 1, 1)]
    firsts = [tuple(shuffled(n, seed, *purpose)[i] for i in range(8)) for seed in (0, 1, 2**32) for purpose in purposes]
    assert len(set(firsts)) == 15
    # Two epochs have as many items at the same place as chance: 1 on average.
    here, there = (shuffled(SORTED + 1, 0, 1, 0, epoch) for epoch in (0, 1))
    assert sum(a == b for a, b in zip(here, there, strict=True)) < 10


def chi2(pairs: np.ndarray, cells: int) -> float:
    """Pearson's statistic of pairs (n, 2) of numbers below `cells`, over its degrees of freedom."""
    counts = np.bincount(pairs[:, 0] * cells + pairs[:, 1], minlength=cells * cells)
    expected = len(pairs) / cells**2
    return float(((counts - expected) ** 2 / expected).sum() / (cells - 1) ** 2)


@pytest.mark.parametrize("n", [100_003, 131_072, 250_000])
def test_places_and_neighbours_are_as_even_as_chance(n: int) -> None:
    """The statistic is 1 with a deviation of sqrt(2 / freedom): 0.05 for 30 x 30 cells."""
    places, items = np.arange(n), np.array(list(shuffled(n, 7, 0)))
    cells = 30
    by_place = np.stack([places * cells // n, items * cells // n], axis=1)
    neighbours = np.stack([items[:-1] * cells // n, items[1:] * cells // n], axis=1)
    far = np.stack([items[: n // 2] * cells // n, items[n // 2 : 2 * (n // 2)] * cells // n], axis=1)
    low = np.stack([places % cells, items % cells], axis=1)
    for pairs in (by_place, neighbours, far, low):
        assert 0.75 < chi2(pairs, cells) < 1.25


def test_the_statistic_sees_a_weaker_cipher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: one round leaves neighbours in neighbouring rows."""
    n, cells = 100_003, 30
    items = np.array(list(Permutation(n, KEYS[:2])))
    assert chi2(np.stack([items[:-1] * cells // n, items[1:] * cells // n], axis=1), cells) > 1.25


def test_the_order_of_a_billion_documents_takes_no_memory() -> None:
    tracemalloc.start()
    shares = dict(assigned(10**9, 64, 0, 3, 8))
    assert sorted(shares) == list(range(3, 64, 8))
    assert len(shares[3]) == 10**9 // 64
    assert len({shares[3][place] for place in range(1000)}) == 1000
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_streams_divide_many_items(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders, "SORTED", 100)
    shares = [list(items) for _, items in assigned(1003, 7, 5, 0, 1)]
    assert sorted(item for share in shares for item in share) == list(range(1003))


def loader(lengths: list[int]) -> BatchLoader:
    shape = {"seq_len": 20, "local_batch_size": 1, "data_streams": 2, "seed": 0, "dp_rank": 0, "dp_degree": 1}
    return batch_loader(TextData(Numbers(lengths)), **shape)


def test_older_checkpoints_of_many_documents_are_refused_and_of_few_are_resumed() -> None:
    many = loader([3] * (SORTED + 1))
    states = many.state_dict()
    loader([3] * (SORTED + 1)).load_state_dict(states)
    older = {s: {key: entry[key] for key in entry if key != "order"} for s, entry in states.items()}
    assert older != states
    with pytest.raises(ConfigError, match=r"older version, which had another order of more than 65,536 documents"):
        loader([3] * (SORTED + 1)).load_state_dict(older)
    few = loader([3] * 50).state_dict()
    assert all("order" not in entry for entry in few.values())
