"""Exchange of heads (DeepSpeed Ulysses, arXiv 2309.14509): a rank attends with some heads of all rows.

One exchange takes queries, keys and values from "my rows of all heads" to "all rows of my heads". A second one takes
the output back. The backward does the same with the gradients. Key/value heads are replicated to the least common
multiple of their number and the degree. So every degree that divides the query heads works. The gradients of all
copies are added up.

    2 ranks, 8 rows head-tail, 4 query heads, 1 key/value head (replicated: rank r works with copy r)

                   rank 0                  rank 1
    before         rows 01..67             rows ..2345..           each with q 0123, kv 0
      q  (B, 4, 4, D)  kv (B, 1, 4, D)     -> _to_heads ->
    between        rows 01234567           rows 01234567           rank 0: q 01, kv 0; rank 1: q 23, kv 0
      q  (B, 2, 8, D)  kv (B, 1, 8, D)     -> attention, of one rank or of a ring over groups (`hybrid`)
      out (B, 2, 8, D)                     -> _to_rows ->
    after          rows 01..67             rows ..2345..           each with out 0123
      out (B, 4, 4, D)

"All rows" are the whole sequence for `all_to_all`, and the rows of a head group for `hybrid`. Between the two exchanges
runs the plan of a ring, of one rank or of several.

All tensors are sent side by side in rows of bytes (`packed_rows.py`).

Shapes below. B: batch. H, K: all query heads, all key/value heads. h, k: heads of one rank in one pass. S, T: this
rank's rows of queries and of keys. R: all rows of the head group. N: ranks of the head group.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from longshard.context.execution.kernels.base import (
    BackwardInputs,
    Terms,
    repeated,
    rows_first,
    summed,
)
from longshard.context.execution.packed_rows import PackedRows, Tensors
from longshard.context.execution.ring import StagedExecution
from longshard.context.execution.stages import (
    fold_batch,
    restore_shape,
    unfold_batch,
    with_next,
)
from longshard.context.planning.heads import HeadShare
from longshard.context.planning.options import ContextParallelError
from longshard.context.planning.plan import RankPlan
from longshard.sharding.exchange import Pending, all_to_all
from longshard.sharding.tensors import wide_type


class Kept(NamedTuple):
    """Inputs of a backward after a forward that kept the exchanged heads.

    Attributes:
        dout: The gradient of the output, (B, H, S, D).
        inputs: The bytes of q, k and v that the forward returned.
        results: The bytes of output and log-sum-exp that the forward returned.
        kv_heads: K, the key/value heads of all ranks.
    """

    dout: Tensor
    inputs: Tensor
    results: Tensor
    kv_heads: int

    def likes(self) -> list[Tensor]:
        """Return tensors without memory that have the shapes of q, k, v and the memory order (B, S, H, D)."""
        _, heads, rows, width = self.dout.shape
        like = torch.empty_like(self.dout, device="meta")
        return [rows_first(like, n, rows, width) for n in (heads, self.kv_heads, self.kv_heads)]


_Passes = Iterator[tuple[HeadShare, list[BackwardInputs]]]
"""The inputs of each pass in a list of one: the caller pops the entry, so that it is freed after its use."""


@dataclass(frozen=True)
class HeadExchange:
    """The execution of a plan in which the ranks of `group` divide the heads.

    The backward gets `BackwardInputs`, and exchanges all inputs again. Or it gets the results of a forward with `keep`,
    as `Kept`: then the rows of one product are exchanged instead of six.

    If passes have a part of the query heads of one key/value head, its keys and values are sent with the first of these
    passes. They are kept for the other passes. Their gradients are added up and sent with the last one.
    Gradients of a head's copies are added up in float32; without copies they are complete when they are sent.

    Attributes:
        plan: The plan.
        group: The group that exchanges heads.
        inner: The execution for all rows of this rank's heads.
        heads_per_pass: Key/value heads of a rank that are sent at a time; 0 means all.
        query_heads_per_pass: Query heads of one key/value head that are sent at a time; 0 means all.
    """

    plan: RankPlan
    group: ProcessGroup
    inner: StagedExecution
    heads_per_pass: int = 0
    query_heads_per_pass: int = 0

    def forward(self, *qkv: Tensor, terms: Terms, keep: bool = False) -> tuple[Tensor, ...]:
        """Return the output, in the shape of q, and the log-sum-exp, (B, H, S). A latent is sent to all ranks.

        Args:
            *qkv: This rank's rows: q (B, H, S, D), k and v (B, K, T, D).
            terms: The scale, and optional inputs.
            keep: Whether to also return all rows of this rank's heads as two 1-D tensors of bytes: the bytes of q, k
                and v, and the bytes of the results.

        Raises:
            ContextParallelError: keep, and the keys have another layout than the queries, or are latents.
        """
        if keep:
            self._check_keep(terms)
        q, k, v = (fold_batch(x, self.plan) for x in qkv)
        passes = self._passes(q, k.shape[1])
        returning = []
        into = [], []
        kept = Tensors()
        held = Tensors()
        for share, bundle, inputs in self._arriving([q], [k, v], passes, kind="qkv"):
            all_q, *head_rows = bundle.tensors(inputs)  # (B, h, R, D), (B, k, R, D)
            head_rows = [all_q, *_keys(head_rows, share, held)]
            kept += inputs if keep else []
            del inputs
            own = terms.of(share.queries(self.group.rank()))
            results = [*self.inner.forward(*head_rows, terms=own)]  # (B, h, R, D), (B, h, R)
            width = results[0].shape[3]
            del all_q, head_rows
            bundle = PackedRows.of(results, [], self.plan.head_group_layouts)
            rows = bundle.rows(results)
            results.clear()
            kept += rows if keep else []
            returning.append(self._send_rows(bundle, rows, into, share, kind="out"))
            del rows
        out = rows_first(q, q.shape[1], q.shape[2], width)
        lse = q.new_empty(q.shape[:3], dtype=wide_type(q.dtype))
        into[0].extend((out, lse))
        for each in returning:
            each.wait()
        return unfold_batch(out, qkv[0]), unfold_batch(lse, qkv[0]), *(x.view(-1) for x in kept)

    def _check_keep(self, terms: Terms) -> None:
        """Check that the exchanged rows can be kept for the backward. The caller asks only if it wants to keep them.

        ContextParallelError if keys and values come from latents, or have another layout than the queries.
        """
        if terms.up is not None:
            raise ContextParallelError(
                "keep_exchanged keeps keys and values, and latent attention sends latents; use keep_exchanged = False"
            )
        # These are the ranges of all ranks, so that no head group raises alone.
        if self.plan.q_layout.ranges != self.plan.kv_layout.ranges:
            raise ContextParallelError(
                "keep_exchanged keeps rows of queries and keys together, which needs the same layout for both, as in "
                "self-attention; use keep_exchanged = False"
            )

    def backward(self, inputs: BackwardInputs | Kept, terms: Terms) -> tuple[Tensor, ...]:
        """Return the gradients of q, k, v, and this rank's parts of the gradients of the sinks and of `up`, if present.

        Args:
            inputs: This rank's rows, or the kept heads.
            terms: The scale, and optional inputs. Their gradients are zero for heads of other ranks.
        """
        dout = fold_batch(inputs.dout, self.plan)
        _, heads, rows, _ = dout.shape
        pass_inputs = self._kept if isinstance(inputs, Kept) else self._exchanged
        likes = inputs.likes() if isinstance(inputs, Kept) else inputs[1:4]
        _, kv_heads, kv_rows, _ = fold_batch(likes[1], self.plan).shape

        passes = self._passes(dout, kv_heads)
        copies = passes[0].copies
        sum_dtype = wide_type(dout.dtype)
        gradient_dtype = sum_dtype if copies > 1 else dout.dtype
        optional_gradients = [None if x is None else torch.zeros_like(x) for x in terms[1:]]
        returning = []
        into = [], []
        sums = []
        for share, inside in pass_inputs(inputs, dout, passes):
            own_heads = share.queries(self.group.rank())
            in_parts = not (share.has_keys and share.has_gradients)
            kv_dtype = dout.dtype if in_parts else gradient_dtype
            parts = [*self.inner.backward(inside.pop(), terms.of(own_heads), kv_dtype=kv_dtype)]
            for total in reversed(optional_gradients):
                if total is not None:
                    total[own_heads] = parts.pop()
            if in_parts:
                parts[1:] = _summed_over_passes(
                    parts[1:], share, sums, sum_dtype, gradient_dtype
                )
            bundle = PackedRows.of(parts[:1], parts[1:], self.plan.head_group_layouts)
            all_rows = bundle.rows(parts)
            parts.clear()
            targets = into if share.has_gradients else (into[0], [])
            returning.append(self._send_rows(bundle, all_rows, targets, share, kind="dqkv"))
            del all_rows
        into[0].append(rows_first(dout, heads, rows, likes[0].shape[3]))
        into[1].extend(
            rows_first(dout, kv_heads * copies, kv_rows, like.shape[3], gradient_dtype)
            for like in likes[1:]
        )
        for each in returning:
            each.wait()
        gradients = into[0][0], *(summed(x, kv_heads) for x in into[1])
        optional = [x for x in optional_gradients if x is not None]
        return *map(restore_shape, gradients, likes), *optional

    def _exchanged(
        self, inputs: BackwardInputs, dout: Tensor, passes: list[HeadShare]
    ) -> _Passes:
        """Yield the inputs of the backward of each pass: all rows of this rank's heads, exchanged again."""
        q, k, v, out, lse = (fold_batch(x, self.plan) for x in inputs[1:])
        held = []
        for share, bundle, *rows in self._arriving(
            [q, dout, out, lse], [k, v], passes, kind="qkv_dout"
        ):
            yield share, [_backward_inputs(bundle.tensors(rows.pop()), share, held)]

    def _kept(self, kept: Kept, dout: Tensor, passes: list[HeadShare]) -> _Passes:
        """Yield the inputs of the backward of the only pass: the exchanged gradient of the output, and kept heads."""
        (share,) = passes
        width, heads, _, d = dout.shape
        like_q, like_k = (
            dout.new_empty(width, n, 0, d) for n in (heads // self.plan.head_degree, share.stop)
        )
        like_lse = like_q.new_empty(like_q.shape[:3], dtype=wide_type(dout.dtype))
        layouts = self.plan.head_group_layouts
        input_rows = PackedRows.of([like_q], [like_k] * 2, layouts)
        result_rows = PackedRows.of([like_q, like_lse], [], layouts)
        ((_, bundle, rows),) = self._arriving([dout], [], passes, kind="dout")
        (all_dout,) = bundle.tensors(rows)
        all_q, *all_kv = input_rows.tensors([kept.inputs.view(-1, input_rows.blocks[0].width)])
        all_out, all_lse = result_rows.tensors(
            [kept.results.view(-1, result_rows.blocks[0].width)]
        )
        yield share, [BackwardInputs(all_dout, all_q, *all_kv, all_out, all_lse)]

    def _passes(self, q: Tensor, kv_heads: int) -> list[HeadShare]:
        return HeadShare.passes(
            q.shape[1],
            kv_heads,
            self.plan.head_degree,
            self.heads_per_pass,
            self.query_heads_per_pass,
        )

    def _arriving(
        self, queries: Tensors, keys: Tensors, passes: list[HeadShare], *, kind: str
    ) -> Iterator[tuple[HeadShare, PackedRows, Tensors]]:
        """Yield all rows of this rank's heads in the order of the sequence, pass by pass, as bytes.

        The next pass is sent while the caller computes with a pass. kind: as in `all_to_all`.
        """
        keys = [repeated(x, x.shape[1] * passes[0].copies) for x in keys]
        incoming = self._send_heads(queries, keys, passes[0], kind=kind)
        for share, following in with_next(passes):
            bundle, received, pending = incoming
            incoming = (
                None
                if following is None
                else self._send_heads(queries, keys, following, kind=kind)
            )
            pending.wait()
            rows = [bundle.in_sequence(received)]
            # If the rows were copied into order, this frees the message.
            del received, pending
            yield share, bundle, rows.pop()

    def _send_heads(
        self, queries: Tensors, keys: Tensors, share: HeadShare, *, kind: str
    ) -> tuple[PackedRows, Tensor, Pending]:
        """Start the exchange from my rows of all heads, (B, H, S, ...), to all rows of my heads.

        Return the layout of the message, the buffer for the messages from all ranks, and the handle.
        """
        degree = self.plan.head_degree
        here = self.group.rank()
        queries, keys = _by_rank(queries, keys if share.has_keys else [], share, degree)
        # (B, h, S, ...)
        likes = ([x[0].movedim(0, 2) for x in each] for each in (queries, keys))
        bundle = PackedRows.of(*likes, self.plan.head_group_layouts)
        wire = queries[0].new_empty(degree, bundle.size(here), dtype=torch.uint8)
        for view, x in zip(bundle.views(wire, here), (*queries, *keys), strict=True):
            view.copy_(x)
        sizes = [bundle.size(rank) for rank in range(degree)]
        received, pending = all_to_all(
            wire.view(-1), [bundle.size(here)] * degree, sizes, self.group, kind=kind
        )
        return bundle, received, pending

    def _send_rows(
        self,
        bundle: PackedRows,
        rows: Tensors,
        into: tuple[Tensors, Tensors],
        share: HeadShare,
        *,
        kind: str,
    ) -> Pending:
        """Start the exchange from all rows of my heads, as bytes, to my rows of all heads.

        into: lists of the target tensors of queries and of keys. They are read when the caller waits for the result, so
        that the caller may fill the lists until then.
        """
        degree = self.plan.head_degree
        here = self.group.rank()
        sizes = [bundle.size(rank) for rank in range(degree)]
        own_sizes = [bundle.size(here)] * degree
        received, pending = all_to_all(
            bundle.by_rank(rows), sizes, own_sizes, self.group, kind=kind
        )

        def arrived() -> None:
            queries, keys = _by_rank(*into, share, degree)
            views = bundle.views(received.view(degree, bundle.size(here)), here)
            for target, view in zip((*queries, *keys), views, strict=True):
                target.copy_(view)

        return Pending([pending], [received], arrived)


def _backward_inputs(exchanged: Tensors, share: HeadShare, held: Tensors) -> BackwardInputs:
    """Return exchanged tensors in the order of kernels: (B, h, R, ...), keys (B, k, R, D)."""
    q, dout, out, lse, *keys = exchanged
    return BackwardInputs(dout, q, *_keys(keys, share, held), out, lse)


def _keys(arrived: Tensors, share: HeadShare, held: Tensors) -> Tensors:
    """Return keys and values of a pass.

    arrived: keys and values that were sent in this pass; empty if an earlier pass sent them.
    held: a list of copies of keys and values that several passes use; changed in place.
    """
    if share.has_keys and share.has_gradients:
        return arrived
    held[:] = [x.clone() for x in arrived] or held
    return held


def _summed_over_passes(
    gradients: Tensors,
    share: HeadShare,
    sums: Tensors,
    sum_dtype: torch.dtype,
    dtype: torch.dtype,
) -> Tensors:
    """Add gradients of keys and values to the list `sums`, in place.

    Return the sums, in `dtype`, after the last pass of these keys; else an empty list.
    """
    if share.has_keys:
        sums[:] = [x.to(sum_dtype) for x in gradients]
    else:
        for total, gradient in zip(sums, gradients, strict=True):
            total.add_(gradient)
    return [x.to(dtype) for x in sums] if share.has_gradients else []


def _by_rank(
    queries: Tensors, keys: Tensors, share: HeadShare, degree: int
) -> tuple[Tensors, Tensors]:
    """Return views of each rank's heads of a pass, of queries and of keys: (B, H, S, ...) -> (N, S, B, h, ...).

    share: the heads of the pass. degree: N.
    """

    def of(x: Tensor, heads: slice) -> Tensor:
        return x.unflatten(1, (degree, -1))[:, :, heads].movedim((1, 3), (0, 1))

    return [of(x, share.queries(0)) for x in queries], [
        of(x, slice(share.start, share.stop)) for x in keys
    ]
