"""All collectives that this project calls itself, with counts of calls and bytes. FSDP and DTensor call their own.

Tensors on the meta device are never sent: a forward on them shows shapes only. A group of one rank has no
communicator: its only rank copies the data instead.

State of the process: The counters of calls and bytes, which are compared with plans; for ever.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DeviceMesh, ProcessGroup

Ranks = DeviceMesh | ProcessGroup
"""A 1-D mesh, or a process group."""

# kind -> calls of this process; tests compare the calls with the cost of a plan
calls: Counter[str] = Counter()
# kind -> bytes that this process sent to others; `all_reduce` and `all_gather` are not counted
bytes_sent: Counter[str] = Counter()


def all_reduce(x: Tensor, over: Ranks, op: str = "sum") -> Tensor:
    """Reduce `x` over the ranks, in place, and return it. One rank sends nothing.

    Args:
        x: A contiguous tensor of one shape on all ranks, any shape.
        over: The ranks.
        op: `sum`, `max` or `min`.

    Returns:
        `x`.
    """
    if over.size() > 1 and not x.is_meta:
        _count("all_reduce")
        dist.all_reduce(x, op=getattr(dist.ReduceOp, op.upper()), group=_group(over))
    return x


def all_gather(x: Tensor, over: Ranks) -> Tensor:
    """Return the `x` of every rank, in the order of the ranks: (size, *x.shape). Not differentiable.

    Args:
        x: A tensor of one shape on all ranks, any shape.
        over: The ranks.
    """
    gathered = x.new_empty(over.size(), *x.shape)
    if x.is_meta:
        return gathered
    _count("all_gather")
    if over.size() == 1:
        return gathered.copy_(x.detach())
    all_gather_single(gathered.view(-1), x.reshape(-1), group=_group(over))
    return gathered


def has_peers(over: Ranks) -> bool:
    """Return whether other processes answer; backend `fake` (one rank, or a trace) copies inputs to outputs instead.

    Args:
        over: The ranks.
    """
    return dist.get_backend(_group(over)) != "fake"


def _group(over: Ranks) -> ProcessGroup:
    return over if isinstance(over, ProcessGroup) else over.get_group()


@dataclass(frozen=True)
class Transfer:
    """A contiguous tensor that this rank sends to, or receives from, another rank of the group.

    Attributes:
        tensor: The tensor, of any shape.
        peer: The other rank.
        is_send: Whether this rank sends the tensor.
    """

    tensor: Tensor
    peer: int
    is_send: bool


@dataclass(eq=False)
class Pending:
    """Transfers that have started. Their tensors may be read and written after `wait`.

    Attributes:
        works: The handles of PyTorch.
        kept: Tensors that must stay alive until `wait`, because another stream still uses their memory.
        arrived: Function that `wait` calls once, after all transfers; None if absent.
        timeout: How long `wait` waits for each transfer; None means the time-out of the group.
    """

    works: Sequence[dist.Work] = ()
    kept: Sequence[object] = ()
    arrived: Callable[[], None] | None = None
    timeout: timedelta | None = None

    def wait(self) -> None:
        """Wait for the transfers, call `arrived` and release the tensors. A second call does nothing."""
        for work in self.works:
            work.wait(*(() if self.timeout is None else (self.timeout,)))
        if self.arrived is not None:
            self.arrived()
        self.works = ()
        self.kept = ()
        self.arrived = None


def group_timeout(group: ProcessGroup, device: torch.device | str) -> timedelta | None:
    """Return the time-out of the collectives of a group; None if its backend has no time-out.

    Args:
        group: The group.
        device: The device of the tensors, which selects the backend.
    """
    # no public name as of torch 2.13
    options = group._get_backend(torch.device(device)).options
    return None if options is None else options._timeout


def send_receive(
    transfers: Sequence[Transfer],
    group: ProcessGroup,
    *,
    kind: str,
    arrived: Callable[[], None] | None = None,
) -> Pending:
    """Start all transfers of this rank; skip empty tensors.

    Two ranks must list the transfers between them in the same order.

    Args:
        transfers: The transfers of this rank.
        group: The group of the ranks.
        kind: The name under which calls and sent bytes are counted.
        arrived: Function that `Pending.wait` calls after all transfers; None if absent.

    Returns:
        The handle to wait for.
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
    # `wait` of gloo without an argument uses the time-out with which the group was made, not the present one.
    timeout = group_timeout(group, "cpu") if dist.get_backend(group) == "gloo" else None
    return Pending(dist.batch_isend_irecv(operations), transfers, arrived, timeout)


def allocate(
    group: ProcessGroup, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """Return uninitialised 1-D memory that the network of the group reads and writes without copies.

    NCCL has this memory on GPUs with NVLink SHARP.

    Args:
        group: The group.
        size: Sizes; their product is the number of elements.
        dtype: The type of the elements.
        device: The device of the memory.

    Returns:
        1-D, or None if the backend has no memory of this kind.
    """
    backend = group._get_backend(device)
    if not backend.supports_tensor_alloc(device):
        return None
    return backend.allocate_tensor(math.prod(size), dtype=dtype, device=device)


def gather_shards(x: Tensor, group: ProcessGroup, *, kind: str) -> tuple[Tensor, Pending]:
    """Start to gather the `x` of every rank.

    Args:
        x: A contiguous tensor of one shape on all ranks, any shape.
        group: The group of the ranks.
        kind: The name under which calls and sent bytes are counted.

    Returns:
        The gathered tensors, (size, *x.shape), and the handle to wait for.
    """
    return _started(all_gather_single, x, (group.size(), *x.shape), group, kind)


def reduce_shards(x: Tensor, group: ProcessGroup, *, kind: str) -> tuple[Tensor, Pending]:
    """Start to sum x[r] over the ranks; rank r gets the sum of x[r].

    Args:
        x: A contiguous tensor, (size, ...), of one shape on every rank.
        group: The group of the ranks.
        kind: The name under which calls and sent bytes are counted.

    Returns:
        The sum, shape x.shape[1:], and the handle to wait for.
    """
    return _started(reduce_scatter, x, x.shape[1:], group, kind)


def _started(
    collective: Callable, x: Tensor, shape: Sequence[int], group: ProcessGroup, kind: str
) -> tuple[Tensor, Pending]:
    """Start a collective of x; return its result, of a shape, and the handle.

    The smaller of both is the part of one rank.
    """
    result = x.new_empty(shape)
    _count(kind, min(x.nbytes, result.nbytes) * (group.size() - 1))
    if group.size() == 1:
        return result.copy_(x.detach().view(shape)), Pending()
    work = collective(result.view(-1), x.view(-1), group=group, async_op=True)
    return result, Pending([work], [x])


def all_to_all(
    sent: Tensor,
    send_sizes: Sequence[int],
    receive_sizes: Sequence[int],
    group: ProcessGroup,
    *,
    kind: str,
) -> tuple[Tensor, Pending]:
    """Start to send each rank its piece of `sent`.

    Args:
        sent: The pieces for all ranks, one after another, 1-D.
        send_sizes: Number of elements for each rank; may be 0.
        receive_sizes: Number of elements from each rank; may be 0.
        group: The group of the ranks.
        kind: The name under which calls and sent bytes are counted.

    Returns:
        The pieces from all ranks, one after another, 1-D, and the handle to wait for.
    """
    received = sent.new_empty(sum(receive_sizes))
    if sent.is_meta:
        return received, Pending()
    own = send_sizes[group.rank()]
    _count(kind, (sum(send_sizes) - own) * sent.element_size())
    if group.size() == 1:
        return received.copy_(sent.detach()), Pending()
    is_async = not torch.compiler.is_compiling()  # a traced graph has no handles
    work = dist.all_to_all_single(
        received, sent, list(receive_sizes), list(send_sizes), group=group, async_op=is_async
    )
    return received, Pending([work] if is_async else (), [sent])


def exchange_counts(
    counts: Tensor, group: ProcessGroup, *, kind: str
) -> tuple[list[int], list[int]]:
    """Exchange the numbers of rows that the ranks will send. The host waits, because the numbers depend on data.

    Args:
        counts: Number of rows that this rank sends to each rank, 1-D, int64.
        group: The group of the ranks.
        kind: The name under which calls and sent bytes are counted.

    Returns:
        The number of rows to each rank, and the number of rows from each rank.
    """
    one = [1] * group.size()
    arriving = send_rows(counts, one, one, group, kind=kind)
    return counts.tolist(), arriving.tolist()


def send_rows(
    x: Tensor,
    sent: Sequence[int],
    arriving: Sequence[int],
    group: ProcessGroup,
    *,
    kind: str,
) -> Tensor:
    """Send consecutive rows of x to the ranks: the first sent[0] rows to rank 0, the next sent[1] rows to rank 1, ...

    A collective, which waits for the rows. Not differentiable.

    Args:
        x: The rows, (rows, ...), in the order of the ranks that get them.
        sent: Number of rows for each rank.
        arriving: Number of rows from each rank.
        group: The group of the ranks.
        kind: The name under which calls and sent bytes are counted.

    Returns:
        The rows from all ranks, one rank after another: (sum of arriving, ...).
    """
    width = x.shape[1:].numel()
    sizes = ([rows * width for rows in counts] for counts in (sent, arriving))
    arrived, pending = all_to_all(x.reshape(-1), *sizes, group, kind=kind)
    pending.wait()
    return arrived.view(sum(arriving), *x.shape[1:])


def _count(kind: str, size: int | None = None) -> None:
    if torch.compiler.is_compiling():
        return  # a compiled graph cannot count
    calls[kind] += 1
    if size is not None:
        bytes_sent[kind] += size


# torch 2.13 renamed these functions
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
