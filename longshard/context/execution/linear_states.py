"""States of linear attention before fragments and runs, and the affine maps that change them.

A map [bias | transition], (..., K, V + K), changes a state S, (..., K, V), to bias + transition @ S. A diagonal
transition is one column: the map is (..., K, V + 1).
"""

import torch
from torch import Tensor


class KnownStates:
    """States before fragments that are known.

    Args:
        states: The states, (B, F, H, K, V). `zero` is a state of zeros, (B, H, K, V).
    """

    def __init__(self, states: Tensor) -> None:
        self.states = states
        self.zero = states.new_zeros(states.shape[0], *states.shape[2:])

    def before(self, fragment: int) -> Tensor:
        """Return the state before a fragment, (B, H, K, V).

        Args:
            fragment: The number of the fragment.
        """
        return self.states[:, fragment]

    def after(self, fragment: int, state: Tensor) -> None:
        """Take the state after a fragment, which other ranks may need (`linear_scan.InOrder`).

        Args:
            fragment: The number of the fragment.
            state: The state, (B, H, K, V).
        """


def stacked(parts: list[Tensor], like: Tensor) -> Tensor:
    """Return one tensor of all fragments, (B, F, H, K, V), also if there are none.

    Args:
        parts: The tensors of the fragments, (B, H, K, V) each.
        like: A tensor of this shape, (B, H, K, V).
    """
    return torch.stack(parts, 1) if parts else like.unsqueeze(1)[:, :0]


def changed(state: Tensor, change: Tensor, *, reverse: bool) -> Tensor:
    """Return the state after a map, (..., K, V).

    Args:
        state: The state before, (..., K, V).
        change: The map, (..., K, V + K) or (..., K, V + 1).
        reverse: Whether the transition is transposed.
    """
    bias, transition = change.split([state.shape[-1], change.shape[-1] - state.shape[-1]], -1)
    return bias + _moved_on(transition, state, reverse=reverse)


def _moved_on(transition: Tensor, state: Tensor, *, reverse: bool = False) -> Tensor:
    """Return the product of a transition, (..., K, K), or a diagonal one, (..., K, 1), with a state, (..., K, V).

    reverse: whether the transition is transposed.
    """
    if transition.shape[-1] == 1:
        return transition * state
    return (transition.mT if reverse else transition) @ state


def through_runs(state: Tensor, maps: Tensor | None, *, reverse: bool) -> tuple[Tensor, Tensor]:
    """Return the states before the runs of a fragment, (B, H, R, K, V), and the state after the fragment.

    The first result has the order of the runs, also with `reverse`.

    Args:
        state: The state before the fragment, (B, H, K, V).
        maps: The maps of the runs, (B, H, R, K, V + width). None for one run: then the second result is `state`, not
            the state after the fragment.
        reverse: Whether to go from the last run to the first, with transposed transitions.
    """
    if maps is None:
        return state.unsqueeze(2), state
    states = []
    for change in reversed(maps.unbind(2)) if reverse else maps.unbind(2):
        states.append(state)
        state = changed(state, change, reverse=reverse)
    return torch.stack(states[::-1] if reverse else states, 2), state


def joined(maps: Tensor, v_dim: int) -> Tensor:
    """Return the map of a fragment, (B, H, K, V + width).

    Args:
        maps: The maps of its runs, (B, H, R, K, V + width).
        v_dim: V.
    """
    whole, *others = maps.unbind(2)
    for change in others:
        whole = _moved_on(change[..., v_dim:], whole)
        whole[..., :v_dim] += change[..., :v_dim]
    return whole
