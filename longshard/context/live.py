"""The table of open plans, in which the operator finds its plan by the handle that the model passes to it.

A handle is an int64 tensor (sequences,). Its entry for a sequence of the batch names an entry of the table and the
sequence's place in the batch. As a tensor, a handle does not recompile a graph, and is cut with a micro-batch. With a
sequence in chunks it also names the layer, whose keys and values are kept.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from longshard.context.execution.build import Execution, build_execution
from longshard.context.execution.chunks import ChunkRows
from longshard.context.execution.kernels.choose import GPU_KERNELS, GpuKernels, KernelNeeds
from longshard.context.execution.latent import value_dim
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


ScoreFunction = Callable[[int, torch.Tensor], None]
"""(layer, -1 if none is named; log-sum-exp of the scores of a call of attention, (B, H, S), -inf in padding)."""


@dataclass(frozen=True)
class Scores:
    """A function that takes the scores of each call of attention inside a context.

    padding: (B, S) bool of the whole sequences, True in padding. None: there is none.
    """

    take: ScoreFunction
    padding: torch.Tensor | None = None


class AttentionSettings(NamedTuple):
    """What one attention computes, whatever its inputs. All fields are numbers: an operator takes them as a list."""

    scale: float
    """Factor of the scores, such as `head_dim ** -0.5`."""
    is_causal: bool = True
    """Whether later tokens are hidden. With more or fewer keys than queries, the last query stands at the last key."""
    window: int = 0
    """A query sees the last `window` keys, or without is_causal as many on each side. 0: no window."""
    softcap: float = 0.0
    """c of scores c * tanh(score / c) (Gemma 2, arXiv 2408.00118), which the kernel `math` computes. 0: none."""
    keep_exchanged: bool = False
    """Save what an exchange of heads has brought for the backward, instead of q, k, v and the results, so that only the
    gradient of the output is sent to the ranks of the heads."""

    @classmethod
    def of(cls, numbers: Sequence[float]) -> "AttentionSettings":
        """Return the settings of a list of their numbers."""
        scale, is_causal, window, softcap, keep_exchanged = numbers
        return cls(scale, bool(is_causal), int(window), softcap, bool(keep_exchanged))


class AttentionInputs(NamedTuple):
    """The tensors of one call of attention, as `context_parallel_attention` takes them."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    up: torch.Tensor | None = None


@dataclass(eq=False)
class LivePlan:
    """The plan of an open context: its layout and mask, and how often operators ran in it.

    mesh: 1-D. kv_layout: the layout of the keys, if they are not as many as the queries. groups: the group over which
    K/V are sent in stages, and the group that exchanges heads; by default the mesh's. chunk: the number of a chunk of
    the sequence, and what waits between chunks; the layout is then that of all chunks, and the mesh has one rank.
    scores: who takes the scores of attention. calls: of attention and scans; other_calls: of convolutions. latest: the
    execution of the last call. gpu: kernels of this process.
    """

    mesh: DeviceMesh
    layout: AxisLayout
    mask: Mask | None = None
    options: ContextParallelOptions = field(default_factory=ContextParallelOptions)
    kv_layout: AxisLayout | None = None
    groups: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None
    chunk: tuple[int, ChunkRows] | None = None
    scores: Scores | None = None
    calls: int = 0
    other_calls: int = 0
    latest: Execution | None = None
    gpu: GpuKernels = GPU_KERNELS
    _executions: dict[tuple, Execution] = field(default_factory=dict)
    _padded: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """The number of the layout's shard that is here: of this rank, or of the chunk."""
        return self.mesh.get_local_rank() if self.chunk is None else self.chunk[0]

    def show_scores(self, layer: int, lse: torch.Tensor, sequences: Sequence[int]) -> None:
        """Show the log-sum-exp (B, H, S) of this rank's rows of some sequences of the batch, if somebody takes it."""
        if self.scores is None:
            return
        if self.scores.padding is not None:
            padded = self._padded_rows(tuple(sequences), lse.device)
            lse = lse.masked_fill(padded[:, None], -torch.inf)
        self.scores.take(layer, lse)

    def _padded_rows(self, sequences: tuple[int, ...], device: torch.device) -> torch.Tensor:
        """Return where this rank's rows of some sequences are padding, (B, S) bool; made once for all layers."""
        if sequences not in self._padded:
            padding = self.scores.padding
            rows = rows_on(self.layout, self.rank, padding.device)
            self._padded[sequences] = padding[list(sequences)][:, rows].to(device)
        return self._padded[sequences]

    def execution(
        self,
        inputs: AttentionInputs,
        settings: AttentionSettings,
        sequences: Sequence[int],
        layer: int = -1,
    ) -> Execution:
        """Return the execution of attention of these shapes.

        Args:
            inputs: tensors of the shapes, types and devices of the call.
            settings: of the attention; its scale is no part of an execution.
            sequences: of the batch.
            layer: of a sequence in chunks, for which keys and values are kept.

        Raises:
            ContextParallelError: the context did not cut the inputs, the method cannot divide the heads, or no layer is
                given for a sequence in chunks.
            OptionError: the kernel cannot do it.
        """
        # With one mask for all sequences, the plan does not depend on which sequences these are.
        several = self.mask is not None and self.mask.sequences > 1
        of_mask = tuple(sequences) if several else ()
        kinds = (x if x is None else (x.shape, x.dtype, x.device.type) for x in inputs)
        key = (*kinds, of_mask, settings.is_causal, settings.window, settings.softcap)
        if key not in self._executions:
            self._check(inputs, of_mask)
            self._executions[key] = self._built(inputs.q, settings, of_mask)
        self.latest = self._executions[key]
        if self.chunk is None:
            return self.latest
        if layer < 0:
            raise ContextParallelError(
                "attention of a sequence in chunks got a handle that names no layer; let the model give each layer "
                "`of_layer(attention_plan, number)`"
            )
        return replace(self.latest, layer=layer)

    def _built(
        self, q: torch.Tensor, settings: AttentionSettings, sequences: tuple[int, ...]
    ) -> Execution:
        """Return a new execution. sequences: of the batch, () for any."""
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
            self.gpu,
            KernelNeeds(
                bands=mask.has_windows,
                fixed=self.mask is None and not settings.window,
                softcap=settings.softcap,
            ),
        )

    def _check(self, inputs: AttentionInputs, sequences: tuple[int, ...]) -> None:
        """Check the inputs of an attention call; sequences: of the batch, () for any."""
        q, k, v, up = inputs
        alike = q.ndim == 4 and k.shape == v.shape and q.dtype == k.dtype == v.dtype
        if up is not None:
            _check_latents(inputs)
        elif (
            not alike
            or q.shape[0] != k.shape[0]
            or q.shape[3] != k.shape[3]
            or q.shape[1] % max(k.shape[1], 1)
        ):
            raise ContextParallelError(
                f"context-parallel attention got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} of types "
                f"{q.dtype}, {k.dtype}, {v.dtype}; give (B, H, S, D) and twice (B, K, T, D) of one type, K dividing H"
            )
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


def _check_latents(inputs: AttentionInputs) -> None:
    q, k, v, up = inputs
    alike = q.dtype == k.dtype == up.dtype and (q.ndim, k.ndim, v.ndim, up.ndim) == (4, 4, 4, 3)
    fits = (
        alike
        and k.shape[:2] == (q.shape[0], 1)
        and up.shape[0] == q.shape[1]
        and v.shape == (*k.shape[:3], 0)
    )
    if not fits or up.shape[2] > k.shape[3] or not 0 < value_dim(q, k, up) <= q.shape[3]:
        raise ContextParallelError(
            f"latent attention got q {tuple(q.shape)}, latents {tuple(k.shape)}, values {tuple(v.shape)} and up "
            f"{tuple(up.shape)} of types {q.dtype}, {k.dtype}, {v.dtype}, {up.dtype}; give (B, H, S, N + P), "
            "(B, 1, T, R + P), (B, 1, T, 0) and (H, N + V, R) of one type, V at most N + P"
        )


@contextmanager
def opened(
    live: LivePlan, sequences: int | None, *, local_attention: bool = True
) -> Iterator[torch.Tensor]:
    """Enter a plan into the table and yield its handle, (sequences,) int64, for the forward AND the backward.

    Args:
        live: the plan.
        sequences: of the batch; None: as many as the mask has.
        local_attention: let it pass that nothing ran over the plan, if no module is parallelised over the mesh.

    Raises:
        ContextParallelError: at the end, nothing ran over the plan.
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
) -> tuple[DeviceMesh, tuple[dist.ProcessGroup, dist.ProcessGroup] | None]:
    """Return the 1-D mesh of all ranks, and the groups of `LivePlan`.

    Raises:
        ContextParallelError: the mesh has not the shape that the method needs.
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
    """Return whether a context over this mesh is open."""
    return any(live.mesh.get_group() is mesh.get_group() for live in list(_live.values()))


def of_layer(handle: torch.Tensor | None, layer: int) -> torch.Tensor | None:
    """Return a handle that also names a layer, below 2,047, for sequences in chunks; None if there is no handle."""
    return None if handle is None else handle + (layer + 1) * _LAYER


def layer_of(handle: torch.Tensor) -> int:
    """Return the layer that a handle names, -1 for none."""
    return int(handle[0]) // _LAYER - 1


def resolve(handle: torch.Tensor) -> tuple[LivePlan, list[int]]:
    """Return the open plan that a handle names, and the handle's sequences of the batch.

    Raises:
        ContextParallelError: no context is open, or the handle belongs to a closed one.
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


def own_positions(handle: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the positions in the sequence of the rows that are here, by the plan that a handle names: (S,) int64."""
    live, _ = resolve(handle)
    return rows_on(live.layout, live.rank, device)


class Mark:
    """A mark of a module whose attention is parallelised over a group: copied with it, but saved without the group."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        _marks.add(self)

    def __deepcopy__(self, _: dict) -> "Mark":
        return Mark(self.group)

    def __reduce__(self) -> tuple:
        return Mark, (None,)  # a group belongs to its process


_marks: WeakSet[Mark] = WeakSet()


def parallelised_modules(mesh: DeviceMesh) -> int:
    """Return how many modules of this process run their attention over `mesh`."""
    # Compared by group: slicing a mesh again makes another object, and the mesh of an earlier job may be equal.
    return sum(mark.group is mesh.get_group() for mark in _marks)
