"""Linear attention of one rank by the Triton kernels of flash-linear-attention (arXiv 2312.06635, package `fla-core`).

They take whole sequences, each from a state, and return outputs and the state after it. A fragment is one of these
sequences; fragments of equal length are one batch. Its map comes from the same kernel:

    bias          the state after it, from a state of zeros
    transition    the state after it, from the identity, if no token adds a value; the product of all decays without
                  erasure

so that one call, with values of V + K columns, gives both. At the begin of a document, the decay is e^RESET, which is 0
in float32: the host need not know the lengths of documents. With ranks the kernels of the backward run twice, first for
the biases.
"""

import logging
from collections import defaultdict
from collections.abc import Sequence
from functools import cache, cached_property
from importlib import import_module

import torch
from torch import Tensor

from longshard.context.execution.linear_chunks import Tokens
from longshard.context.execution.linear_states import KnownStates
from longshard.context.planning.capabilities import runs_fla
from longshard.sharding.tensors import wide_type

logger = logging.getLogger("longshard")

RESET = -128.0
"""A power of two. After it, running sums of logarithms are rounded to 2^-17, after many documents to a few times that.

This error is smaller than the error of the kernels' products.
"""


def runs_kernels(x: Tokens) -> bool:
    """Return whether the kernels compute these tokens: on a GPU, in half precision, if the package is installed.

    They take no decays per channel without erasure. They take no tensors of other classes, such as the tensors that are
    traced to plan a job's memory.

    Args:
        x: The tokens.
    """
    kind = x.v.device.type, str(x.v.dtype).removeprefix("torch."), x.q.shape[-1]
    deterministic = torch.are_deterministic_algorithms_enabled()
    has_channel_decays = x.log_decay.ndim == 4 and x.beta is None
    able = (
        runs_fla(*kind, deterministic=deterministic)
        and not has_channel_decays
        and type(x.v) is Tensor
    )
    return able and _has_package()


@cache
def _has_package() -> bool:
    """Return whether the package can be imported; the first call logs it, with the reason if it cannot."""
    why = ""
    try:
        import_module("fla.ops")
    except Exception as error:  # the package, or one that it needs, is missing or broken
        why = f"PyTorch in chunks ({error}); faster here: pip install fla-core"
    by = why or "the kernels of flash-linear-attention"
    logger.info(f"linear attention is computed by {by}")
    return not why


class KernelPass:
    """A pass by the kernels. Each call takes all fragments of one length. See `linear_pass.ChunkedPass`.

    `shape` is (B, F, H, K, V), the shape of the states before the F fragments of a rank.

    Args:
        x: The tokens of this rank.
        lengths: The number of tokens of each fragment.
    """

    def __init__(self, x: Tokens, lengths: Sequence[int]) -> None:
        batch, _, heads, k_dim = x.q.shape
        *_, states, v_dim = x.v.shape
        self._x = x
        self._lengths = list(lengths)
        self._groups = defaultdict(list)
        for number, length in enumerate(lengths):
            self._groups[length].append(number)
        self._states = wide_type(x.v.dtype)
        self.shape = batch, len(self._lengths), states, k_dim, v_dim
        decay = x.log_decay.to(self._states)
        if x.positions is not None:
            begins = (x.positions == 0).view(*x.positions.shape, *(1,) * (decay.ndim - 2))
            decay = decay.masked_fill(begins, RESET)
            self._goes_on = ~begins
        # The kernels without erasure take the same number of heads of queries, keys and values.
        self._shared = states // heads if x.beta is None else 1
        q, k = (part.to(x.v.dtype).repeat_interleave(self._shared, 2) for part in (x.q, x.k))
        self._inputs = [
            q,
            k,
            x.v,
            decay,
            *([] if x.beta is None else [x.beta.to(self._states)]),
        ]

    @cached_property
    def zeros(self) -> Tensor:
        """Zeros in the shape of the states, (B, F, H, K, V)."""
        return self._x.v.new_zeros(self.shape, dtype=self._states)

    def maps(self) -> Tensor:
        """Return the affine maps of the fragments, [bias | transition]: (B, F, H, K, V + K), or V + 1 if diagonal."""
        _, k, v, decay, *beta = (x.to(self._states) for x in self._inputs)
        k_dim, v_dim = self.shape[-2:]
        maps = v.new_empty(*self.shape[:-1], v_dim + (k_dim if beta else 1))
        if beta:
            v = torch.cat((v, v.new_zeros(*v.shape[:-1], k_dim)), -1)
        for length, numbers in self._groups.items():
            tokens = [self._batch(x, length) for x in (k, k, v, decay, *beta)]
            state = self._group_states(maps, numbers).zero_()
            if beta:
                state[..., v_dim:] = torch.eye(k_dim, dtype=state.dtype, device=state.device)
                after = _by_kernels(tokens, state, 1.0)[1]
            else:
                after = _by_kernels(tokens, state[..., :v_dim].contiguous(), 1.0)[1]
                through = tokens[3].sum(1).exp()[..., None, None].expand(*after.shape[:-1], 1)
                after = torch.cat((after, through), -1)
            self._fill(maps, numbers, after)
        return maps

    def forward(self, ends: KnownStates) -> tuple[Tensor, Tensor, Tensor]:
        """Return the outputs, (B, S, H, V), the states before fragments, and the state after the last fragment.

        Args:
            ends: The states before fragments.
        """
        entries = self._before(ends)
        after = torch.empty_like(self.zeros)
        out = {}
        for length, numbers in self._groups.items():
            tokens = [self._batch(x, length) for x in self._inputs]
            rows, states = _by_kernels(
                tokens, self._group_states(entries, numbers), self._x.scale
            )
            self._fill(after, numbers, states)
            self._fill_rows(out, numbers, rows)
        last = after[:, -1] if self._lengths else ends.zero
        return self._joined(out, self._inputs[2]), entries, last

    def begin_backward(self, dout: Tensor, entries: Tensor) -> None:
        """Begin the backward: run the forward again, and keep its graph for `biases` and `backward`.

        Args:
            dout: The gradient of the outputs, (B, S, H, V).
            entries: The states before fragments, (B, F, H, K, V).
        """
        self._nodes = {}
        for length, numbers in self._groups.items():
            leaves = [self._batch(x, length) for x in self._inputs] + [
                self._group_states(entries, numbers)
            ]
            with torch.enable_grad():
                *tokens, state = leaves = [x.detach().requires_grad_() for x in leaves]
                out, after = _by_kernels(tokens, state, self._x.scale)
            self._nodes[length] = leaves, (out, after), self._batch(dout.to(out.dtype), length)

    def biases(self) -> Tensor:
        """Return the gradients of the states before fragments, of `shape`, if the gradients after them are zero.

        Call `begin_backward` before it, and `backward` after it.
        """
        biases = torch.empty_like(self.zeros)
        for length, numbers in self._groups.items():
            leaves, results, dout = self._nodes[length]
            cotangents = dout, torch.zeros_like(results[1])
            (dstate,) = torch.autograd.grad(results, leaves[-1:], cotangents, retain_graph=True)
            self._fill(biases, numbers, dstate)
        return biases

    def backward(self, ends: KnownStates) -> tuple[Tensor, ...]:
        """Return the gradients of q, k, v, log_decay and beta, and free the graph of `begin_backward`.

        If the recurrence has no beta, the last result is a placeholder.

        Args:
            ends: The gradients of the states after fragments.
        """
        exits = self._before(ends)
        parts = [{} for _ in self._inputs]
        for length, numbers in self._groups.items():
            leaves, results, dout = self._nodes.pop(length)
            gradients = torch.autograd.grad(
                results, leaves[:-1], (dout, self._group_states(exits, numbers))
            )
            for tensor_parts, gradient in zip(parts, gradients, strict=True):
                self._fill_rows(tensor_parts, numbers, gradient)
        dq, dk, dv, ddecay, *dbeta = (
            self._joined(part, x) for part, x in zip(parts, self._inputs, strict=True)
        )
        if self._shared > 1:
            dq, dk = (x.unflatten(2, (-1, self._shared)).sum(3) for x in (dq, dk))
        if self._x.positions is not None:
            ddecay = ddecay * self._goes_on
        return dq, dk, dv, ddecay, *(dbeta or [dv])

    def _before(self, ends: KnownStates) -> Tensor:
        states = [ends.before(number) for number in range(len(self._lengths))]
        return torch.stack(states, 1) if states else self.zeros

    def _batch(self, x: Tensor, length: int) -> Tensor:
        """Return the fragments of a length as a batch: (B, S, ...) -> (B * fragments, length, ...)."""
        parts = x.split(self._lengths, 1)
        return torch.stack([parts[number] for number in self._groups[length]], 1).flatten(0, 1)

    def _group_states(self, states: Tensor, numbers: list[int]) -> Tensor:
        """Return the states of some fragments as a batch: (B, F, ...) -> (B * fragments, ...)."""
        return states[:, numbers].flatten(0, 1)

    def _fill(self, states: Tensor, numbers: list[int], group_states: Tensor) -> None:
        states[:, numbers] = group_states.unflatten(0, (-1, len(numbers)))

    def _fill_rows(
        self, parts: dict[int, Tensor], numbers: list[int], group_rows: Tensor
    ) -> None:
        fragment_rows = group_rows.unflatten(0, (-1, len(numbers))).unbind(1)
        parts.update(zip(numbers, fragment_rows, strict=True))

    def _joined(self, parts: dict[int, Tensor], like: Tensor) -> Tensor:
        in_order = [parts[number] for number in range(len(parts))]
        return torch.cat(in_order, 1) if parts else torch.empty_like(like)


def _by_kernels(tokens: Sequence[Tensor], state: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return the outputs of the recurrence over each sequence of a batch, (N, T, H, V), and the states after it.

    tokens: q, k, v, log_decay and, with erasure, beta; state: the states before it, (N, H, K, V).
    """
    options = {"scale": scale, "initial_state": state, "output_final_state": True}
    if len(tokens) == 4:
        from fla.ops.simple_gla import chunk_simple_gla as run
    elif tokens[3].ndim == 4:
        from fla.ops.kda import chunk_kda as run
    else:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as run
    return run(*tokens, **options)
