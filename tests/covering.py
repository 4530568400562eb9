"""Covering arrays: few rows of settings that contain every allowed pair of values.

A product of twenty settings has millions of rows. Almost all faults need one value, or two together (Kuhn, Wallace and
Gallo, "Software fault interactions and implications for software testing", 2004).
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations

Row = dict[str, str]
Pair = tuple[tuple[str, str], tuple[str, str]]


def pairs_of(row: Mapping[str, str]) -> Iterator[Pair]:
    """Yield every two settings of a row."""
    yield from combinations(sorted(row.items()), 2)


def covering_array(
    axes: Mapping[str, Sequence[str]], allowed: Callable[[Row], bool], seed: int = 0, tries: int = 40
) -> list[Row]:
    """Return rows that contain every pair of values which some allowed row contains.

    The algorithm is greedy: each row starts from a missing pair, and takes for every other setting the value that
    covers most missing pairs. The same seed gives the same rows.

    Args:
        axes: Values of each setting.
        allowed: Whether a row can be completed; the row may lack settings.
        seed: Seed of the random order.
        tries: Rows that are drawn for each missing pair.
    """
    draw = random.Random(seed)
    missing = {
        pair
        for (a, a_values), (b, b_values) in combinations(sorted(axes.items()), 2)
        for x in a_values
        for y in b_values
        for pair in [((a, x), (b, y))]
    }
    rows: list[Row] = []
    for start in sorted(missing):
        if start not in missing:
            continue
        candidates = [row for _ in range(tries) if (row := _filled(dict(start), axes, allowed, missing, draw))]
        missing.discard(start)  # or no row can hold it
        if candidates:
            best = max(candidates, key=lambda row: sum(pair in missing for pair in pairs_of(row)))
            missing.difference_update(pairs_of(best))
            rows.append(best)
    return _most_first(rows)


def _most_first(rows: list[Row]) -> list[Row]:
    """Return the same rows in another order: each next row has the most pairs that earlier rows lack."""
    ordered: list[Row] = []
    seen: set[Pair] = set()
    left = list(rows)
    while left:
        best = max(left, key=lambda row: len(set(pairs_of(row)) - seen))
        left.remove(best)
        seen.update(pairs_of(best))
        ordered.append(best)
    return ordered


def _filled(
    row: Row, axes: Mapping[str, Sequence[str]], allowed: Callable[[Row], bool], missing: set[Pair], draw: random.Random
) -> Row | None:
    """Return the row with a value for every axis, or None if some axis has no allowed value.

    Values that cover more missing pairs come first.
    """
    order = [axis for axis in axes if axis not in row]
    draw.shuffle(order)
    if not allowed(row):
        return None
    for axis in order:
        values = [value for value in axes[axis] if allowed(row | {axis: value})]
        if not values:
            return None
        draw.shuffle(values)

        def gain(value: str, axis: str = axis) -> int:
            return sum(tuple(sorted(((axis, value), other))) in missing for other in row.items())

        row[axis] = max(values, key=gain)
    return row
