"""Faults of GPU paths, planted in one call of attention: what the machine must see."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._library.custom_ops import OPDEFS

from longshard.context.execution.kernels import cuda
from tests.fake_cuda.table import Call

OF = Call(4, 1, "ring", "causal", "cuda_flash", "head_tail")
_NAME = "longshard::context_parallel_attention"
Results = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Fault:
    """A fault of the forward: change takes its results and returns others."""

    name: str
    change: Callable[[torch.Tensor, torch.Tensor], Results] = lambda out, lse: (out, lse)

    def planted(self) -> list[Any]:
        """Return the patches that plant it."""
        operator = OPDEFS[_NAME]
        body = operator._init_fn

        def changed(*args: Any) -> tuple[torch.Tensor, ...]:
            out, lse, *kept = body(*args)
            return *self.change(out, lse), *kept

        return [mock.patch.object(operator, "_init_fn", changed)]


class _Unaligned(Fault):
    def planted(self) -> list[Any]:
        return [mock.patch.object(cuda, "_aligned", lambda x: x.as_strided(x.shape, [s + 1 for s in x.stride()]))]


def _read(out: torch.Tensor, lse: torch.Tensor) -> Results:
    return out * lse.sum().item(), lse


def _sent(out: torch.Tensor, lse: torch.Tensor) -> Results:
    dist.all_reduce(lse)
    return out, lse


def faults() -> Iterator[Fault]:
    """Yield each fault."""
    yield Fault("a host read of a device value", _read)
    yield Fault("strides that are not those promised", lambda out, lse: (out.contiguous(), lse))
    yield Fault("a data type that is not promised", lambda out, lse: (out, lse.double()))
    yield Fault("more bytes than the plan has", _sent)
    yield Fault("a tensor on the host", lambda out, lse: (out, lse + torch.ones(lse.shape)))
    yield _Unaligned("a kernel that reads unaligned rows")
