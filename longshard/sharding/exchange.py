"""All collectives that this project calls itself (FSDP and DTensor have their own), with calls and bytes counted.

`exchange` moves rows: each rank states which rows of an axis it wants, and gets them from their owners. A halo, a
change of layout, a gather and a scatter are exchanges. The adjoint adds up the gradients of a row at its owner.

Nothing is sent of tensors on the meta device: a forward without data shows shapes. A group of one rank has no
communicator: what would be sent is copied.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from longshard.sharding.layout import AxisLayout
from longshard.sharding.movement import Movement, plan_movement
from longshard.sharding.ranges import Range, Wanted, size
from longshard.sharding.tensors import wide_type, with_adjoint

Ranks = DeviceMesh | dist.ProcessGroup
"""A 1-D mesh, or a group."""

# kind -> calls of this process; tests compare them with the cost of a plan
calls: Counter[str] = Counter()
# kind -> bytes that this process sent to others; `all_reduce`, `all_gather` and `broadcast` are not counted
bytes_sent: Counter[str] = Counter()


def all_reduce(x: torch.Tensor, over: Ranks, op: str = "sum") -> torch.Tensor:
    """Reduce `x` over a 1-D mesh or a group, in place, and return it; over one rank nothing is sent.

    x: contiguous, of one shape on every rank; op: `sum`, `max` or `min`.
    """
    if over.size() > 1 and not x.is_meta:
        _count("all_reduce")
        dist.all_reduce(x, op=getattr(dist.ReduceOp, op.upper()), group=_group(over))
    return x


def all_gather(x: torch.Tensor, over: Ranks) -> torch.Tensor:
    """Return the `x` of every rank of a 1-D mesh or a group, in its order: (size, *x.shape)."""
    gathered = x.new_empty(over.size(), *x.shape)
    if x.is_meta:
        return gathered
    _count("all_gather")
    if over.size() == 1:
        return gathered.copy_(x.detach())
    all_gather_single(gathered.view(-1), x.reshape(-1), group=_group(over))
    return gathered


def broadcast(x: torch.Tensor, over: Ranks) -> torch.Tensor:
    """Copy the `x` of the first rank of a 1-D mesh or a group to all others, in place, and return it."""
    if over.size() > 1:
        _count("broadcast")
        dist.broadcast(x, group=_group(over), group_src=0)
    return x


def has_peers(over: Ranks) -> bool:
    """Return whether other ranks answer. Back end `fake` copies inputs to outputs: of one rank, or in a trace."""
    return dist.get_backend(_group(over)) != "fake"


def _group(over: Ranks) -> dist.ProcessGroup:
    return over if isinstance(over, dist.ProcessGroup) else over.get_group()


@dataclass(frozen=True)
class Transfer:
    """A contiguous tensor to or from a rank of the group."""

    tensor: torch.Tensor
    peer: int
    is_send: bool


@dataclass(eq=False)
class Pending:
    """Transfers that have started. Their tensors may be read and written after `wait`.

    kept: tensors that are kept alive until then, because another stream still uses their memory. arrived: what `wait`
    calls once, when everything has arrived. timeout: how long to wait; None: the group's time-out.
    """

    works: Sequence[dist.Work] = ()
    kept: Sequence[object] = ()
    arrived: Callable[[], None] | None = None
    timeout: timedelta | None = None

    def wait(self) -> None:
        for work in self.works:
            work.wait(*(() if self.timeout is None else (self.timeout,)))
        if self.arrived is not None:
            self.arrived()
        self.works = ()
        self.kept = ()
        self.arrived = None


def group_timeout(group: dist.ProcessGroup, device: torch.device | str) -> timedelta | None:
    """Return the time-out of the collectives of a group for tensors of a device; None if its backend has none."""
    # no public name as of torch 2.13
    options = group._get_backend(torch.device(device)).options
    return None if options is None else options._timeout


def send_receive(
    transfers: Sequence[Transfer],
    group: dist.ProcessGroup,
    *,
    kind: str,
    arrived: Callable[[], None] | None = None,
) -> Pending:
    """Start all transfers of this rank. Two ranks must list the transfers between them in the same order.

    kind: the name under which calls and sent bytes are counted. Empty transfers are skipped.
    """
    transfers = [transfer for transfer in transfers if transfer.tensor.numel()]
    if not transfers:
        return Pending(arrived=arrived)
    _count(kind, sum(t.tensor.nbytes for t in transfers if t.is_send))
    operations = [
        dist.P2POp(
            dist.isend if t.is_send else dist.irecv, t.tensor, group=group, group_peer=t.peer
        )
        for t in transfers
    ]
    timeout = None
    # its `wait` would use the time-out with which the group was made
    if dist.get_backend(group) == "gloo":
        timeout = group_timeout(group, "cpu")
    return Pending(dist.batch_isend_irecv(operations), transfers, arrived, timeout)


def allocate(
    group: dist.ProcessGroup, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
) -> torch.Tensor | None:
    """Return uninitialised memory, (the product of `size`,), that the group's network reads and writes without copies.

    NCCL has some on GPUs that NVLink SHARP joins; None without.
    """
    backend = group._get_backend(device)
    if not backend.supports_tensor_alloc(device):
        return None
    return backend.allocate_tensor(math.prod(size), dtype=dtype, device=device)


def gather_shards(
    x: torch.Tensor, group: dist.ProcessGroup, *, kind: str
) -> tuple[torch.Tensor, Pending]:
    """Start gathering the contiguous `x` of every rank, all of one shape; return ((size, *x.shape), handle)."""
    size = group.size()
    gathered = x.new_empty(size, *x.shape)
    _count(kind, x.nbytes * (size - 1))
    if size == 1:
        return gathered.copy_(x.detach()), Pending()
    work = all_gather_single(gathered.view(-1), x.view(-1), group=group, async_op=True)
    return gathered, Pending([work], [x])


def reduce_shards(
    x: torch.Tensor, group: dist.ProcessGroup, *, kind: str
) -> tuple[torch.Tensor, Pending]:
    """Start summing x[r] of every rank at rank r; return (sum of shape x.shape[1:], handle). x: contiguous."""
    size = group.size()
    summed = x.new_empty(x.shape[1:])
    _count(kind, summed.nbytes * (size - 1))
    if size == 1:
        return summed.copy_(x[0].detach()), Pending()
    work = reduce_scatter(summed.view(-1), x.view(-1), group=group, async_op=True)
    return summed, Pending([work], [x])


def all_to_all(
    sent: torch.Tensor,
    send_sizes: Sequence[int],
    receive_sizes: Sequence[int],
    group: dist.ProcessGroup,
    *,
    kind: str,
) -> tuple[torch.Tensor, Pending]:
    """Start sending each rank its piece of `sent` (1-D); return (the pieces of all ranks, one after another; handle).

    send_sizes, receive_sizes: elements to and from each rank; any may be 0.
    """
    received = sent.new_empty(sum(receive_sizes))
    if sent.is_meta:
        return received, Pending()
    own = send_sizes[group.rank()]
    _count(kind, (sum(send_sizes) - own) * sent.element_size())
    if group.size() == 1:
        return received.copy_(sent.detach()), Pending()
    is_async = not torch.compiler.is_compiling()  # what is traced has no handles
    work = dist.all_to_all_single(
        received, sent, list(receive_sizes), list(send_sizes), group=group, async_op=is_async
    )
    return received, Pending([work] if is_async else (), [sent])


def exchange_counts(
    counts: torch.Tensor, group: dist.ProcessGroup, *, kind: str
) -> tuple[list[int], list[int]]:
    """Tell each rank how many rows it will get; return how many go to each rank, and how many come from each.

    counts: (ranks,) int64, which depend on data: the host waits for them.
    """
    one = [1] * group.size()
    theirs, pending = all_to_all(counts, one, one, group, kind=kind)
    pending.wait()
    return counts.tolist(), theirs.tolist()


def send_rows(
    x: torch.Tensor,
    sent: Sequence[int],
    arriving: Sequence[int],
    group: dist.ProcessGroup,
    *,
    kind: str,
) -> torch.Tensor:
    """Send the next sent[r] rows of x to each rank r; return the rows of all ranks, one rank after another."""
    width = x.shape[1:].numel()
    sizes = ([rows * width for rows in counts] for counts in (sent, arriving))
    arrived, pending = all_to_all(x.reshape(-1), *sizes, group, kind=kind)
    pending.wait()
    return arrived.view(sum(arriving), *x.shape[1:])


def _count(kind: str, size: int | None = None) -> None:
    if torch.compiler.is_compiling():
        return  # a graph of torch.compile has no place for counters
    calls[kind] += 1
    if size is not None:
        bytes_sent[kind] += size


# torch 2.13 renamed them
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


# ---- rows that are wanted, from their owners


def exchange(
    x: torch.Tensor,
    layout: AxisLayout,
    wanted: Sequence[Sequence[Range]],
    *,
    dim: int,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """Return the rows that this rank wants, range after range in dimension `dim`; differentiable, a collective.

    x: this rank's shard, `layout.local_length(rank)` rows in `dim`. wanted: the half-open ranges that each rank of the
    group wants, the same list on every rank. Ranges may overlap; rows beyond the ends of the axis are zeros. The
    adjoint adds up the gradients of all copies of a row, own ones first, then in the order of ranks.

    Raises:
        ValueError: a shard of another length, ranges for another number of ranks, or an inverted range.
    """
    rank = group.rank()
    wanted = tuple(map(tuple, wanted))
    _check_wanted(x.shape[dim], layout, wanted, group)
    movement = plan_movement(layout.ranges, wanted, rank)

    def fetched(x: torch.Tensor) -> torch.Tensor:
        result = _with_rows(x, movement.rows, dim)
        target = result.movedim(dim, 0)
        for start, stop in movement.outside:
            target[start:stop] = 0
        _move(x.movedim(dim, 0), target, movement, group, add=False)
        return result

    def returned(gradient: torch.Tensor) -> torch.Tensor:
        # A row may have gone to many ranks.
        exact = wide_type(gradient.dtype)
        result = _with_rows(gradient, layout.local_length(rank), dim, exact)
        _move(gradient.movedim(dim, 0), result.movedim(dim, 0), movement, group, add=True)
        return result.to(gradient.dtype)

    return with_adjoint(x, fetched, returned)


def _check_wanted(
    rows: int,
    layout: AxisLayout,
    wanted: Wanted,
    group: dist.ProcessGroup,
) -> None:
    rank = group.rank()
    if (
        rows != layout.local_length(rank)
        or len(wanted) != layout.degree
        or layout.degree != group.size()
    ):
        raise ValueError(
            f"exchange got {rows} rows and ranges for {len(wanted)} of {group.size()} ranks; the layout has "
            f"{layout.local_length(rank)} rows for this rank and {layout.degree} ranks"
        )
    if any(start > stop for ranges in wanted for start, stop in ranges):
        raise ValueError(
            f"exchange was asked for a range that ends before it begins, in {wanted[rank][:4]}; order its ends"
        )


def _with_rows(
    x: torch.Tensor, rows: int, dim: int, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return an uninitialised tensor like `x` with another number of rows in `dim`."""
    shape = list(x.shape)
    shape[dim] = rows
    return x.new_empty(shape, dtype=dtype)


def _move(
    rows: torch.Tensor,
    target: torch.Tensor,
    movement: Movement,
    group: dist.ProcessGroup,
    *,
    add: bool,
) -> None:
    """Send rows to the ranks that want them, and write them; or back to their owners, and add them up.

    target: has no values yet.
    """
    sent, received = (
        (movement.received, movement.sent) if add else (movement.sent, movement.received)
    )
    own = group.rank()
    shape = rows.shape[1:]
    width = shape.numel()
    parts = [
        rows[start:stop].reshape(-1)
        for r, places in enumerate(sent)
        if r != own
        for start, stop in places
    ]
    buffer = torch.cat(parts) if parts else rows.new_empty(0)
    send_sizes, counts = (
        [size(p) * width * (r != own) for r, p in enumerate(x)] for x in (sent, received)
    )
    arrived, pending = all_to_all(buffer, send_sizes, counts, group, kind="exchange")
    # own rows fill the target, with nothing to add to
    is_first = add and received[own] == ((0, target.shape[0]),)
    if add and not is_first:
        target.zero_()
    # while the others are sent
    for (start, stop), place in zip(sent[own], received[own], strict=True):
        put_rows(target, [place], rows[start:stop], add=add and not is_first)
    pending.wait()
    for rank, (piece, places) in enumerate(zip(arrived.split(counts), received, strict=True)):
        if rank != own:
            put_rows(target, places, piece.view(size(places), *shape), add=add)


def put_rows(
    rows: torch.Tensor, places: Sequence[Range], piece: torch.Tensor, *, add: bool
) -> None:
    """Write, or add, the rows of `piece` to the ranges `places` of `rows`, one after another, in place."""
    offset = 0
    for start, stop in places:
        part = piece[offset : offset + stop - start]
        if add:
            rows[start:stop].add_(part)  # not `+=`, which also copies the rows onto themselves
        else:
            rows[start:stop] = part
        offset += stop - start
