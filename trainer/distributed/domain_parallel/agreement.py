"""What the ranks of a domain must have in common before the first step: layouts, shapes, types, random numbers."""

import hashlib
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.distributed.domain_parallel.dispatch import DomainTensor
from trainer.distributed.sharding.exchange import all_gather


def check_layouts(tensors: Iterable[DomainTensor]) -> None:
    """Compare what the ranks say of the whole tensors: one all-gather of a hash for each sharded axis.

    Raises:
        ValueError: on every rank, if layouts, global shapes or types differ.
    """
    said = [
        (tuple(x.shape), str(x.dtype), {dim: axis.layout.ranges for dim, axis in x.domain.axes.items()})
        for x in tensors
    ]
    if not _are_equal(repr(said).encode(), tensors):
        raise ValueError(
            f"the ranks of the domain describe their tensors differently; this rank has (shape, type, rows of each "
            f"rank): {said}; give every rank the same sizes of all shards, such as `sized([5, 4])`, or `gathered`"
        )


@contextmanager
def same_draws(tensors: Iterable[DomainTensor]) -> Iterator[None]:
    """Warn if functions that run inside draw random numbers, and the ranks have different random states."""
    with _Draws() as draws:
        yield
    if draws.names:
        on_cuda = any(x.is_cuda for x in tensors)
        state = (torch.cuda.get_rng_state() if on_cuda else torch.get_rng_state()).numpy().tobytes()
        if not _are_equal(state, tensors):
            warnings.warn(
                f"the model draws random numbers ({', '.join(sorted(draws.names))}) and the ranks of the domain have "
                "different random states, so what is whole on every rank would differ; call torch.manual_seed with the "
                "same seed on every rank",
                stacklevel=3,
            )


class _Draws(TorchDispatchMode):
    """Note the functions that draw random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def _are_equal(said: bytes, tensors: Iterable[DomainTensor]) -> bool:
    """Return whether all ranks of the domains say the same; if not, every one of them sees it."""
    axes = [axis for x in tensors for axis in x.domain.axes.values()]
    number = int.from_bytes(hashlib.sha256(said).digest()[:7]) + 1
    for group in {id(axis.group): axis.group for axis in axes}.values():
        is_gloo = "gloo" in dist.get_backend(group)
        device = "cpu" if is_gloo else torch.accelerator.current_accelerator()
        if len(set(all_gather(torch.tensor([number], device=device), group).view(-1).tolist())) > 1:
            number = 0  # which the ranks along the next axis see too
    return number > 0
