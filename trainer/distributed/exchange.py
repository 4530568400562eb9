"""The one door for collectives of our own (FSDP's and DTensor's are theirs): calls and bytes are counted by kind."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

# kind -> calls of this process; what tests compare with what a step should cost
calls: Counter[str] = Counter()
# kind -> bytes that this process sent point to point
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
    # torch 2.13 renamed it
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(gathered.view(-1), x.reshape(-1), group=mesh.get_group())
    return gathered


@dataclass(frozen=True)
class Transfer:
    """A contiguous tensor to or from a rank of the group."""

    tensor: torch.Tensor
    peer: int
    is_send: bool


class Pending:
    """Transfers under way. Their tensors are kept until `wait`, after which they may be read and written."""

    def __init__(self, works: Sequence[dist.Work], transfers: Sequence[Transfer]) -> None:
        self._works, self._transfers = works, transfers

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works, self._transfers = (), ()


def send_receive(transfers: Sequence[Transfer], group: dist.ProcessGroup, *, kind: str) -> Pending:
    """Start all transfers of this rank; between two ranks, both must list them in the same order.

    kind: under which name calls and sent bytes are counted. Nothing is called when there is nothing to transfer.
    """
    transfers = [transfer for transfer in transfers if transfer.tensor.numel()]
    if not transfers:
        return Pending((), ())
    calls[kind] += 1
    bytes_sent[kind] += sum(t.tensor.numel() * t.tensor.element_size() for t in transfers if t.is_send)
    operations = [
        dist.P2POp(dist.isend if t.is_send else dist.irecv, t.tensor, group=group, group_peer=t.peer) for t in transfers
    ]
    return Pending(dist.batch_isend_irecv(operations), transfers)
