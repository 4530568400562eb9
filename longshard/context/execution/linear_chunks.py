"""The arithmetic of linear attention over chunks of tokens, on one rank.

A head has a state S, (K, V). Token t changes it, and reads it:

    S_t = (I - b_t k_t k_t') Diag(a_t) S_(t-1) + b_t k_t v_t'        o_t = S_t' q_t

with decays a_t in (0, 1], one of the head (Gated DeltaNet, arXiv 2412.06464) or one of each key channel (Kimi Delta
Attention, arXiv 2510.26692). Without b there is no erasure: S_t = Diag(a_t) S_(t-1) + k_t v_t', which is Mamba-2
(arXiv 2405.21060) and other gated linear attention.

In a chunk of C tokens let G be the running sum of log a, and u_t what token t adds along k_t. Then, with the strict
lower triangle A_ts = sum of k_t e^(G_t - G_s) k_s, and the lower triangle P the same with q_t,

    (I + b A) u = b (v - k e^G S)        o = q e^G S + P u        S' = e^(G_C) S + (k e^(G_C - G))' u

so that S' is affine in S. No exponent is above 0 (`linear_pairs.py` says how, with decays of single channels). Where a
document begins, what comes from before is masked, and all else stays as it is.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from longshard.context.execution.linear_pairs import of_decay, pairs, pairs_adjoint

CHUNK = 64
LONGEST_RUN = {"cuda": 32}
"""By device: the most chunks of a fragment that follow one another without runs. Runs take a tenth more arithmetic, and
few launches; on a CPU, where a launch costs little, there are none."""

Fragments = Sequence[tuple[int, int]]
"""(First chunk, end) of each run of tokens that follow one another."""


class Tokens(NamedTuple):
    """The inputs of linear attention: S rows in the order of the sequence, or of a rank.

    q, k: (B, S, H, K); v: (B, S, G, V), H divides G; log_decay: (B, S, G) or (B, S, G, K), at most 0; beta: (B, S, G),
    of the delta rule, None for no erasure; positions: (B, S), 0 where a document begins, None for one document; scale:
    factor of the outputs.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    log_decay: torch.Tensor
    beta: torch.Tensor | None
    positions: torch.Tensor | None
    scale: float


class Inputs(NamedTuple):
    """Tokens in chunks, of one dtype: (B, H, N, C, ...). A token of zeros changes nothing.

    q, k: (..., K); v: (..., V); decay: (..., 1 or K) running sums in the chunk of logarithms; beta: (..., 1), None for
    no erasure; document: (B, 1, N, C), documents that have begun in the chunk so far, None for one document.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    decay: torch.Tensor
    beta: torch.Tensor | None
    document: torch.Tensor | None


Read = tuple[torch.Tensor, torch.Tensor]
"""Gradients of what tokens add, (B, H, N, C, V), and of the states before chunks, (B, H, N, K, V)."""


class Given:
    """States before fragments, by their numbers, that are known: (B, F, H, K, V). zero: one state of zeros."""

    def __init__(self, states: torch.Tensor) -> None:
        self.states = states
        self.zero = states.new_zeros(states.shape[0], *states.shape[2:])

    def before(self, fragment: int) -> torch.Tensor:
        """Return the state before a fragment, (B, H, K, V)."""
        return self.states[:, fragment]

    def behind(self, fragment: int, state: torch.Tensor) -> None:
        """Take the state behind a fragment, which others may need (`linear_scan.InOrder`)."""


class Chunks:
    """What the chunks of a rank need whatever their states are.

    fragments: the chunks of each. run: how many chunks of a fragment follow one another. All runs go on at once, each
    from a state that the maps of those before it give: so that few products, of many runs, follow one another.

        10 chunks, run 4:   0 1 2 3 | 4 5 6 7 | 8 9        steps: 0 4 8, 1 5 9, 2 6, 3 7
    """

    def __init__(self, x: Inputs, fragments: Fragments, run: int) -> None:
        size = x.q.shape[3]
        self.fragments = fragments
        self.run = run
        self.x = x
        self.lower = torch.ones(size, size, dtype=torch.bool, device=x.q.device).tril()
        self.strict = self.lower.tril(-1)
        # masks: through the chunk, from before it, to its end
        self.goes_on = self.begins = self.ends = None
        if x.document is not None:
            same = x.document.unsqueeze(-1) == x.document.unsqueeze(-2)
            self.lower = same & self.lower
            self.strict = same & self.strict
            self.begins = (x.document == 0).unsqueeze(-1)
            last = x.document[..., -1:]
            self.ends = (x.document == last).unsqueeze(-1)
            self.goes_on = (last == 0).unsqueeze(-1)
        self.grown = _masked(x.decay.exp(), self.begins)
        self.rest = _masked((x.decay[..., -1:, :] - x.decay).exp(), self.ends)
        self.through = _masked(x.decay[..., -1:, :].exp(), self.goes_on).mT  # (..., 1 or K, 1)
        self.q_in = x.q * self.grown
        self.k_in = x.k * self.grown
        self.k_out = x.k * self.rest
        self.reads, *among = pairs(
            (x.q,) if x.beta is None else (x.q, x.k), x.k, x.decay, self.lower
        )
        self.new = x.v
        self.erased = None
        if x.beta is not None:
            self.among = among[0].masked_fill(~self.strict, 0)
            # The whole inverse, of which the backward has use too: a solution for each column would cost more.
            one = torch.eye(size, dtype=x.q.dtype, device=x.q.device).expand_as(self.among)
            self.solve = torch.linalg.solve_triangular(
                x.beta * self.among, one, upper=False, unitriangular=True
            )
            solved = self.solve @ (x.beta * torch.cat((x.v, self.k_in), -1))
            self.new, self.erased = solved.split([x.v.shape[-1], x.k.shape[-1]], -1)

    def maps(self) -> list[torch.Tensor]:
        """Return the affine maps of the runs of each fragment, [bias | transition]: (B, H, R, K, V + width).

        The transition has K columns with erasure; without, it is diagonal, and its one column is the diagonal.
        """
        x = self.x
        found = []
        k = x.k.shape[-1]
        v = x.v.shape[-1]
        columns = v + (1 if x.beta is None else k)
        for first, end in self.fragments:
            state = x.k.new_zeros(*x.k.shape[:2], self._runs(first, end), k, columns)
            if x.beta is None:
                state[..., v:] = 1
            else:
                state[..., v:] = torch.eye(k, dtype=state.dtype, device=state.device)
            for at, here in self._steps(first, end):
                old = state[:, :, here]
                new = self.through[:, :, at] * old
                if self.erased is not None:
                    new -= self.k_out[:, :, at].mT @ (self.erased[:, :, at] @ old)
                new[..., :v] += self.k_out[:, :, at].mT @ self.new[:, :, at]
                state = _of_all_runs(new, state)
            found.append(state)
        return found

    def _runs(self, first: int, end: int) -> int:
        return -(-(end - first) // self.run)

    def _steps(self, first: int, end: int) -> Iterator[tuple[slice, slice]]:
        """Yield, one after another, the chunks of a fragment that all its runs go through at once, and these runs."""
        for n in range(first, min(first + self.run, end)):
            yield slice(n, end, self.run), slice(0, len(range(n, end, self.run)))

    def states(
        self, ends: Given, maps: Sequence[torch.Tensor | None]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the states before all chunks, (B, H, N, K, V), and those behind fragments, (B, F, H, K, V).

        maps: of the runs of each fragment, None if all fragments are one run.
        """
        before = []
        behind = []
        for i, (first, end) in enumerate(self.fragments):
            state, _ = through_runs(ends.before(i), maps[i], reverse=False)
            steps = []
            for at, here in self._steps(first, end):
                steps.append(state)
                old = state[:, :, here]
                new = self.new[:, :, at]
                if self.erased is not None:
                    new = new - self.erased[:, :, at] @ old
                state = _of_all_runs(
                    self.through[:, :, at] * old + self.k_out[:, :, at].mT @ new, state
                )
            before.append(_in_order(steps, end - first))
            ends.behind(i, state[:, :, -1])
            behind.append(state[:, :, -1])
        return _joined_along_chunks(before, ends.zero), stacked(behind, ends.zero)

    def added(self, before: torch.Tensor) -> torch.Tensor:
        """Return what each token adds, u: (B, H, N, C, V)."""
        return self.new if self.erased is None else self.new - self.erased @ before

    def outputs(self, before: torch.Tensor) -> torch.Tensor:
        """Return the outputs: (B, H, N, C, V)."""
        return self.q_in @ before + self.reads @ self.added(before)

    def read(self, dout: torch.Tensor) -> Read:
        """Return the gradients of what tokens add and of states, by the outputs that read them."""
        return self.reads.mT @ dout, self.q_in.mT @ dout

    def biases(self, read: Read) -> list[torch.Tensor]:
        """Return the gradients of the states before the runs of each fragment, if those behind have none."""
        (_, reads) = read
        found = []
        for first, end in self.fragments:
            state = reads.new_zeros(*reads.shape[:2], self._runs(first, end), *reads.shape[3:])
            found.append(self._back(first, end, state, read)[0])
        return found

    def _back(
        self,
        first: int,
        end: int,
        state: torch.Tensor,
        read: Read,
        *,
        keep: bool = False,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the gradients of the states before runs, (B, H, R, K, V), and of those behind the chunks of each step.

        state: gradients of the states behind the runs; read: as of `read`, made the gradient of what tokens add with
        `keep`.
        """
        (dadded, reads) = read
        steps = []
        for at, here in reversed([*self._steps(first, end)]):
            steps.append(state)
            old = state[:, :, here]
            more = self.k_out[:, :, at] @ old
            new = dadded[:, :, at].add_(more) if keep else dadded[:, :, at] + more
            back = self.through[:, :, at] * old + reads[:, :, at]
            state = _of_all_runs(
                back if self.erased is None else back - self.erased[:, :, at].mT @ new, state
            )
        return state, steps[::-1]

    def adjoint(
        self,
        read: Read,
        ends: Given,
        maps: Sequence[torch.Tensor | None],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients of what tokens add, in the place of those read, and of the states behind all chunks.

        ends: as seen from the end, the gradient of the state behind a fragment being before it. maps: of the runs, with
        `biases` in the place of theirs, None if all fragments are one run.
        """
        behind = []
        for i, (first, end) in reversed([*enumerate(self.fragments)]):
            state, _ = through_runs(ends.before(i), maps[i], reverse=True)
            state, steps = self._back(first, end, state, read, keep=True)
            behind.append(_in_order(steps, end - first))
            ends.behind(i, state[:, :, 0])
        return read[0], _joined_along_chunks(behind[::-1], ends.zero)

    def gradients(
        self,
        dout: torch.Tensor,
        before: torch.Tensor,
        dadded: torch.Tensor,
        dbehind: torch.Tensor,
    ) -> Inputs:
        """Return the gradients of the inputs; that of decay belongs to the running sums. See `states`, `adjoint`."""
        x = self.x
        added = self.added(before)
        of_pairs = [(dout @ added.mT).masked_fill(~self.lower, 0)]
        rows = [x.q]
        dv, dbeta = dadded, None
        if x.beta is not None:
            dy = self.solve.mT @ dadded
            dbeta = (dy * (x.v - self.k_in @ before - self.among @ added)).sum(-1, keepdim=True)
            dv = x.beta * dy
            of_pairs.append((-dv @ added.mT).masked_fill(~self.strict, 0))
            rows.append(x.k)
        (dq, *more), dk, ddecay = pairs_adjoint(of_pairs, rows, x.k, x.decay)
        if x.beta is not None:
            dk_in = -(dv @ before.mT) * self.grown
            dk = dk + more[0] + dk_in
            ddecay = ddecay + of_decay(x.k * dk_in, x.decay)
        dq_in = dout @ before.mT * self.grown
        dk_out = added @ dbehind.mT * self.rest
        from_rest = of_decay(x.k * dk_out, x.decay)
        through = of_decay((self.through * (before * dbehind)).sum(-1).unsqueeze(-2), x.decay)
        ddecay = ddecay + of_decay(x.q * dq_in, x.decay) - from_rest
        ddecay[..., -1:, :] += from_rest.sum(-2, keepdim=True) + through
        return Inputs(dq + dq_in, dk + dk_out, dv, ddecay, dbeta, None)


def changed(state: torch.Tensor, change: torch.Tensor, *, reverse: bool) -> torch.Tensor:
    """Return what a map, (..., K, V + K or 1), makes of a state, (..., K, V). reverse: with transposed transitions."""
    bias, transition = change.split([state.shape[-1], change.shape[-1] - state.shape[-1]], -1)
    return bias + _moved_on(transition, state, reverse=reverse)


def _moved_on(
    transition: torch.Tensor, state: torch.Tensor, *, reverse: bool = False
) -> torch.Tensor:
    """Return the product with a transition, (..., K, K), or with a diagonal one, (..., K, 1)."""
    if transition.shape[-1] == 1:
        return transition * state
    return (transition.mT if reverse else transition) @ state


def through_runs(
    state: torch.Tensor, maps: torch.Tensor | None, *, reverse: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the states before the runs of a fragment, (B, H, R, K, V), and the state behind the fragment.

    state: before it, (B, H, K, V); maps: (B, H, R, K, V + width), None for one run, whose end is then not known.
    reverse: the last run is the first one.
    """
    if maps is None:
        return state.unsqueeze(2), state
    found = []
    for change in reversed(maps.unbind(2)) if reverse else maps.unbind(2):
        found.append(state)
        state = changed(state, change, reverse=reverse)
    return torch.stack(found[::-1] if reverse else found, 2), state


def joined(maps: torch.Tensor, v_dim: int) -> torch.Tensor:
    """Return the map of a fragment, (B, H, K, V + width), of those of its runs, (B, H, R, K, V + width)."""
    whole, *others = maps.unbind(2)
    for change in others:
        whole = _moved_on(change[..., v_dim:], whole)
        whole[..., :v_dim] += change[..., :v_dim]
    return whole


def one_token(
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the state behind one token, and its output: (B, H, K, V), (B, H, V).

    q, k: (B, H, K), or fewer heads, each for some states; v: (B, H, V); log_decay: (B, H) or (B, H, K); beta: (B, H).
    """
    q, k = (x.to(state.dtype).repeat_interleave(v.shape[1] // x.shape[1], 1) for x in (q, k))
    state = log_decay.to(state.dtype).exp().view(*v.shape[:2], -1, 1) * state
    added = v.to(state.dtype)
    if beta is not None:
        added = beta.unsqueeze(-1) * (added - (k.unsqueeze(-2) @ state).squeeze(-2))
    state = state + k.unsqueeze(-1) * added.unsqueeze(-2)
    return state, (q.unsqueeze(-2) @ state).squeeze(-2)


def _masked(x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    return x if mask is None else x.masked_fill(~mask, 0)


def stacked(parts: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Return what fragments have, (B, H, K, V) each, as (B, F, H, K, V), also if there are none."""
    return torch.stack(parts, 1) if parts else like.unsqueeze(1)[:, :0]


def _of_all_runs(new: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """Return the states of all runs, (B, H, R, K, V), of which the last may have ended before."""
    ended = new.shape[2]
    return new if ended == state.shape[2] else torch.cat((new, state[:, :, ended:]), 2)


def _in_order(steps: list[torch.Tensor], number: int) -> torch.Tensor:
    """Return what each step has of all runs, (B, H, R, K, V), in the order of so many chunks."""
    return torch.stack(steps, 3).flatten(2, 3)[:, :, :number]


def _joined_along_chunks(fragments: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    return torch.cat(fragments, 2) if fragments else like.unsqueeze(2)[:, :, :0]
