"""The table of open plans, in which the operator finds its plan by the handle that the model passes to it.

A handle is an int64 tensor (sequences,). Its entry for a sequence of the batch names an entry of the table and the
sequence's number in the batch. As a tensor, a handle does not recompile a graph, and is cut with a micro-batch. With a
sequence in chunks it also names the layer, whose keys and values are kept.

State of the process: The table of open plans, as an operator finds its plan by a handle; an entry goes with its
context. Also the marks of parallelised modules, as a context in which no marked module ran is an error; a mark goes
with its module.
"""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from weakref import WeakSet

import torch
from torch import Tensor
from torch.distributed import DeviceMesh, ProcessGroup

from longshard.context.attention_inputs import AttentionInputs, AttentionSettings
from longshard.context.execution.build import Execution, build_execution
from longshard.context.execution.chunks import ChunkRows
from longshard.context.execution.kernels.choose import KernelNeeds
from longshard.context.hooks import NO_HOOKS, AttentionHooks
from longshard.context.local_attention import WAYS_TO_THE_PLAN
from longshard.context.planning.heads import check_heads
from longshard.context.planning.mask import Mask, by_sequence, causal, full, sliding_window
from longshard.context.planning.methods import chunk_plan, make_plan
from longshard.context.planning.options import ContextParallelError, ContextParallelOptions
from longshard.sharding.errors import OptionError
from longshard.sharding.layout import AxisLayout
from longshard.sharding.placement import rows_on
from longshard.sharding.tensors import flattened

_live: dict[int, "LivePlan"] = {}
_numbers = itertools.count(1)

_SEQUENCES = 1 << 20  # the most sequences of a batch
_LAYER = 1 << 52


@dataclass(eq=False)
class LivePlan:
    """The plan of an open context: its layout and mask, and how often operators ran in it.

    Attributes:
        mesh: The 1-D mesh.
        layout: Which rank owns which rows. For chunks of a sequence: the layout of all chunks.
        mask: Is intersected with the mask of each attention; None if absent.
        options: How attention is spread over the ranks.
        kv_layout: The layout of the keys; None means `layout`.
        groups: The group that sends K/V in stages, and the group that exchanges heads; None means the mesh's group.
        chunk: The number of a chunk of the sequence, and the rows that wait between chunks. The mesh has one rank.
        hooks: What this process adds to each call of attention.
        calls: Number of calls of attention and of scans.
        other_calls: Number of calls of convolutions.
        latest: The execution of the last call.
    """

    mesh: DeviceMesh
    layout: AxisLayout
    mask: Mask | None = None
    options: ContextParallelOptions = field(default_factory=ContextParallelOptions)
    kv_layout: AxisLayout | None = None
    groups: tuple[ProcessGroup, ProcessGroup] | None = None
    chunk: tuple[int, ChunkRows] | None = None
    hooks: AttentionHooks = NO_HOOKS
    calls: int = 0
    other_calls: int = 0
    latest: Execution | None = None
    _made: dict = field(default_factory=dict)  # executions, rows of padding and visible keys

    @property
    def rank(self) -> int:
        """The number of the present shard of the layout: this rank, or the chunk."""
        return self.mesh.get_local_rank() if self.chunk is None else self.chunk[0]

    def show_scores(self, layer: int, lse: Tensor, sequences: Sequence[int]) -> None:
        """Pass the log-sum-exp of one call to the function of the hooks, if there is one.

        Padded rows are passed as -inf. `lse` is not changed.

        Args:
            layer: The layer; -1 if none is named.
            lse: (B, H, S), of this rank's rows.
            sequences: The numbers of the sequences in the batch.
        """
        scores = self.hooks.scores
        if scores is None:
            return
        if (padding := scores.padding) is not None:
            key = "padded", *sequences
            if key not in self._made:  # (B, S), computed once for all layers
                rows = rows_on(self.layout, self.rank, padding.device)
                self._made[key] = padding[list(sequences)][:, rows].to(lse.device)
            lse = lse.masked_fill(self._made[key][:, None], -torch.inf)
        scores.take(layer, lse)

    def execution(
        self,
        inputs: AttentionInputs,
        settings: AttentionSettings,
        sequences: Sequence[int],
        layer: int = -1,
    ) -> Execution:
        """Return the execution of attention for inputs of these shapes; cached.

        Args:
            inputs: Tensors of the shapes, types and devices of the call.
            settings: The settings of the attention; an execution does not depend on the scale.
            sequences: The numbers of the sequences in the batch.
            layer: The layer whose keys and values are kept, for a sequence in chunks.

        Raises:
            ContextParallelError: The context did not cut the inputs, or the method cannot divide the heads.
            ContextParallelError: The handle of a sequence in chunks names no layer.
            OptionError: The kernel cannot compute it.
        """
        # With one mask for all sequences, the plan does not depend on their numbers.
        several = self.mask is not None and self.mask.sequences > 1
        masked = tuple(sequences) if several else ()
        kinds = (x if x is None else (x.shape, x.dtype, x.device.type) for x in inputs)
        key = (*kinds, masked, settings.is_causal, settings.window, settings.softcap)
        if key not in self._made:
            self._check(inputs, masked)
            self._made[key] = self._built(inputs.q, settings, masked)
        self.latest = self._made[key]
        if self.chunk is None:
            return self.latest
        if layer < 0:
            raise ContextParallelError(
                "attention of a sequence in chunks got a handle that names no layer; let the model give each layer "
                "`with_layer(attention_plan, number)`"
            )
        return replace(self.latest, layer=layer)

    def _built(
        self, q: Tensor, settings: AttentionSettings, sequences: tuple[int, ...]
    ) -> Execution:
        """Return a new execution. sequences: their numbers in the batch; () means any."""
        mask = self._mask(sequences, settings.is_causal, settings.window)
        if self.chunk is None:
            plan = make_plan(
                self.layout,
                mask,
                self.options.method,
                self.rank,
                kv_layout=self.kv_layout,
                head_degree=self.options.head_degree(self.mesh.size()),
            )
        else:
            plan = chunk_plan(self.layout, mask, self.rank)
        groups = self.groups or (self.mesh.get_group(),) * 2
        return build_execution(
            plan,
            q,
            groups,
            self.options,
            self.chunk and self.chunk[1],
            self.hooks.gpu,
            KernelNeeds(
                bands=mask.has_windows,
                fixed=self.mask is None and not settings.window,
                softcap=settings.softcap,
            ),
        )

    def _check(self, inputs: AttentionInputs, sequences: tuple[int, ...]) -> None:
        """Raise ContextParallelError if the inputs of an attention call do not fit each other or this rank's plan.

        sequences: their numbers in the batch; () means any.
        """
        inputs.check()
        q, k, *_ = inputs
        for x, layout in (q, self.layout), (k, self.kv_layout or self.layout):
            if x.shape[2] != (length := layout.local_length(self.rank)):
                raise ContextParallelError(
                    f"context-parallel attention got {x.shape[2]} rows of the sequence and its plan has {length} for "
                    "this rank; cut the inputs by naming them in `context_parallel(buffers=...)`"
                )
        if sequences and len(sequences) != q.shape[0]:
            raise ContextParallelError(
                f"context-parallel attention got {q.shape[0]} sequences and a plan for {len(sequences)}; pass the "
                "handle's entries of the same sequences"
            )
        try:
            check_heads(
                q.shape[1], self.options.head_degree(self.mesh.size()), self.options.method
            )
        except OptionError as error:
            raise ContextParallelError(str(error)) from None

    def visible(self, sequences: Sequence[int]) -> Tensor:
        """Return the keys that each of this rank's rows sees under the causal mask, on the host.

        Args:
            sequences: The numbers of the sequences in the batch.

        Returns:
            (B, S, 2) int64, or (1, S, 2) if all sequences have one mask: the first visible key, and the end of the
            keys. The result is cached, so do not write to it.
        """
        several = self.mask is not None and self.mask.sequences > 1
        masked = tuple(sequences) if several else ()
        key = "visible", *masked
        if key not in self._made:
            intervals = self._mask(masked, True, 0).intervals()
            own = intervals[:, self.layout.indices(self.rank)]
            self._made[key] = torch.from_numpy(own)
        return self._made[key]

    def _mask(self, sequences: tuple[int, ...], is_causal: bool, window: int) -> Mask:
        lengths = self.layout.length, (self.kv_layout or self.layout).length
        if window:
            mask = sliding_window(lengths[0], window, lengths[1], is_causal=is_causal)
        else:
            mask = causal(*lengths) if is_causal else full(*lengths)
        if self.mask is None:
            return mask
        if sequences in ((), tuple(range(self.mask.sequences))):
            return mask & self.mask
        return mask & by_sequence([self.mask.sequence(number) for number in sequences])


@contextmanager
def opened(
    live: LivePlan, sequences: int | None, *, local_attention: bool = True
) -> Iterator[Tensor]:
    """Yield the handle of a plan, (sequences,) int64 on the host, inside `with`, for the forward AND the backward.

    The table has the plan until the end.

    Args:
        live: The plan.
        sequences: Number of sequences of the batch; None means the number of sequences of the mask.
        local_attention: Whether nothing needs to run over the plan, if no module is parallelised over the mesh.

    Raises:
        ContextParallelError: At the end, modules are parallelised over the mesh, and none of them has run.
        ContextParallelError: At the end, nothing has run over the plan, and local_attention is False.
    """
    sequences = sequences or (1 if live.mask is None else live.mask.sequences)
    number = next(_numbers)
    _live[number] = live
    try:
        yield torch.arange(sequences, dtype=torch.int64, device="cpu") + number * _SEQUENCES
        modules = parallelised_modules(live.mesh)
        if live.calls == 0 and modules:
            raise ContextParallelError(
                f"the inputs were cut over {live.mesh.size()} ranks, but none of the {modules} context-parallel "
                "attention modules ran inside the context; run the model's forward and backward inside it"
            )
        if live.calls + live.other_calls == 0 and not local_attention:
            raise ContextParallelError(
                f"the inputs were cut over {live.mesh.size()} ranks, but no attention ran over them; run the model's "
                f"forward and backward inside the context, and {WAYS_TO_THE_PLAN}"
            )
    finally:
        del _live[number]


def flat_mesh(
    mesh: DeviceMesh, options: ContextParallelOptions
) -> tuple[DeviceMesh, tuple[ProcessGroup, ProcessGroup] | None]:
    """Return the 1-D mesh of all ranks, and the groups of `LivePlan`, which are None for a 1-D mesh.

    All ranks of the mesh must call it.

    Args:
        mesh: The mesh: 1-D, or for `hybrid` 2-D.
        options: How attention is spread.

    Raises:
        ContextParallelError: The mesh does not have the shape that the method needs.
    """
    if not options.spread.two_level and mesh.ndim == 1:
        return mesh, None
    shape = (options.hybrid_degrees or ())[::-1]
    if mesh.shape != shape:
        raise ContextParallelError(
            f"context_parallel with method {options.method!r} got a mesh of shape {mesh.shape}; give "
            + (f"one of shape {shape}, ring x all-to-all ranks" if shape else "a 1-D mesh")
        )
    return flattened(mesh, "cp"), (mesh.get_group(0), mesh.get_group(1))


def any_plan_open(mesh: DeviceMesh) -> bool:
    """Return whether a context over a mesh is open.

    Args:
        mesh: The mesh.
    """
    return any(live.mesh.get_group() is mesh.get_group() for live in list(_live.values()))


def with_layer(handle: Tensor | None, layer: int) -> Tensor | None:
    """Return a handle that also names a layer, for sequences in chunks; None if there is no handle.

    Args:
        handle: The handle, (B,) int64; None if absent.
        layer: The number of the layer, below 2,047.
    """
    return None if handle is None else handle + (layer + 1) * _LAYER


def layer_of(handle: Tensor) -> int:
    """Return the layer that a handle names; -1 if it names none.

    Args:
        handle: The handle, (B,) int64.
    """
    return int(handle[0]) // _LAYER - 1


def resolve(handle: Tensor) -> tuple[LivePlan, list[int]]:
    """Return the open plan that a handle names, and the numbers of the handle's sequences in the batch.

    Args:
        handle: The handle, (B,) int64.

    Raises:
        ContextParallelError: No context is open, the handle belongs to a closed one, or its entries name several plans.
    """
    if not _live:
        raise ContextParallelError(
            "context-parallel attention was called outside its context; enter `context_parallel(...)` around the "
            "forward and the backward"
        )
    entries = (handle % _LAYER).tolist()
    numbers = {entry // _SEQUENCES for entry in entries}
    if len(numbers) != 1:
        raise ContextParallelError(
            f"a handle of {len(entries)} sequences names {len(numbers)} plans; pass entries of one `attention_plan`"
        )
    number = numbers.pop()
    if (live := _live.get(number)) is None:
        raise ContextParallelError(
            f"the plan {number} of this context-parallel attention belongs to a context that is closed; pass "
            "`attention_plan` of the open context to the model"
        )
    return live, [entry % _SEQUENCES for entry in entries]


def own_positions(handle: Tensor, device: torch.device) -> Tensor:
    """Return the positions in the sequence of the rows of this rank, or chunk: (S,) int64.

    Args:
        handle: The handle, (B,) int64.
        device: The device of the result.
    """
    live, _ = resolve(handle)
    return rows_on(live.layout, live.rank, device)


class Mark:
    """A mark of a module whose attention is parallelised over a group. A copy keeps the group, a saved mark does not.

    Args:
        group: The group; None in a mark that was loaded.
    """

    def __init__(self, group: ProcessGroup | None) -> None:
        self.group = group
        _marks.add(self)

    def __deepcopy__(self, _: dict) -> "Mark":
        return Mark(self.group)

    def __reduce__(self) -> tuple:
        return Mark, (None,)  # a group belongs to its process


_marks: WeakSet[Mark] = WeakSet()


def parallelised_modules(mesh: DeviceMesh) -> int:
    """Return the number of modules of this process that run their attention over a mesh.

    Args:
        mesh: The mesh.
    """
    # Compare groups: slicing a mesh again makes another object, and the mesh of an earlier job may be equal.
    return sum(mark.group is mesh.get_group() for mark in _marks)
