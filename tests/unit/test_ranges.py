"""Range algebra against sets of numbers."""

from bisect import bisect_left
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from longshard.sharding.ranges import Offsets, Range, Ranges, difference, intersection, size, union

any_ranges = st.lists(
    st.tuples(st.integers(-5, 40), st.integers(-3, 6)).map(lambda x: (x[0], x[0] + x[1])), max_size=20
)
ranges = any_ranges.map(union)


def numbers(parts: list[Range] | Ranges) -> set[int]:
    return {number for start, stop in parts for number in range(start, stop)}


def is_canonical(parts: Ranges) -> bool:
    """Ascending, disjoint, none empty, no two touching."""
    borders = [border for part in parts for border in part]
    return isinstance(parts, tuple) and all(a < b for a, b in pairwise(borders))


@given(any_ranges)
def test_union_takes_anything(parts: list[Range]):
    joined = union(parts)
    assert is_canonical(joined)
    assert numbers(joined) == numbers(parts)
    assert size(joined) == len(numbers(parts))
    assert union(joined) == joined


@given(ranges, ranges)
def test_intersection_and_difference_are_those_of_sets(a: Ranges, b: Ranges):
    assert numbers(intersection(a, b)) == numbers(a) & numbers(b)
    assert numbers(difference(a, b)) == numbers(a) - numbers(b)
    assert is_canonical(intersection(a, b))
    assert is_canonical(difference(a, b))


@given(ranges, ranges)
def test_what_is_common_and_what_is_not_make_the_whole(a: Ranges, b: Ranges):
    assert union((*intersection(a, b), *difference(a, b))) == a
    assert intersection(a, b) == intersection(b, a) == difference(a, difference(a, b))


@given(ranges, st.integers(-10, 50))
def test_an_offset_counts_the_numbers_below(parts: Ranges, number: int):
    assert Offsets(parts)(number) == bisect_left(sorted(numbers(parts)), number)


@given(ranges, any_ranges)
def test_places_are_those_in_the_line_of_numbers(parts: Ranges, wanted: list[Range]):
    line = sorted(numbers(parts))
    inside = intersection(parts, union(wanted))
    places = Offsets(parts).places(inside)
    assert is_canonical(places)
    assert [line[place] for place in sorted(numbers(places))] == sorted(numbers(inside))


@given(ranges, st.integers(0, 60), st.integers(0, 60))
def test_ranges_at_places_undo_it(parts: Ranges, start: int, stop: int):
    result = tuple(Offsets(parts).ranges_at(start, stop))
    assert is_canonical(result)
    assert sorted(numbers(result)) == sorted(numbers(parts))[start:stop]


def test_places_that_follow_each_other_are_one():
    assert Offsets(((10, 20), (30, 40))).places([(15, 20), (30, 32), (39, 40)]) == ((5, 12), (19, 20))


@given(ranges, st.integers(-10, 50), st.integers(0, 60))
def test_borders_are_those_between_the_ends(parts: Ranges, start: int, length: int):
    borders = [border for part in parts for border in part if start <= border <= start + length]
    assert list(Offsets(parts).borders(start, start + length)) == borders
