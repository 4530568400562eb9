"""The table of live plans: where the operator finds what to do, by the handle that the model passed it.

A handle is an int64 tensor (rows,), one number for each sequence of the batch, which names an entry of the table and
the sequence's place in the batch. As a tensor it goes through a compiled graph without compiling it again, and is cut
with a micro-batch.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from trainer.distributed.context_parallel.cost import check_heads
from trainer.distributed.context_parallel.execution import Execution
from trainer.distributed.context_parallel.kernels.base import Kernel
from trainer.distributed.context_parallel.kernels.choose import choose_kernel
from trainer.distributed.context_parallel.lowering import lower
from trainer.distributed.context_parallel.mask import Mask, by_row, causal, full, sliding_window
from trainer.distributed.context_parallel.options import ContextParallelError, ContextParallelOptions
from trainer.distributed.context_parallel.plan import make_plan
from trainer.distributed.sharding.layout import SequenceLayout

# The one process-wide state of the project, beside the registration of the operators themselves.
_live: dict[int, "LivePlan"] = {}
_gradient_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()
_started_groups: WeakSet[dist.ProcessGroup] = WeakSet()
_numbers = itertools.count(1)

_ROWS = 1 << 20  # sequences of a batch that a handle can tell apart


@dataclass(eq=False)
class LivePlan:
    """A context that is open: its layout and mask, and how often the operator ran under it.

    mesh: 1-D; hybrid_groups: for `hybrid`, the ring and the neighbours that this rank belongs to. kv_layout: who owns
    which keys, where they are not as many as the queries.
    """

    mesh: DeviceMesh
    layout: SequenceLayout
    mask: Mask | None = None
    options: ContextParallelOptions = field(default_factory=ContextParallelOptions)
    kv_layout: SequenceLayout | None = None
    hybrid_groups: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None
    calls: int = 0
    _runs: dict[tuple, Execution] = field(default_factory=dict)

    def execution(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Sequence[int], *, is_causal: bool, window: int
    ) -> Execution:
        """What carries out attention of these shapes; worked out at its first use.

        Raises:
            ContextParallelError: inputs that the context did not cut, or heads that the method cannot divide.
            ConfigError: the kernel cannot do it.
        """
        # A mask for all sequences alike does not care which of them these are.
        rows = tuple(rows) if self.mask is not None and self.mask.rows > 1 else ()
        inputs = [(x.shape, x.dtype, x.device.type) for x in (q, k, v)]
        key = *inputs, rows, is_causal, window
        if key not in self._runs:
            self._check(q, k, v, rows)
            mask = self._mask(rows, is_causal, window)
            kernel = choose_kernel(q.device.type, q.dtype, q.shape[3], self.options.kernel, bands=mask.has_windows)
            self._runs[key] = self._execution(mask, kernel)
        return self._runs[key]

    def _execution(self, mask: Mask, kernel: Kernel) -> Execution:
        options, group = self.options, self.mesh.get_group()
        # One rank has all heads and all rows: nothing to exchange, whatever the method.
        method = options.method if group.size() > 1 else "ring"
        degrees = options.hybrid_degrees
        plan = make_plan(
            self.layout,
            mask,
            method,
            self.mesh.get_local_rank(),
            kv_layout=self.kv_layout,
            head_degree=degrees[0] if degrees and method == "hybrid" else None,
        )
        lowered, passes = lower(plan, kernel.capabilities), options.heads_per_pass
        if plan.inner is None:
            return Execution(lowered, kernel, self._started(group), self._for_gradients(group), passes)
        ring = group
        if method == "hybrid":
            ring, group = map(self._started, self.hybrid_groups)
        gradients = self._for_gradients(ring) if plan.inner.degree > 1 else ring
        inner = Execution(lower(plan.inner, kernel.capabilities), kernel, ring, gradients)
        return Execution(lowered, kernel, group, group, passes, inner)

    def _started(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        """A communicator in which every rank has taken part: NCCL's may not begin with messages of some ranks only."""
        if _queues(group) and group not in _started_groups:
            dist.all_reduce(torch.zeros(1, device=self.mesh.device_type), group=group)
            _started_groups.add(group)
        return group

    def _for_gradients(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        """Over what dK and dV travel: where a communicator is a queue, one of their own.

        A collective over the group at its first use.
        """
        if not _queues(group) or group.size() == 1:
            return group
        if group not in _gradient_groups:
            ranks = dist.get_process_group_ranks(group)
            made = dist.new_group(ranks, use_local_synchronization=True, group_desc="cp_gradients")
            _gradient_groups[group] = self._started(made)
        return _gradient_groups[group]

    def _mask(self, rows: tuple[int, ...], is_causal: bool, window: int) -> Mask:
        lengths = self.layout.seq_len, (self.kv_layout or self.layout).seq_len
        if window:
            mask = sliding_window(lengths[0], window, lengths[1], is_causal=is_causal)
        else:
            mask = causal(*lengths) if is_causal else full(*lengths)
        if self.mask is None:
            return mask
        if rows in ((), tuple(range(self.mask.rows))):
            return mask & self.mask
        return mask & by_row([self.mask.row(row) for row in rows])

    def _check(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: tuple[int, ...]) -> None:
        rank = self.mesh.get_local_rank()
        alike = q.ndim == 4 and k.shape == v.shape and q.dtype == k.dtype == v.dtype
        if not alike or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or q.shape[1] % max(k.shape[1], 1):
            raise ContextParallelError(
                f"context-parallel attention got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} of types "
                f"{q.dtype}, {k.dtype}, {v.dtype}; give (B, H, S, D) and twice (B, K, T, D) of one type, K dividing H"
            )
        for x, layout in ((q, self.layout), (k, self.kv_layout or self.layout)):
            if x.shape[2] != layout.length(rank):
                raise ContextParallelError(
                    f"context-parallel attention got {x.shape[2]} rows of the sequence and its plan has "
                    f"{layout.length(rank)} for this rank; cut the inputs by naming them in "
                    "`context_parallel(buffers=...)`"
                )
        if rows and len(rows) != q.shape[0]:
            raise ContextParallelError(
                f"context-parallel attention got {q.shape[0]} sequences and a plan for {len(rows)}; pass the handle's "
                "entries of the same sequences"
            )
        if self.options.method in ("all_to_all", "hybrid"):
            try:
                check_heads(q.shape[1], self.options.head_degree(self.mesh.size()), self.options.method)
            except ValueError as error:
                raise ContextParallelError(str(error)) from None


def open_plan(live: LivePlan) -> int:
    """Enter a plan into the table; its number."""
    number = next(_numbers)
    _live[number] = live
    return number


def close_plan(number: int) -> None:
    """Take a plan out of the table."""
    del _live[number]


def handle_of(number: int, rows: int) -> torch.Tensor:
    """The handle of an entry, for a batch of so many sequences: (rows,) int64."""
    return torch.arange(max(rows, 1), dtype=torch.int64, device="cpu") + number * _ROWS


def any_plan_open(mesh: DeviceMesh) -> bool:
    """Whether a context over this mesh is open."""
    return any(live.mesh.get_group() is mesh.get_group() for live in _live.values())


def resolve(handle: torch.Tensor) -> tuple[LivePlan, list[int]]:
    """The live plan that a handle names, and the sequences of its batch.

    Raises:
        ContextParallelError: outside the context, or of one that is closed.
    """
    if not _live:
        raise ContextParallelError(
            "context-parallel attention was called outside its context; enter `context_parallel(...)` around the "
            "forward and the backward"
        )
    entries = handle.tolist()
    numbers = {entry // _ROWS for entry in entries}
    if len(numbers) != 1:
        raise ContextParallelError(
            f"a handle of {len(entries)} sequences names {len(numbers)} plans; pass entries of one `attention_plan`"
        )
    number = numbers.pop()
    live = _live.get(number)
    if live is None:
        raise ContextParallelError(
            f"the plan {number} of this context-parallel attention belongs to a context that is closed; pass "
            "`attention_plan` of the open context to the model"
        )
    return live, [entry % _ROWS for entry in entries]


def _queues(group: dist.ProcessGroup) -> bool:
    """Whether what is posted to one communicator runs one after another."""
    return "nccl" in str(dist.get_backend(group))
