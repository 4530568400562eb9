"""Laws: an assignment gives all ranks equal work, up to whole documents and room; costs are the model's FLOPs."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from trainer.families.decoder_args import LLAMA3 as FLAVORS
from trainer.tasks.balanced_batches import Assignment, assign, document_costs

LONGEST = 32768


def documents_of_step(seed: int, rows: int, mean: float) -> tuple[np.ndarray, np.ndarray]:
    """Lengths of documents that fill `rows` sequences, log-normal of sigma 1.2 and cut at the ends; their rows."""
    rng = np.random.default_rng(seed)
    drawn = np.ceil(rng.lognormal(np.log(mean) - 0.72, 1.2, size=100 + 4 * int(rows * LONGEST / mean)))
    ends = np.unique(np.concatenate([np.cumsum(drawn), np.arange(1, rows + 1) * LONGEST]))
    lengths = np.diff(ends[ends <= rows * LONGEST], prepend=0).astype(np.int64)
    return lengths, (np.cumsum(lengths) - 1) // LONGEST


def assigned(
    seed: int, ranks: int, micro_batches: int, mean: float, *, growth: float = 1.25, alpha: float = 1.0
) -> Assignment:
    """An assignment where attention takes `alpha` times as long as all else, in a document of LONGEST tokens."""
    lengths, rows = documents_of_step(seed, ranks * micro_batches, mean)
    result = assign(
        lengths,
        lengths + alpha * lengths**2 / LONGEST,
        rows,
        micro_batches=micro_batches,
        ranks=ranks,
        most=int(growth * LONGEST),
    )
    assert np.bincount(result.bins, lengths, ranks * micro_batches).max() <= growth * LONGEST
    return result


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("alpha", [0.25, 1.0])
@pytest.mark.parametrize(("ranks", "micro_batches"), [(4, 1), (8, 1), (8, 4), (64, 4), (64, 8)])
def test_ranks_have_equal_work(ranks: int, micro_batches: int, alpha: float, seed: int) -> None:
    """With one micro-batch, a document may take longer than a rank's share."""
    result = assigned(seed, ranks, micro_batches, LONGEST / 8, alpha=alpha)
    assert result.after <= 1.05 * result.least
    assert result.before > 1.02
    if micro_batches > 1:
        assert result.least < 1.001


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("growth", [1.0, 1.25])
def test_an_assignment_is_never_worse(seed: int, growth: float) -> None:
    """Some documents are so long that they fit in one way only."""
    result = assigned(seed, 4, 2, LONGEST / 1.2, growth=growth)
    assert 1.0 <= result.least <= result.after <= result.before


def test_without_room_it_stays_as_it_was_read() -> None:
    lengths = np.array([6, 4, 6, 4, 5, 5])
    read = np.array([0, 0, 1, 1, 2, 2])
    result = assign(lengths, lengths**2.0, read, micro_batches=1, ranks=3, most=10)
    assert result.bins.tolist() == read.tolist()
    assert result.after == result.before > result.least


def test_long_documents_share_a_micro_batch() -> None:
    """Two of cost 8 and much of cost 1: the other micro-batch has only the short ones."""
    costs = np.array([8.0, 1.0, 8.0, *[1.0] * 7])
    result = assign(costs.astype(int), costs, np.arange(10) % 4, micro_batches=2, ranks=2, most=100)
    work = np.bincount(result.bins, costs, 4).reshape(2, 2)
    assert sorted(work.tolist()) == [[4.0, 4.0], [8.0, 8.0]]


def test_the_picture() -> None:
    costs, read = np.array([6, 3, 2, 2, 3, 2, 5, 1]), np.array([0, 0, 2, 2, 1, 1, 3, 3])
    result = assign(costs, costs.astype(float), read, micro_batches=2, ranks=2, most=100)
    time = costs.sum() / 2
    assert (result.before * time, result.after * time) == (15, 13)


def test_no_documents() -> None:
    none = np.zeros(0, int)
    assert assign(none, none * 1.0, none, micro_batches=2, ranks=2, most=8).bins.tolist() == []


@pytest.mark.parametrize("window", [None, 300])
def test_costs_are_those_of_the_model_in_whole_tiles(window: int | None) -> None:
    """flops_per_token is of a sequence that is one document."""
    flops: Callable[[int], tuple[float, float]] = replace(FLAVORS["debugmodel"], sliding_window=window).flops_per_token
    costs = document_costs(flops, 1000)
    lengths = np.array([128, 256, 896])
    np.testing.assert_allclose(costs(lengths), [n * flops(int(n))[1] for n in lengths])
    linear = 2 * flops(1)[0] - flops(2)[0]
    np.testing.assert_allclose(costs(np.array([129, 200])) - linear * np.array([129, 200]), costs(256) - linear * 256)
    assert costs(np.array([0])) == 0
