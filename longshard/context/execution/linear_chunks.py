"""The arithmetic of linear attention over chunks of tokens, on one rank.

A head has a state S, (K, V). Token t changes it, and reads it:

    S_t = (I - b_t k_t k_t') Diag(a_t) S_(t-1) + b_t k_t v_t'        o_t = S_t' q_t

with decays a_t in (0, 1], one of the head (Gated DeltaNet, arXiv 2412.06464) or one of each key channel (Kimi Delta
Attention, arXiv 2510.26692). Without b there is no erasure: S_t = Diag(a_t) S_(t-1) + k_t v_t', which is Mamba-2
(arXiv 2405.21060) and other gated linear attention.

In a chunk of C tokens let G be the running sum of log a, and let token t add u_t along k_t. Then, with the strict
lower triangle A_ts = sum of k_t e^(G_t - G_s) k_s, and the lower triangle P the same with q_t,

    (I + b A) u = b (v - k e^G S)        o = q e^G S + P u        S' = e^(G_C) S + (k e^(G_C - G))' u

so that S' is affine in S. No exponent is above 0 (`linear_pairs.py` says how, with decays of single channels). At the
begin of a document, a mask removes the influence of earlier tokens.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longshard.context.execution.linear_pairs import pairs, pairs_adjoint, sum_to_decay
from longshard.context.execution.linear_states import KnownStates, stacked, through_runs

CHUNK = 64
LONGEST_RUN = {"cuda": 32}
"""By device: the most chunks of a fragment that follow one another without runs. Runs take a tenth more arithmetic, and
few launches; on a CPU, where a launch costs little, there are none.
"""

Fragments = Sequence[tuple[int, int]]
"""(First chunk, end) of each run of tokens that follow one another."""


class Tokens(NamedTuple):
    """The inputs of linear attention: S rows in the order of the sequence, or of a rank.

    Attributes:
        q: The queries, (B, S, H, K).
        k: The keys, (B, S, H, K).
        v: The values, (B, S, G, V); H divides G.
        log_decay: Logarithms of the decays, at most 0, (B, S, G) or (B, S, G, K).
        beta: Factors of the delta rule, (B, S, G); None for no erasure.
        positions: (B, S), 0 where a document begins; None for one document.
        scale: Factor of the outputs.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    beta: Tensor | None
    positions: Tensor | None
    scale: float


class Inputs(NamedTuple):
    """Tokens in chunks, of one dtype: (B, H, N, C, ...). A token of zeros changes nothing.

    Attributes:
        q: The queries, (..., K).
        k: The keys, (..., K).
        v: The values, (..., V).
        decay: Running sums of the logarithms of the decays in a chunk, (..., 1 or K).
        beta: Factors of the delta rule, (..., 1); None for no erasure.
        document: (B, 1, N, C), the number of documents that have begun in the chunk so far; None for one document.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor | None
    document: Tensor | None


Read = tuple[Tensor, Tensor]
"""Gradients of the additions of tokens, (B, H, N, C, V), and of the states before chunks, (B, H, N, K, V)."""


class Chunks:
    """The tensors of a rank's chunks that do not depend on the states.

    All runs of a fragment go on at once, each from a state that the maps of the runs before it give. So the number of
    products that follow one another is small, and each product is of many runs.

        10 chunks, run 4:   0 1 2 3 | 4 5 6 7 | 8 9        steps: 0 4 8, 1 5 9, 2 6, 3 7

    Args:
        x: The tokens in chunks.
        fragments: The range of chunks of each fragment.
        run: Number of chunks of a run.
    """

    def __init__(self, x: Inputs, fragments: Fragments, run: int) -> None:
        size = x.q.shape[3]
        self.fragments = fragments
        self.run = run
        self.x = x
        self.lower = x.q.new_ones(size, size, dtype=torch.bool).tril()
        self.strict = self.lower.tril(-1)
        # masks of tokens: the same document through the chunk, from before the chunk, to the end of the chunk
        goes_on = begins = ends = None
        if x.document is not None:
            same = x.document.unsqueeze(-1) == x.document.unsqueeze(-2)
            self.lower = same & self.lower
            self.strict = same & self.strict
            begins = (x.document == 0).unsqueeze(-1)
            last = x.document[..., -1:]
            ends = (x.document == last).unsqueeze(-1)
            goes_on = (last == 0).unsqueeze(-1)
        self.grown = _masked(x.decay.exp(), begins)
        self.to_end = _masked((x.decay[..., -1:, :] - x.decay).exp(), ends)
        self.through = _masked(x.decay[..., -1:, :].exp(), goes_on).mT  # (..., 1 or K, 1)
        self.q_in = x.q * self.grown
        self.k_in = x.k * self.grown
        self.k_out = x.k * self.to_end
        self.reads, *among = pairs(
            (x.q,) if x.beta is None else (x.q, x.k), x.k, x.decay, self.lower
        )
        self.new = x.v
        self.erased = None
        if x.beta is not None:
            self.among = among[0].masked_fill(~self.strict, 0)
            # Compute the whole inverse, which the backward uses too: a solution for each column would cost more.
            one = torch.eye(size, dtype=x.q.dtype, device=x.q.device).expand_as(self.among)
            self.solve = torch.linalg.solve_triangular(
                x.beta * self.among, one, upper=False, unitriangular=True
            )
            solved = self.solve @ (x.beta * torch.cat((x.v, self.k_in), -1))
            self.new, self.erased = solved.split([x.v.shape[-1], x.k.shape[-1]], -1)

    def maps(self) -> list[Tensor]:
        """Return the affine maps of the runs of each fragment, [bias | transition]: (B, H, R, K, V + width).

        The transition has K columns with erasure; without, it is diagonal, and its one column is the diagonal.
        """
        x = self.x
        maps = []
        k = x.k.shape[-1]
        v = x.v.shape[-1]
        columns = v + (1 if x.beta is None else k)
        for first, end in self.fragments:
            runs = self._runs(first, end)
            state = x.k.new_zeros(*x.k.shape[:2], runs, k, columns)
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
                state = _all_runs(new, state)
            maps.append(state)
        return maps

    def _runs(self, first: int, end: int) -> int:
        return -(-(end - first) // self.run)

    def _steps(self, first: int, end: int) -> Iterator[tuple[slice, slice]]:
        """Yield, step by step, the chunks of a fragment that all its runs compute at once, and these runs."""
        for n in range(first, min(first + self.run, end)):
            yield slice(n, end, self.run), slice(0, len(range(n, end, self.run)))

    def states(self, ends: KnownStates, maps: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
        """Return the states before all chunks, (B, H, N, K, V), and the states after fragments, (B, F, H, K, V).

        `ends` gets the state after each fragment, the first fragment first.

        Args:
            ends: The states before fragments.
            maps: The maps of the runs of each fragment; None for each if all fragments are one run.
        """
        before = []
        after = []
        for i, (first, end) in enumerate(self.fragments):
            state, _ = through_runs(ends.before(i), maps[i], reverse=False)
            steps = []
            for at, here in self._steps(first, end):
                steps.append(state)
                old = state[:, :, here]
                new = self.new[:, :, at]
                if self.erased is not None:
                    new = new - self.erased[:, :, at] @ old
                state = _all_runs(
                    self.through[:, :, at] * old + self.k_out[:, :, at].mT @ new, state
                )
            before.append(_in_order(steps, end - first))
            ends.after(i, state[:, :, -1])
            after.append(state[:, :, -1])
        return _joined_along_chunks(before, ends.zero), stacked(after, ends.zero)

    def added(self, before: Tensor) -> Tensor:
        """Return the addition u of each token, (B, H, N, C, V).

        Args:
            before: The states before all chunks, (B, H, N, K, V).
        """
        return self.new if self.erased is None else self.new - self.erased @ before

    def outputs(self, before: Tensor) -> Tensor:
        """Return the outputs, (B, H, N, C, V).

        Args:
            before: The states before all chunks, (B, H, N, K, V).
        """
        return self.q_in @ before + self.reads @ self.added(before)

    def read(self, dout: Tensor) -> Read:
        """Return the gradients of the additions of tokens and of the states before chunks, by the outputs.

        Args:
            dout: The gradient of the outputs, (B, H, N, C, V).
        """
        return self.reads.mT @ dout, self.q_in.mT @ dout

    def biases(self, read: Read) -> list[Tensor]:
        """Return the gradients of the states before runs, (B, H, R, K, V) for each fragment.

        The gradients of the states after the runs count as zero. `read` is not changed.

        Args:
            read: As returned by `read`.
        """
        _, reads = read
        biases = []
        for first, end in self.fragments:
            state = reads.new_zeros(*reads.shape[:2], self._runs(first, end), *reads.shape[3:])
            biases.append(self._back(first, end, state, read)[0])
        return biases

    def _back(
        self,
        first: int,
        end: int,
        state: Tensor,
        read: Read,
        *,
        keep: bool = False,
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the gradients of the states before runs, (B, H, R, K, V), and of the states after each step's chunks.

        state: gradients of the states after the runs.
        read: as returned by `read`.
        keep: whether to write the gradients of the additions of tokens to the first tensor of `read`.
        """
        dadded, reads = read
        steps = []
        for at, here in reversed([*self._steps(first, end)]):
            steps.append(state)
            old = state[:, :, here]
            added = self.k_out[:, :, at] @ old
            new = dadded[:, :, at].add_(added) if keep else dadded[:, :, at] + added
            back = self.through[:, :, at] * old + reads[:, :, at]
            state = _all_runs(
                back if self.erased is None else back - self.erased[:, :, at].mT @ new, state
            )
        return state, steps[::-1]

    def adjoint(
        self,
        read: Read,
        ends: KnownStates,
        maps: Sequence[Tensor | None],
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of the additions of tokens, (B, H, N, C, V), and of the state after each chunk.

        The first result is the first tensor of `read`, changed in place. `ends` gets the gradient of the state before
        each fragment, the last fragment first.

        Args:
            read: As returned by `read`.
            ends: Runs from the end: the gradients of the states after fragments.
            maps: The maps of the runs, with `biases` instead of their own biases; None for each if all fragments are
                one run.
        """
        after = []
        for i, (first, end) in reversed([*enumerate(self.fragments)]):
            state, _ = through_runs(ends.before(i), maps[i], reverse=True)
            state, steps = self._back(first, end, state, read, keep=True)
            after.append(_in_order(steps, end - first))
            ends.after(i, state[:, :, 0])
        return read[0], _joined_along_chunks(after[::-1], ends.zero)

    def gradients(
        self,
        dout: Tensor,
        before: Tensor,
        dadded: Tensor,
        dafter: Tensor,
    ) -> Inputs:
        """Return the gradients of the inputs. The gradient of `decay` is with respect to its running sums.

        Args:
            dout: The gradient of the outputs, (B, H, N, C, V).
            before: The states before all chunks, see `states`.
            dadded: The gradients of the additions of tokens, see `adjoint`.
            dafter: The gradients of the states after all chunks, see `adjoint`.
        """
        x = self.x
        added = self.added(before)
        dpairs = [(dout @ added.mT).masked_fill(~self.lower, 0)]
        rows = [x.q]
        dv, dbeta = dadded, None
        if x.beta is not None:
            dy = self.solve.mT @ dadded
            dbeta = (dy * (x.v - self.k_in @ before - self.among @ added)).sum(-1, keepdim=True)
            dv = x.beta * dy
            dpairs.append((-dv @ added.mT).masked_fill(~self.strict, 0))
            rows.append(x.k)
        (dq, *dks), dk, ddecay = pairs_adjoint(dpairs, rows, x.k, x.decay)
        if x.beta is not None:
            dk_in = -(dv @ before.mT) * self.grown
            dk = dk + dks[0] + dk_in
            ddecay = ddecay + sum_to_decay(x.k * dk_in, x.decay)
        dq_in = dout @ before.mT * self.grown
        dk_out = added @ dafter.mT * self.to_end
        from_end = sum_to_decay(x.k * dk_out, x.decay)
        through = sum_to_decay(
            (self.through * (before * dafter)).sum(-1).unsqueeze(-2), x.decay
        )
        ddecay = ddecay + sum_to_decay(x.q * dq_in, x.decay) - from_end
        ddecay[..., -1:, :] += from_end.sum(-2, keepdim=True) + through
        return Inputs(dq + dq_in, dk + dk_out, dv, ddecay, dbeta, None)


def one_token(
    state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the state after one token, (B, H, K, V), and its output, (B, H, V), both in the dtype of `state`.

    The caller multiplies the output by the scale.

    Args:
        state: The state before the token, (B, H, K, V); not changed.
        q: The query, (B, H, K), or with fewer heads: each serves the same number of heads of v.
        k: The key, in the shape of q.
        v: The value, (B, H, V).
        log_decay: (B, H) or (B, H, K).
        beta: (B, H); None for no erasure.
    """
    q, k = (x.to(state.dtype).repeat_interleave(v.shape[1] // x.shape[1], 1) for x in (q, k))
    state = log_decay.to(state.dtype).exp().view(*v.shape[:2], -1, 1) * state
    added = v.to(state.dtype)
    if beta is not None:
        added = beta.unsqueeze(-1) * (added - (k.unsqueeze(-2) @ state).squeeze(-2))
    state = state + k.unsqueeze(-1) * added.unsqueeze(-2)
    return state, (q.unsqueeze(-2) @ state).squeeze(-2)


def _masked(x: Tensor, mask: Tensor | None) -> Tensor:
    return x if mask is None else x.masked_fill(~mask, 0)


def _all_runs(new: Tensor, state: Tensor) -> Tensor:
    """Return the states of all runs, (B, H, R, K, V); the last run may have ended before, and keeps its state."""
    ended = new.shape[2]
    return new if ended == state.shape[2] else torch.cat((new, state[:, :, ended:]), 2)


def _in_order(steps: list[Tensor], number: int) -> Tensor:
    """Return the tensors of all steps, (B, H, R, K, V) each, in the order of the chunks; number: how many there are."""
    return torch.stack(steps, 3).flatten(2, 3)[:, :, :number]


def _joined_along_chunks(fragments: list[Tensor], like: Tensor) -> Tensor:
    return torch.cat(fragments, 2) if fragments else like.unsqueeze(2)[:, :, :0]
