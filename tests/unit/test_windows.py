"""Laws of windows over sharded axes, by hypothesis: each output has one owner, which reads the rows that it needs."""

from collections import Counter

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from longshard.sharding.layout import AxisLayout
from longshard.sharding.ranges import intersection, size, union
from longshard.sharding.rows import plan_pieces, plan_rows, put_together
from longshard.sharding.windows import (
    Window,
    WindowPlan,
    transposed_plan,
    window_plan,
)

EXAMPLES = (100, pytest.param(2000, marks=pytest.mark.slow))


@st.composite
def layouts(draw: st.DrawFn, longest: int = 24) -> AxisLayout:
    """Any owner of each row: shards may be empty, and have many ranges."""
    degree = draw(st.integers(1, 5))
    owners = draw(st.lists(st.integers(0, degree - 1), min_size=1, max_size=longest))
    if draw(st.booleans()):
        owners.sort()
    rows = (union((row, row + 1) for row, owner in enumerate(owners) if owner == rank) for rank in range(degree))
    return AxisLayout("drawn", len(owners), tuple(rows))


windows = st.builds(
    Window,
    kernel=st.integers(1, 5),
    stride=st.integers(1, 4),
    before=st.integers(0, 4),
    after=st.integers(0, 4),
    dilation=st.integers(1, 3),
    extra=st.just(0),
    ceil=st.booleans(),
)


def rows_of(plan: WindowPlan, rank: int) -> set[int]:
    return {row for tile in plan.tiles[rank] for row in range(*tile.inputs)}


def check_partition(plan: WindowPlan, total: int) -> None:
    """Every output is in one tile, and the layout of the result says whose."""
    computed = Counter(o for tiles in plan.tiles for tile in tiles for o in range(*tile.outputs))
    assert computed == Counter(range(total))
    assert plan.layout.length == total
    for rank, tiles in enumerate(plan.tiles):
        assert plan.layout.ranges[rank] == union(tile.outputs for tile in tiles)


@pytest.mark.parametrize("examples", EXAMPLES)
def test_windows_read_the_rows_of_their_outputs(examples: int) -> None:
    @settings(max_examples=examples, deadline=None)
    @given(layouts(), windows)
    def law(layout: AxisLayout, window: Window) -> None:
        assume(layout.length + window.before + window.after > window.reach)
        steps = range(0, layout.length + window.before + window.after - window.reach, window.stride)
        remainder = layout.length + window.before + window.after - window.reach - 1 - steps[-1]
        fits = window.ceil and remainder and steps[-1] + window.stride < layout.length + window.before
        # As in PyTorch: with `ceil`, one more window if it does not start in the padding after the end.
        starts_beyond = window.ceil and not remainder and steps[-1] >= layout.length + window.before
        total = len(steps) + fits - starts_beyond
        assume(total)
        plan = window_plan(layout, window)
        check_partition(plan, total)
        for rank, tiles in enumerate(plan.tiles):
            for tile in tiles:
                taps = {
                    o * window.stride - window.before + j * window.dilation
                    for o in range(*tile.outputs)
                    for j in range(window.kernel)
                }
                assert (min(taps), max(taps) + 1) == tile.inputs  # no row too many, none too few
            owned = {row for part in layout.ranges[rank] for row in range(*part)}
            for output in (o for tile in tiles for o in range(*tile.outputs)):
                row = output * window.stride
                assert row in owned or row >= layout.length  # behind the end the owner of the last row computes

    law()


@pytest.mark.parametrize("examples", EXAMPLES)
def test_transposed_windows_read_every_row_that_adds_to_their_outputs(examples: int) -> None:
    @settings(max_examples=examples, deadline=None)
    @given(layouts(), windows)
    def law(layout: AxisLayout, window: Window) -> None:
        assume((layout.length - 1) * window.stride + window.reach + 1 > window.before + window.after)
        plan = transposed_plan(layout, window)
        whole = torch.empty(1, 1, layout.length, device="meta"), torch.empty(1, 1, window.kernel, device="meta")
        outputs = F.conv_transpose1d(*whole, stride=window.stride, dilation=window.dilation).shape[-1]
        check_partition(plan, outputs - window.before - window.after)
        for tiles in plan.tiles:
            for tile in tiles:
                assert 0 <= tile.inputs[0] < tile.inputs[1] <= layout.length
                for row in range(layout.length):
                    reached = {row * window.stride - window.before + j * window.dilation for j in range(window.kernel)}
                    assert not reached & {*range(*tile.outputs)} or row in range(*tile.inputs)

    law()


@st.composite
def wishes(draw: st.DrawFn) -> tuple[AxisLayout, tuple[tuple[tuple[int, int], ...], ...]]:
    """A layout, and the ranges that each rank wants of it: any, which may be empty, or often its own."""
    layout = draw(layouts(12))
    parts = st.lists(st.tuples(st.integers(-15, 25), st.integers(0, 14)).map(lambda p: (p[0], sum(p))), max_size=3)
    wanted = [own if draw(st.booleans()) else tuple(draw(parts)) for own in layout.ranges]
    return layout, tuple(wanted)


@pytest.mark.parametrize("examples", EXAMPLES)
def test_a_plan_of_rows_keeps_the_wanted_rows_and_knows_who_lacks_some(examples: int) -> None:
    @settings(max_examples=examples, deadline=None)
    @given(wishes(), st.booleans())
    def law(drawn: tuple, periodic: bool) -> None:
        layout, wanted = drawn
        sources, source = plan_rows(layout.ranges, layout.length, wanted, periodic)
        lacks = False
        for own, before, after in zip(layout.ranges, wanted, sources, strict=True):
            asked = [row % layout.length if periodic else row for part in before for row in range(*part)]
            assert [row for part in after for row in range(*part)] == asked
            owned = {row for part in own for row in range(*part)}
            lacks |= any(0 <= row < layout.length and row not in owned for row in asked)
        for own, after in zip(layout.ranges, sources, strict=True):
            if lacks:
                break
            rows = torch.tensor([row for part in own for row in range(*part)], dtype=torch.long)
            taken = put_together(rows + 1, plan_pieces(own, layout.length, after), 0) - 1
            wanted_rows = [row for part in after for row in range(*part)]
            assert taken.tolist() == [row if 0 <= row < layout.length else -1 for row in wanted_rows]
        assert (source == "ranks") == lacks
        assert source != "own" or sources == layout.ranges

    law()


@pytest.mark.parametrize("examples", EXAMPLES)
def test_stride_one_and_as_many_outputs_keep_the_layout(examples: int) -> None:
    @settings(max_examples=examples, deadline=None)
    @given(layouts(), st.integers(1, 5), st.integers(1, 3), st.data())
    def law(layout: AxisLayout, kernel: int, dilation: int, data: st.DataObject) -> None:
        before = data.draw(st.integers(0, dilation * (kernel - 1)))
        window = Window(kernel, 1, before, dilation * (kernel - 1) - before, dilation)
        plan = window_plan(layout, window)
        assert plan.layout == layout
        for rank, tiles in enumerate(plan.tiles):
            assert union(tile.outputs for tile in tiles) == layout.ranges[rank]
            inside = intersection(union(plan.wanted[rank]), ((0, layout.length),))
            assert size(intersection(inside, layout.ranges[rank])) == size(layout.ranges[rank])  # halo and own rows

    law()
