"""Laws of `balanced`: equal work in tiles, few keys that are sent, documents whole."""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longshard.context.planning.balance import Work, balanced, build_layout
from longshard.context.planning.mask import Mask, by_sequence, causal, documents, sliding_window
from longshard.context.planning.tiles import Needs
from longshard.sharding.layout import AxisLayout, contiguous, head_tail
from longshard.sharding.ranges import difference, size, union

PAGE = Path(__file__).resolve().parents[2] / "docs" / "context_parallelism.md"
TILE = 128
MOST_IMBALANCED = 1.05
TRAFFIC_OF_HEAD_TAIL, TRAFFIC_OF_DEALING = 1.3, 0.3

Shape = tuple[int, int, float, float]
SHAPES: list[Shape] = [(65536, 4, 8, 1), (65536, 8, 8, 1), (131072, 8, 9, 1), (131072, 8, 6.5, 1), (131072, 8, 7, 1.5)]
"""Tokens, ranks, and log-normal lengths of documents: the logarithm's mean and deviation."""
SEEDS = range(8)


def packed(seq_len: int, mean: float, deviation: float, seed: int) -> Mask:
    """Documents of mixed length that fill a sequence, the last one cut."""
    rng, lengths = np.random.default_rng(seed), list[int]()
    while sum(lengths) < seq_len:
        lengths.append(min(int(rng.lognormal(mean, deviation)) + 1, seq_len - sum(lengths)))
    return documents(lengths, is_causal=True)


def parts_of(layout: AxisLayout, mask: Mask, rank: int) -> list[tuple[int, int, int]]:
    """The parts of documents that a rank owns: start, stop, and the first key of the document."""
    parts = []
    for start, stop in layout.repeated(mask.sequences).ranges[rank]:
        for band in mask.bands:
            if max(start, band.q_start) < min(stop, band.q_stop):
                parts.append((max(start, band.q_start), min(stop, band.q_stop), band.kv_start))
    return parts


def tiles_of_rank(layout: AxisLayout, mask: Mask, rank: int) -> int:
    """The tiles that a kernel computes for a rank, if it cuts each part of a document again."""
    count = 0
    for start, stop, first in parts_of(layout, mask, rank):
        ends = np.minimum(np.arange(start, stop, TILE) + TILE, stop)
        count += int((-(-(ends - first) // TILE)).sum())
    return count


def imbalance(layout: AxisLayout, mask: Mask) -> float:
    """The most tiles of a rank, over the mean."""
    tiles = [tiles_of_rank(layout, mask, rank) for rank in range(layout.degree)]
    return max(tiles) / np.mean(tiles)


def imbalance_of_pairs(layout: AxisLayout, mask: Mask) -> float:
    """The most visible pairs of a rank, over the mean."""
    work = mask.work()
    pairs = [int(work[layout.indices(rank)].sum()) for rank in range(layout.degree)]
    return max(pairs) / np.mean(pairs)


def rows_sent(layout: AxisLayout, mask: Mask) -> int:
    """Return the number of keys that reach ranks that do not own them, counted once for each rank."""
    needs = Needs(layout, layout, mask)
    return sum(size(difference(needs.keys(rank), needs.kv_ranges[rank])) for rank in range(layout.degree))


def assigned(mask: Mask, degree: int, *, by_cost: bool = True) -> AxisLayout:
    """32 blocks a rank, assigned whatever the documents: the dearest first to who has done least; or round robin."""
    block = mask.q_len // degree // 32
    blocks = [(start, start + block) for start in range(0, mask.q_len, block)]
    work, loads = mask.work(), [0] * degree
    shards: list[list[tuple[int, int]]] = [[] for _ in loads]
    if by_cost:
        blocks.sort(key=lambda part: -work[slice(*part)].sum())
    for number, part in enumerate(blocks):
        open_ones = [rank for rank in range(degree) if len(shards[rank]) < 32]
        rank = min(open_ones, key=loads.__getitem__) if by_cost else number % degree
        shards[rank].append(part)
        loads[rank] += int(work[slice(*part)].sum())
    return AxisLayout("assigned", mask.q_len, tuple(map(union, shards)))


LAYOUTS: dict[str, Callable[[Mask, int], AxisLayout]] = {
    "balanced": balanced,
    "head_tail": lambda mask, degree: head_tail(mask.q_len, degree),
    "by cost": assigned,
    "round robin": partial(assigned, by_cost=False),
}


@cache
def measured(shape: Shape, name: str) -> tuple[float, float]:
    """The most imbalanced of all draws, and the mean of the keys that are sent, over the tokens."""
    seq_len, degree, mean, deviation = shape
    masks = [packed(seq_len, mean, deviation, seed) for seed in SEEDS]
    layouts = [LAYOUTS[name](mask, degree) for mask in masks]
    most = max(map(imbalance, layouts, masks))
    return most, sum(map(rows_sent, layouts, masks)) / len(masks) / seq_len


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_all_ranks_compute_as_many_tiles(shape: Shape) -> None:
    assert measured(shape, "balanced")[0] <= MOST_IMBALANCED
    assert measured(shape, "head_tail")[0] > 1.5


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_keys_are_sent_about_as_with_head_tail(shape: Shape) -> None:
    keys = {name: measured(shape, name)[1] for name in LAYOUTS}
    assert keys["balanced"] <= TRAFFIC_OF_HEAD_TAIL * keys["head_tail"]
    assert keys["balanced"] <= TRAFFIC_OF_DEALING * keys["by cost"]
    assert keys["round robin"] > 2 * TRAFFIC_OF_HEAD_TAIL * keys["head_tail"]


def test_the_page_has_these_figures() -> None:
    most = {name: max(measured(shape, name)[0] for shape in SHAPES) for name in ("balanced", "head_tail")}
    cell = (
        f"at most {most['balanced']:.2f} with 8,192 tokens a rank, where `head_tail` has up to {most['head_tail']:.1f}"
    )
    assert cell in PAGE.read_text()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_parts_are_at_least_a_block(shape: Shape) -> None:
    seq_len, degree, mean, deviation = shape
    for seed in SEEDS:
        mask = packed(seq_len, mean, deviation, seed)
        layout = balanced(mask, degree)
        for rank in range(degree):
            for start, stop, first in parts_of(layout, mask, rank):
                assert stop - start >= 256 or start - first < 256


@settings(deadline=None)
@given(st.lists(st.integers(1, 3000), min_size=1, max_size=60), st.integers(1, 12))
def test_most_documents_stay_whole(lengths: list[int], degree: int) -> None:
    mask = documents(lengths, is_causal=True)
    layout = balanced(mask, degree)
    holders = [{first for _, _, first in parts_of(layout, mask, rank)} for rank in range(degree)]
    assert sum(map(len, holders)) <= len(lengths) + 2 * degree - 2


@pytest.mark.parametrize("degree", [2, 4, 8, 64])
def test_a_single_document_is_cut_as_head_tail_cuts_it(degree: int) -> None:
    mask = causal(4096 * degree)
    assert {*balanced(mask, degree).ranges} == {*head_tail(mask.q_len, degree).ranges}
    assert build_layout("balanced", mask.q_len, degree) == balanced(mask, degree)


def test_documents_that_fill_ranks_are_not_cut() -> None:
    for lengths in ([8192] * 4, [5120, 3072, 3072, 5120] * 2):
        mask = documents(lengths, is_causal=True)
        assert rows_sent(balanced(mask, 4), mask) == 0
        assert rows_sent(head_tail(mask.q_len, 4), mask) > 0


def test_a_long_document_goes_with_short_ones() -> None:
    """Half of the tokens, and nearly all work, are of one document: every rank has a part, and short documents."""
    mask = documents([65536, *[512] * 128], is_causal=True)
    layout = balanced(mask, 8)
    assert imbalance(layout, mask) <= MOST_IMBALANCED
    # The least for eight ranks with equal work is to cut it in one piece each, at its square roots.
    least = sum(65536 * np.sqrt(np.arange(1, 9) / 8)) - 65536
    assert rows_sent(layout, mask) < 1.05 * least
    assert rows_sent(assigned(mask, 8), mask) > 1.3 * least


def test_short_documents_stay_whole() -> None:
    mask = documents([300] * 436 + [272], is_causal=True)
    assert rows_sent(balanced(mask, 8), mask) < 7 * 300
    assert imbalance(balanced(mask, 8), mask) <= MOST_IMBALANCED


def test_tiles_of_short_documents_count_whole() -> None:
    """Documents of 16 tokens and of 128 have a tile each: a token of the short ones costs eight times as much."""
    mask = documents([*[16] * 1024, *[128] * 128, *[2048] * 16], is_causal=True)
    assert imbalance(balanced(mask, 4), mask) <= MOST_IMBALANCED
    work = mask.work()
    assert work[:16384].mean() < 0.2 * work[16384:32768].mean()  # and in pairs it costs less


@pytest.mark.parametrize("degree", [4, 8])
def test_sequences_of_a_batch_are_balanced_together(degree: int) -> None:
    for seed in SEEDS:
        mask = by_sequence([packed(65536, 8, 1, 100 * seed + number) for number in range(4)])
        layout = balanced(mask, degree)
        assert imbalance(layout, mask) <= MOST_IMBALANCED
        assert rows_sent(layout, mask) < 1.3 * rows_sent(head_tail(65536, degree), mask)


def test_the_keys_of_a_window_are_sent_over_each_cut() -> None:
    mask = sliding_window(65536, 1024)
    layout = balanced(mask, 8)
    assert rows_sent(layout, mask) <= 14 * 1023
    assert imbalance_of_pairs(layout, mask) <= MOST_IMBALANCED


def test_an_arc_may_cross_the_ends_of_the_sequence() -> None:
    """The work is in the middle third, which any two thirds from end to end would have whole."""
    middle = documents([*[64] * 128, 8192, *[64] * 128], is_causal=True)
    mask = by_sequence([middle, sliding_window(3 * 8192, 64)])  # the window links all documents
    assert imbalance_of_pairs(balanced(mask, 3), mask) <= MOST_IMBALANCED


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(1, 30), st.sampled_from([1, 4]))
def test_work_is_that_of_the_mask(lengths: list[int], window: int, tile: int) -> None:
    length = sum(lengths)
    masks = [documents(lengths, is_causal=True), sliding_window(length, window) & documents(lengths[::-1])]
    work, tokens = Work(by_sequence(masks), tile), np.arange(length)
    for number, mask in enumerate(masks):
        assert (work.first_seen(tokens)[number] == tokens + 1 - mask.work()).all()
    pairs = by_sequence(masks).work()
    token_work = work.of(np.stack([tokens, tokens + 1], axis=1))
    assert (token_work == pairs).all() if tile == 1 else token_work.sum() > pairs.sum()


def test_one_piece_each_is_not_balanced() -> None:
    mask = packed(131072, 9, 1, 0)
    assert imbalance(contiguous(131072, 8), mask) > 1.5
