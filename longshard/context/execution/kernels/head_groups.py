"""A kernel's call that is too large for 32-bit integers, as calls of fewer heads. Interface and shapes: `base.py`."""

from collections.abc import Callable

import torch

from longshard.context.execution.kernels.base import QKV, BackwardInputs, Kernel
from longshard.context.planning.capabilities import call_elements, head_groups
from longshard.context.planning.lowering import Launch
from longshard.context.planning.mask import Relation


class HeadGroups:
    """A kernel, which gets as many heads at a time as its `Capabilities.elements` allow; mostly all of them.

    Heads do not depend on each other, so the results are the same. Key/value heads that several calls share get the sum
    of their gradients, in float32.
    """

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self.name = kernel.name
        self.capabilities = kernel.capabilities

    def forward(self, q, k, v, *, relation, scale):
        def call(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self._kernel.forward(*inputs, relation=relation, scale=scale)

        return _forward(
            call, self._groups(q, k, 1, q.shape[2], k.shape[2]), q, k, v, q.shape[2]
        )

    def backward(self, given: BackwardInputs, *, relation: Relation, scale: float) -> QKV:
        def call(inputs: BackwardInputs) -> QKV:
            return self._kernel.backward(inputs, relation=relation, scale=scale)

        rows = given.q.shape[2]
        keys = given.k.shape[2]
        groups = self._groups(given.q, given.k, 1, rows, keys)
        return _backward(call, groups, given, rows, keys)

    def forward_many(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, launch: Launch, *, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return output and lse of a launch, see `Varlen`."""

        def call(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self._kernel.forward_many(*inputs, launch, scale=scale)

        rows, keys = launch.rows
        return _forward(call, self._groups(q, k, len(launch.calls), rows, keys), q, k, v, rows)

    def backward_many(self, given: BackwardInputs, launch: Launch, *, scale: float) -> QKV:
        """Return dq, dk and dv of a launch, see `Varlen`."""

        def call(inputs: BackwardInputs) -> QKV:
            return self._kernel.backward_many(inputs, launch, scale=scale)

        rows, keys = launch.rows
        groups = self._groups(given.q, given.k, len(launch.calls), rows, keys)
        return _backward(call, groups, given, rows, keys)

    def _groups(
        self, q: torch.Tensor, k: torch.Tensor, calls: int, rows: int, keys: int
    ) -> list[tuple[slice, slice]]:
        elements = call_elements(q.shape[0], max(rows, keys), calls, q.shape[3])
        return head_groups(q.shape[1], k.shape[1], elements, self.capabilities.elements)


def _forward(
    call: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    groups: list[tuple[slice, slice]],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output (B, H, rows, D) and lse (B, H, rows), group by group of the heads."""
    if len(groups) == 1:
        return call(q, k, v)
    batch, heads, _, head_dim = q.shape
    out = q.new_empty(batch, rows, heads, head_dim).transpose(1, 2)
    lse = q.new_empty(batch, heads, rows, dtype=torch.promote_types(q.dtype, torch.float32))
    for query_heads, kv_heads in groups:
        out[:, query_heads], lse[:, query_heads] = call(
            q[:, query_heads], k[:, kv_heads], v[:, kv_heads]
        )
    return out, lse


def _backward(
    call: Callable[[BackwardInputs], QKV],
    groups: list[tuple[slice, slice]],
    given: BackwardInputs,
    rows: int,
    keys: int,
) -> QKV:
    """Return dq (B, H, rows, D), dk and dv (B, K, keys, D), group by group of the heads."""
    if len(groups) == 1:
        return call(given)
    q = given.q
    k = given.k
    batch, heads, _, head_dim = q.shape
    is_shared = len(groups) > k.shape[1]
    sum_dtype = torch.promote_types(k.dtype, torch.float32) if is_shared else k.dtype
    dq = q.new_empty(batch, rows, heads, head_dim).transpose(1, 2)
    dk, dv = (
        k.new_zeros(batch, keys, k.shape[1], head_dim, dtype=sum_dtype).transpose(1, 2)
        for _ in range(2)
    )
    for query_heads, kv_heads in groups:
        places = BackwardInputs(
            query_heads, query_heads, kv_heads, kv_heads, query_heads, query_heads
        )
        part_q, part_k, part_v = call(
            BackwardInputs(*(x[:, place] for x, place in zip(given, places, strict=True)))
        )
        dq[:, query_heads] = part_q
        dk[:, kv_heads] += part_k
        dv[:, kv_heads] += part_v
    return dq, dk.to(k.dtype), dv.to(k.dtype)
