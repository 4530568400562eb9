"""The scan of the states of linear attention over the fragments of all ranks, in the order of the tokens.

Each fragment has an affine map of the state, S -> bias + transition @ S, which the rank of its rows computes. A rank
wants the states before its own fragments. In the backward, from the end, it wants the gradients of the states after
them. Two ways:

    gathered    a rank gets the maps of all fragments before its last one, and folds them (LASP-2, arXiv 2502.07563)
    in turn     a rank gets the state before its fragment from the rank of the fragment before, and sends on the state
                after it; in blocks of the columns of V, so that many ranks work at once (ZeCO, arXiv 2507.01004)

    fragments 0 1 2 on three ranks, blocks a b c:     step    0    1    2    3
                                                      0 -> 1  a    b    c
                                                      1 -> 2       a    b    c

In turn a rank sends a state for each of its fragments, whatever the number of ranks, but it takes one step for each
fragment and block. So small maps are gathered: if all of them take at most GATHERED_BYTES.

With deterministic algorithms there are no maps: a map of many chunks rounds differently from one chunk after another.
Each rank waits for the state before its fragment and goes through its chunks as one process does (`InOrder`). All
layouts cut the sequence into the same chunks (`aligned`).
"""

import math
from functools import lru_cache

import torch
from torch import Tensor

from longshard.context.execution.build import own_group
from longshard.context.execution.linear_states import KnownStates, changed, stacked
from longshard.sharding.exchange import Transfer, send_receive
from longshard.sharding.layout import AxisLayout
from longshard.sharding.ranges import Wanted, union
from longshard.sharding.rows import Axis, fetch

GATHERED_BYTES = 64 << 20
"""At 50 GB/s they take 1.3 ms, as long as some forty messages of a small block."""
BLOCKS = 8


@lru_cache(maxsize=64)
def fragments_of(layout: AxisLayout) -> AxisLayout:
    """Return the layout of the fragments of all ranks, in the order of their tokens: a row is a fragment.

    Args:
        layout: The layout of the tokens.
    """
    owners = sorted(
        (start, rank) for rank, ranges in enumerate(layout.ranges) for start, _ in ranges
    )
    shards = (
        union((i, i + 1) for i, (_, owner) in enumerate(owners) if owner == rank)
        for rank in range(layout.degree)
    )
    return AxisLayout("fragments", len(owners), tuple(shards))


@lru_cache(maxsize=64)
def aligned(layout: AxisLayout, size: int) -> AxisLayout:
    """Return the layout with each cut rounded down to a multiple of `size`, and the end of the sequence unchanged.

    A rank owns the chunks whose last tokens it had. A rank may own no token. Ranges are in tokens.

    Args:
        layout: The layout of the tokens.
        size: Number of tokens of a chunk.
    """
    shards = (
        union(
            (start // size * size, stop if stop == layout.length else stop // size * size)
            for start, stop in ranges
        )
        for ranges in layout.ranges
    )
    return AxisLayout(f"{layout.name} in chunks of {size}", layout.length, tuple(shards))


class InOrder(KnownStates):
    """States that go from fragment to fragment, and from rank to rank, one after another; a collective.

    Args:
        zero: The state before the first fragment, (B, H, K, V).
        axis: Has a row for each fragment of all ranks.
        reverse: Whether states go from the last fragment to the first.
    """

    def __init__(self, zero: Tensor, axis: Axis, *, reverse: bool) -> None:
        self.zero = zero
        self._axis = axis
        self._step = -1 if reverse else 1
        self._owners = _owners(axis.layout)
        self._own = axis.layout.indices(axis.rank).tolist()
        self._last = zero
        self._group = own_group(axis.group, "states", zero.device.type)

    def before(self, fragment: int) -> Tensor:
        """Return the state before a fragment, (B, H, K, V): the last state that `after` got, or one of another rank.

        A state of another rank is received, which waits for it. Before the first fragment in this direction, the state
        is zeros. Call `before` and `after` in turn, for one fragment after the other in this direction.

        Args:
            fragment: The number of the fragment on this rank.
        """
        state = self._last
        sender = self._rank(fragment, -self._step)
        if sender is None:
            return self.zero
        if sender != self._axis.rank:
            state = torch.empty_like(self.zero)
            self._send_or_receive(state, sender, is_send=False)
        return state

    def after(self, fragment: int, state: Tensor) -> None:
        """Take the state after a fragment; send it if the next fragment is on another rank.

        Args:
            fragment: The number of the fragment on this rank.
            state: The state, (B, H, K, V).
        """
        self._last = state
        receiver = self._rank(fragment, self._step)
        if receiver is not None and receiver != self._axis.rank:
            self._send_or_receive(state.contiguous(), receiver, is_send=True)

    def _send_or_receive(self, state: Tensor, rank: int, *, is_send: bool) -> None:
        send_receive(
            [Transfer(state, rank, is_send=is_send)], self._group, kind="states"
        ).wait()

    def _rank(self, fragment: int, step: int) -> int | None:
        """Return the rank of the next fragment (step 1), or of the one before (step -1); None at an end."""
        number = self._own[fragment] + step
        return self._owners[number] if 0 <= number < len(self._owners) else None


def is_gathered(fragments: AxisLayout, map_bytes: int) -> bool:
    """Return whether ranks gather the maps; else they send states in turn.

    Args:
        fragments: The layout of the fragments.
        map_bytes: Bytes of one map.
    """
    return fragments.length * map_bytes <= GATHERED_BYTES


def states_before(maps: Tensor, axis: Axis, v_dim: int, *, reverse: bool) -> Tensor:
    """Return the states before this rank's fragments, (B, F, H, K, V); a collective. The first state of all is zero.

    Args:
        maps: The maps of this rank's fragments, [bias | transition]: (B, F, H, K, V + K), or (B, F, H, K, V + 1) with
            the diagonal of the transition.
        axis: Has a row for each fragment of all ranks.
        v_dim: V.
        reverse: Whether states go from the last fragment to the first, with transposed transitions.
    """
    map_bytes = math.prod((maps.shape[0], *maps.shape[2:])) * maps.itemsize
    scan = _gathered if is_gathered(axis.layout, map_bytes) else _in_turn
    return scan(maps, axis, v_dim, reverse=reverse)


def maps_before(fragments: AxisLayout) -> Wanted:
    """Return the maps that each rank wants: the maps of all fragments before its last one.

    Args:
        fragments: The layout of the fragments.
    """
    return tuple(((0, ranges[-1][1] - 1),) if ranges else () for ranges in fragments.ranges)


def maps_after(fragments: AxisLayout) -> Wanted:
    """Return the reverse maps that each rank wants: the maps of all fragments after its first one.

    Args:
        fragments: The layout of the fragments.
    """
    return tuple(
        ((ranges[0][0] + 1, fragments.length),) if ranges else () for ranges in fragments.ranges
    )


def _gathered(maps: Tensor, axis: Axis, v_dim: int, *, reverse: bool) -> Tensor:
    own = axis.layout.indices(axis.rank).tolist()
    last = axis.layout.length - 1
    rows = fetch(maps, axis, (maps_after if reverse else maps_before)(axis.layout), 1)
    if reverse:
        own = [last - i for i in reversed(own)]
        rows = rows.flip(1)
    state = maps.new_zeros(maps.shape[0], *maps.shape[2:4], v_dim)
    own_states = []
    for number in range(own[-1] + 1 if own else 0):
        if number in own:
            own_states.append(state)
        if number < rows.shape[1]:
            state = changed(state, rows[:, number], reverse=reverse)
    states = stacked(own_states, state)
    return states.flip(1) if reverse else states


def _in_turn(maps: Tensor, axis: Axis, v_dim: int, *, reverse: bool) -> Tensor:
    owners = _owners(axis.layout)[:: -1 if reverse else 1]  # a place is an index of this list
    own = axis.layout.indices(axis.rank).tolist()
    last = len(owners) - 1
    changes = {last - n if reverse else n: maps[:, i] for i, n in enumerate(own)}
    zero = maps.new_zeros(maps.shape[0], *maps.shape[2:4], v_dim)
    states = {place: zero.clone() for place in changes}
    size = -(-v_dim // BLOCKS)
    blocks = [slice(first, min(first + size, v_dim)) for first in range(0, v_dim, size)]
    group = own_group(axis.group, "states", maps.device.type)
    for step in range(last + len(blocks) - 1):
        transfers = []
        arriving = []
        for place in range(max(step - len(blocks) + 1, 0), min(step + 1, last)):
            sender, receiver = owners[place : place + 2]
            columns = blocks[step - place]
            if sender == axis.rank:
                change = changes[place]
                change = torch.cat((change[..., columns], change[..., v_dim:]), -1)
                block = changed(states[place][..., columns], change, reverse=reverse)
                if receiver == axis.rank:
                    states[place + 1][..., columns] = block
                else:
                    transfers.append(Transfer(block, receiver, is_send=True))
            elif receiver == axis.rank:
                target = states[place + 1][..., columns]
                arriving.append(
                    (target, torch.empty_like(target, memory_format=torch.contiguous_format))
                )
                transfers.append(Transfer(arriving[-1][1], sender, is_send=False))
        send_receive(transfers, group, kind="states").wait()
        for target, block in arriving:
            target.copy_(block)
    in_order = [states[place] for place in sorted(states, reverse=reverse)]
    return stacked(in_order, zero)


def _owners(fragments: AxisLayout) -> list[int]:
    """Return the rank of each fragment, in the order of the tokens."""
    ranks = range(fragments.degree)
    owners = {i: rank for rank in ranks for i in fragments.indices(rank).tolist()}
    return [owners[i] for i in range(fragments.length)]
