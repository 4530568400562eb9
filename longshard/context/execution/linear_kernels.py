"""Linear attention of one rank by the Triton kernels of flash-linear-attention (arXiv 2312.06635, package `fla-core`).

They take whole sequences, each from a state, and give outputs and the state behind. A fragment is such a sequence;
fragments of equal length are one batch. Its map comes from the same kernel:

    bias          the state behind it, from a state of zeros
    transition    the state behind it, from the identity, where no token adds a value; the product of all decays without
                  erasure

so that one call, with values of V + K columns, gives both. Where a document begins, the decay is e^RESET, which is 0 in
float32: lengths of documents need not be known on the host. With ranks the kernels of the backward run twice, first for
the biases.
"""

import logging
from collections import defaultdict
from collections.abc import Sequence
from functools import cache, cached_property

import torch

from longshard.context.execution.kernels.flash import is_installed
from longshard.context.execution.linear_chunks import Given, Tokens
from longshard.context.planning.capabilities import runs_fla
from longshard.sharding.tensors import wide_type

logger = logging.getLogger("longshard")

RESET = -128.0
"""A power of two, behind which running sums of logarithms are rounded to 2^-17, or behind many documents a few times
that: less than the kernels' products."""


def runs_kernels(x: Tokens) -> bool:
    """Return whether the kernels compute these tokens: on a GPU, in half precision, if the package is installed.

    They take no tensors of other classes, such as those that are traced to plan a job's memory.
    """
    kind = x.v.device.type, str(x.v.dtype).removeprefix("torch."), x.q.shape[-1]
    deterministic = torch.are_deterministic_algorithms_enabled()
    of_channels = x.log_decay.ndim == 4 and x.beta is None
    able = (
        runs_fla(*kind, deterministic=deterministic)
        and not of_channels
        and type(x.v) is torch.Tensor
    )
    return able and _has_package()


@cache
def _has_package() -> bool:
    """Return whether the package is there; the first call logs it."""
    found = is_installed("fla.ops")
    by = (
        "the kernels of flash-linear-attention"
        if found
        else "PyTorch in chunks; faster here: pip install fla-core"
    )
    logger.info(f"linear attention is computed by {by}")
    return found


class KernelPass:
    """By the kernels, of which each call takes all fragments of one length. See `linear_pass.ChunkedPass`."""

    def __init__(self, x: Tokens, lengths: Sequence[int]) -> None:
        (batch, _, heads, k_dim) = x.q.shape
        (*_, states, v_dim) = x.v.shape
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
        # The kernels without erasure take as many heads of queries and keys as of values.
        self._shared = states // heads if x.beta is None else 1
        q, k = (part.to(x.v.dtype).repeat_interleave(self._shared, 2) for part in (x.q, x.k))
        self._given = [q, k, x.v, decay, *([] if x.beta is None else [x.beta.to(self._states)])]

    @cached_property
    def zeros(self) -> torch.Tensor:
        return self._x.v.new_zeros(self.shape, dtype=self._states)

    def maps(self) -> torch.Tensor:
        _, k, v, decay, *beta = (x.to(self._states) for x in self._given)
        k_dim, v_dim = self.shape[-2:]
        found = v.new_empty(*self.shape[:-1], v_dim + (k_dim if beta else 1))
        if beta:
            v = torch.cat((v, v.new_zeros(*v.shape[:-1], k_dim)), -1)
        for length, numbers in self._groups.items():
            tokens = [self._batch(x, length) for x in (k, k, v, decay, *beta)]
            state = self._of_group(found, numbers).zero_()
            if beta:
                state[..., v_dim:] = torch.eye(k_dim, dtype=state.dtype, device=state.device)
                behind = _by_kernels(tokens, state, 1.0)[1]
            else:
                behind = _by_kernels(tokens, state[..., :v_dim].contiguous(), 1.0)[1]
                through = tokens[3].sum(1).exp()[..., None, None].expand(*behind.shape[:-1], 1)
                behind = torch.cat((behind, through), -1)
            self._fill(found, numbers, behind)
        return found

    def forward(self, ends: Given) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        entries = self._before(ends)
        behind = torch.empty_like(self.zeros)
        out: dict[int, torch.Tensor] = {}
        for length, numbers in self._groups.items():
            tokens = [self._batch(x, length) for x in self._given]
            rows, states = _by_kernels(tokens, self._of_group(entries, numbers), self._x.scale)
            self._fill(behind, numbers, states)
            self._fill_rows(out, numbers, rows)
        last = behind[:, -1] if self._lengths else ends.zero
        return self._joined(out, self._given[2]), entries, last

    def begin_backward(self, dout: torch.Tensor, entries: torch.Tensor) -> None:
        self._nodes = {}
        for length, numbers in self._groups.items():
            leaves = [self._batch(x, length) for x in self._given] + [
                self._of_group(entries, numbers)
            ]
            with torch.enable_grad():
                *tokens, state = leaves = [x.detach().requires_grad_() for x in leaves]
                out, behind = _by_kernels(tokens, state, self._x.scale)
            self._nodes[length] = leaves, (out, behind), self._batch(dout.to(out.dtype), length)

    def biases(self) -> torch.Tensor:
        found = torch.empty_like(self.zeros)
        for length, numbers in self._groups.items():
            leaves, results, dout = self._nodes[length]
            cotangents = dout, torch.zeros_like(results[1])
            (dstate,) = torch.autograd.grad(results, leaves[-1:], cotangents, retain_graph=True)
            self._fill(found, numbers, dstate)
        return found

    def backward(self, ends: Given) -> tuple[torch.Tensor, ...]:
        exits = self._before(ends)
        parts: list[dict[int, torch.Tensor]] = [{} for _ in self._given]
        for length, numbers in self._groups.items():
            leaves, results, dout = self._nodes.pop(length)
            gradients = torch.autograd.grad(
                results, leaves[:-1], (dout, self._of_group(exits, numbers))
            )
            for of_tensor, gradient in zip(parts, gradients, strict=True):
                self._fill_rows(of_tensor, numbers, gradient)
        dq, dk, dv, ddecay, *dbeta = (
            self._joined(part, x) for part, x in zip(parts, self._given, strict=True)
        )
        if self._shared > 1:
            dq, dk = (x.unflatten(2, (-1, self._shared)).sum(3) for x in (dq, dk))
        if self._x.positions is not None:
            ddecay = ddecay * self._goes_on
        return dq, dk, dv, ddecay, *(dbeta or [dv])

    def _before(self, ends: Given) -> torch.Tensor:
        states = [ends.before(number) for number in range(len(self._lengths))]
        return torch.stack(states, 1) if states else self.zeros

    def _batch(self, x: torch.Tensor, length: int) -> torch.Tensor:
        """Return the fragments of a length as a batch: (B, S, ...) -> (B * fragments, length, ...)."""
        parts = x.split(self._lengths, 1)
        return torch.stack([parts[number] for number in self._groups[length]], 1).flatten(0, 1)

    def _of_group(self, states: torch.Tensor, numbers: list[int]) -> torch.Tensor:
        """(B, F, ...) -> (B * fragments, ...)."""
        return states[:, numbers].flatten(0, 1)

    def _fill(self, states: torch.Tensor, numbers: list[int], of_group: torch.Tensor) -> None:
        states[:, numbers] = of_group.unflatten(0, (-1, len(numbers)))

    def _fill_rows(
        self, parts: dict[int, torch.Tensor], numbers: list[int], of_group: torch.Tensor
    ) -> None:
        of_fragments = of_group.unflatten(0, (-1, len(numbers))).unbind(1)
        parts.update(zip(numbers, of_fragments, strict=True))

    def _joined(self, parts: dict[int, torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        in_order = [parts[number] for number in range(len(parts))]
        return torch.cat(in_order, 1) if parts else torch.empty_like(like)


def _by_kernels(
    tokens: Sequence[torch.Tensor], state: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the recurrence over each sequence of a batch, from its state: outputs, (N, T, H, V), and the states behind.

    tokens: q, k, v, log_decay and, with erasure, beta; state: (N, H, K, V).
    """
    options = {"scale": scale, "initial_state": state, "output_final_state": True}
    if len(tokens) == 4:
        from fla.ops.simple_gla import chunk_simple_gla as run
    elif tokens[3].ndim == 4:
        from fla.ops.kda import chunk_kda as run
    else:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as run
    return run(*tokens, **options)
