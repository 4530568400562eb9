"""The one door for collectives of our own (FSDP's and DTensor's are theirs): calls and bytes are counted by kind."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

# kind -> calls of this process; what tests compare with what a step should cost
calls: Counter[str] = Counter()
# kind -> bytes that this process sent to others, but for `all_reduce` and `all_gather`, which are for a few numbers
bytes_sent: Counter[str] = Counter()


def all_reduce(x: torch.Tensor, mesh: DeviceMesh, op: str = "sum") -> torch.Tensor:
    """Sum, maximum or minimum of `x` over a 1-D mesh, in place; nothing is sent on a mesh of size one.

    x: any shape, the same on every rank of the mesh; op: `sum`, `max` or `min`.
    """
    if mesh.size() > 1:
        calls["all_reduce"] += 1
        dist.all_reduce(x, op=getattr(dist.ReduceOp, op.upper()), group=mesh.get_group())
    return x


def all_gather(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The `x` of every rank of a 1-D mesh: (size, *x.shape), in the mesh's order."""
    gathered = x.new_empty(mesh.size(), *x.shape)
    calls["all_gather"] += 1
    _all_gather(gathered.view(-1), x.reshape(-1), group=mesh.get_group())
    return gathered


@dataclass(frozen=True)
class Transfer:
    """A contiguous tensor to or from a rank of the group."""

    tensor: torch.Tensor
    peer: int
    is_send: bool


class Pending:
    """Transfers under way. Their tensors are kept until `wait`, after which they may be read and written.

    Keeping them is what lets the memory of a tensor that another stream works on be reused only afterwards.
    arrived: called once by `wait`, when everything is there.
    """

    def __init__(
        self,
        works: Sequence[dist.Work] = (),
        kept: Sequence[object] = (),
        arrived: Callable[[], None] | None = None,
    ) -> None:
        self._works, self._kept, self._arrived = works, kept, arrived

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        if self._arrived is not None:
            self._arrived()
        self._works, self._kept, self._arrived = (), (), None


def send_receive(
    transfers: Sequence[Transfer],
    group: dist.ProcessGroup,
    *,
    kind: str,
    arrived: Callable[[], None] | None = None,
) -> Pending:
    """Start all transfers of this rank; between two ranks, both must list them in the same order.

    kind: under which name calls and sent bytes are counted. Nothing is called when there is nothing to transfer.
    """
    transfers = [transfer for transfer in transfers if transfer.tensor.numel()]
    if not transfers:
        return Pending(arrived=arrived)
    _count(kind, sum(t.tensor.nbytes for t in transfers if t.is_send))
    operations = [
        dist.P2POp(dist.isend if t.is_send else dist.irecv, t.tensor, group=group, group_peer=t.peer) for t in transfers
    ]
    return Pending(dist.batch_isend_irecv(operations), transfers, arrived)


def gather_shards(x: torch.Tensor, group: dist.ProcessGroup, *, kind: str) -> tuple[torch.Tensor, Pending]:
    """Start gathering the contiguous `x` of every rank, alike in shape: ((size, *x.shape), handle)."""
    size = group.size()
    gathered = x.new_empty(size, *x.shape)
    _count(kind, x.nbytes * (size - 1))
    work = _all_gather(gathered.view(-1), x.view(-1), group=group, async_op=True)
    return gathered, Pending([work], [x])


def reduce_shards(x: torch.Tensor, group: dist.ProcessGroup, *, kind: str) -> tuple[torch.Tensor, Pending]:
    """Start adding x[r] of every rank at rank r; x: (size, ...), contiguous: (the sum, x.shape[1:], handle)."""
    size = group.size()
    summed = x.new_empty(x.shape[1:])
    _count(kind, summed.nbytes * (size - 1))
    work = _reduce_scatter(summed.view(-1), x.view(-1), group=group, async_op=True)
    return summed, Pending([work], [x])


def all_to_all(
    sent: torch.Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int], group: dist.ProcessGroup, *, kind: str
) -> tuple[torch.Tensor, Pending]:
    """Start sending to each rank its piece of `sent` (1-D): (pieces of all ranks one after another, handle).

    send_sizes, receive_sizes: elements to and from each rank; any may be 0.
    """
    received = sent.new_empty(sum(receive_sizes))
    own = send_sizes[group.rank()]
    _count(kind, (sum(send_sizes) - own) * sent.element_size())
    work = dist.all_to_all_single(received, sent, list(receive_sizes), list(send_sizes), group=group, async_op=True)
    return received, Pending([work], [sent])


def _count(kind: str, size: int) -> None:
    calls[kind] += 1
    bytes_sent[kind] += size


# torch 2.13 renamed them
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
