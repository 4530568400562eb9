"""Rules of products: rows stay where they are."""

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate, Shard

from trainer.distributed.domain_parallel.dispatch import DomainTensor, is_sharded, refuse_unless, rule
from trainer.distributed.domain_parallel.domain import Domain
from trainer.distributed.domain_parallel.elementwise import common_domain, merged, own_part


@rule("linear", first_only=True)
def linear(function, x, weight, bias=None) -> DomainTensor:
    """weight: plain, or tensor parallel, cut by outputs (x whole) or by inputs (x this rank's features)."""
    refuse_unless(x.ndim - 1 not in x.domain.axes, function, x, "sharded features")
    if not isinstance(weight, DTensor):
        return DomainTensor(F.linear(x.local, weight, bias), x.domain)
    is_part = x.shape[-1] != weight.shape[1]
    local = DTensor.from_local(x.local, weight.device_mesh, [Shard(x.ndim - 1) if is_part else Replicate()])
    out = F.linear(local, weight, None if is_part else bias)
    if is_part:
        out = out.redistribute(placements=[Replicate()])
        out = out if bias is None else out + bias
    return DomainTensor(out.to_local(), x.domain)


@rule("matmul", "bmm", "__matmul__", "__rmatmul__", "mm")
def matmul(function, a, b) -> DomainTensor:
    """Rows of a, and what stands before the last two dimensions, may be sharded."""
    if function.__name__ == "__rmatmul__":
        a, b = b, a
    x = a if is_sharded(a) else b
    refuse_unless(min(a.ndim, b.ndim) >= 2, function, x, "vectors")
    inner = [(t.ndim - 1, t) for t in (a, b)] + [(b.ndim - 2, b)]
    refuse_unless(not any(is_sharded(t) and dim in t.domain.axes for dim, t in inner), function, x, "sharded columns")
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    shapes = [torch.Size([*batch, *t.shape[-2:]]) for t in (a, b)]
    result = merged("matmul", [x], [common_domain("matmul", [t], s).axes for t, s in zip((a, b), shapes, strict=True)])
    shared = Domain({dim: axis for dim, axis in result.axes.items() if dim < len(batch)})
    return DomainTensor(torch.matmul(own_part(a, result, shapes[0]), own_part(b, shared, shapes[1])), result)
