"""Compute a launch that is too large for 32-bit integers as launches of fewer heads; see `base.py`."""

from functools import partial

from torch import Tensor

from longshard.context.execution.kernels.base import (
    QKV,
    BackwardInputs,
    Kernel,
    OutLse,
    rows_first,
)
from longshard.context.planning.capabilities import call_elements, head_groups
from longshard.context.planning.lowering import Launch
from longshard.sharding.tensors import wide_type


class HeadGroups(Kernel):
    """A kernel that gets only as many heads at a time as `Capabilities.elements` allows; usually all of them.

    Heads do not depend on each other, so the results are the same. Key/value heads that several launches share get the
    sum of their gradients, in float32. Interface and shapes are described in `base.py`.

    Args:
        kernel: The kernel that computes the launches.
    """

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self.name = kernel.name
        self.capabilities = kernel.capabilities

    def forward_many(
        self, q: Tensor, k: Tensor, v: Tensor, launch: Launch, *, scale: float
    ) -> OutLse:
        """Return output, (B, H, rows, D), and log-sum-exp, (B, H, rows).

        The kernel gets a group of heads at a time, if all heads are too many for it. Each group has the same launch.

        Args:
            q: The queries, (B, H, S, D).
            k: The keys, (B, K, T, D).
            v: The values, (B, K, T, D).
            launch: The launch.
            scale: The factor of the scores.
        """
        run = partial(self._kernel.forward_many, launch=launch, scale=scale)
        groups = self._groups(q, k, launch)
        if len(groups) == 1:
            return run(q, k, v)
        batch, heads, _, head_dim = q.shape
        rows, _ = launch.rows
        out = rows_first(q, heads, rows, head_dim)
        lse = q.new_empty(batch, heads, rows, dtype=wide_type(q.dtype))
        for query_heads, kv_heads in groups:
            out[:, query_heads], lse[:, query_heads] = run(
                q[:, query_heads], k[:, kv_heads], v[:, kv_heads]
            )
        return out, lse

    def backward_many(self, inputs: BackwardInputs, launch: Launch, *, scale: float) -> QKV:
        """Return dq, (B, H, rows, D), dk and dv, (B, K, keys, D), group by group of the heads.

        Args:
            inputs: The rows of all calls.
            launch: The launch.
            scale: The factor of the scores.
        """
        run = partial(self._kernel.backward_many, launch=launch, scale=scale)
        q = inputs.q
        k = inputs.k
        groups = self._groups(q, k, launch)
        if len(groups) == 1:
            return run(inputs)
        _, heads, _, head_dim = q.shape
        rows, keys = launch.rows
        is_shared = len(groups) > k.shape[1]
        sum_dtype = wide_type(k.dtype) if is_shared else k.dtype
        dq = rows_first(q, heads, rows, head_dim)
        dk, dv = (
            rows_first(k, k.shape[1], keys, head_dim, sum_dtype).zero_() for _ in range(2)
        )
        for query_heads, kv_heads in groups:
            part_q, part_k, part_v = run(inputs.part(query_heads, kv_heads, dim=1))
            dq[:, query_heads] = part_q
            dk[:, kv_heads] += part_k
            dv[:, kv_heads] += part_v
        return dq, dk.to(k.dtype), dv.to(k.dtype)

    def _groups(self, q: Tensor, k: Tensor, launch: Launch) -> list[tuple[slice, slice]]:
        elements = call_elements(q.shape[0], max(launch.rows), len(launch.calls), q.shape[3])
        return head_groups(q.shape[1], k.shape[1], elements, self.capabilities.elements)
