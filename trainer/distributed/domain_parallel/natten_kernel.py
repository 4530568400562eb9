"""NATTEN's kernels for neighbourhood attention, if the package is installed with them and the tensors are on a GPU.

NATTEN takes queries and keys of the same box. The fetched rows are such a box if they are one range of each axis, and
the rank's queries are put into it, with zeros around whose results are dropped. A window that lies in the box is the
same there as in the whole axis, because NATTEN shifts windows only at the box's ends, and the box ends either where the
axis ends or where a window does. With stride, groups of queries would begin elsewhere: then an axis must be whole.
"""

import importlib
import importlib.util
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from trainer.distributed.domain_parallel.neighborhoods import Neighborhood
from trainer.distributed.sharding.ranges import Ranges

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def natten_kernel(q: torch.Tensor, v: torch.Tensor) -> Callable | None:
    """Return na1d, na2d or na3d of NATTEN 0.21 or later for these tensors, or None: no GPU, no package, no kernel."""
    if not q.is_cuda or q.dtype not in _DTYPES or q.shape[-1] != v.shape[-1]:
        return None
    if importlib.util.find_spec("natten") is None:
        return None
    natten = importlib.import_module("natten")
    return getattr(natten, f"na{q.ndim - 3}d") if natten.HAS_LIBNATTEN else None


def fits_box(hoods: Sequence[Neighborhood], queries: Sequence[Ranges], keys: Sequence[Ranges]) -> bool:
    """Return whether windows in the box of fetched rows equal those of the whole axes; rows as in `attend_box`."""
    return all(
        len(asked) == len(read) == 1
        and hood.kernel > 1
        and hood.kernel * hood.dilation <= read[0][1] - read[0][0]
        and (asked == read or hood.stride == 1)
        for hood, asked, read in zip(hoods, queries, keys, strict=True)
    )


def attend_box(
    kernel: Callable,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    hoods: Sequence[Neighborhood],
    queries: Sequence[Ranges],
    keys: Sequence[Ranges],
    scale: float | None,
) -> torch.Tensor:
    """Return the attention of the queries, computed by `kernel` in the box of the keys.

    inputs: q, k, v. queries, keys: of each axis the rows that the rank has, and has fetched, one range each.
    """
    q, k, v = inputs
    pads = [(a[0][0] - r[0][0], r[0][1] - a[0][1]) for a, r in zip(queries, keys, strict=True)]
    sizes = q.shape[1:-2]
    if any(map(any, pads)):
        q = F.pad(q, [0, 0, 0, 0, *(rows for pad in reversed(pads) for rows in pad)])
    kernels, dilations, strides, causal = zip(*hoods, strict=True)
    out = kernel(q, k, v, kernel_size=kernels, stride=strides, dilation=dilations, is_causal=causal, scale=scale)
    for dim, ((before, _), rows) in enumerate(zip(pads, sizes, strict=True), 1):
        out = out.narrow(dim, before, rows)
    return out
