"""Copies of the state in host memory, kept from save to save. A background save writes them.

The memory is pinned if the state is on a GPU. The copy then runs on its own stream, while the next forward and backward
run. The next update of the optimizer waits for it on the device:

    compute stream  ... update N | buffers | forward N+1 | backward N+1 | (waits) update N+1 ...
    copy stream                            | parameters, moments -----> |
    host, thread                                                         | write the files
"""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from longshard.sharding.tensors import local_part
from trainer.runtime.host_memory import page_locked_like


class HostCopies:
    """One buffer in host memory per tensor, made at the first save. The buffers hold the state of one save at a time.

    Args:
        optimizer: The optimizer, which gets a hook.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.tensors: dict[str, Tensor] = {}
        """Name -> copy: a tensor, or a DTensor of the same placements."""
        self._memory: list[Tensor] = []
        """The page-locked memory of the copies."""
        self._copied: torch.cuda.Event | None = None
        self._stream: torch.cuda.Stream | None = None
        optimizer.register_step_pre_hook(lambda *_: self._update_waits())

    def start(self, state: Mapping[str, Tensor], *, updated: Collection[str]) -> None:
        """Start to copy the state into `tensors`. Call `wait` before the next `start`.

        On a CPU, the copy is complete on return. On a GPU, it runs while the next forward runs; the next update of the
        optimizer waits for it. Every call must have the names of the first call.

        Args:
            state: Tensors of any shape, by name.
            updated: Names of the tensors that only the optimizer changes. A forward may change the others, so they are
                copied before it begins.
        """
        if not self.tensors:
            self.tensors = {name: _buffer(x, self._memory) for name, x in state.items()}
        self._copy(state, [name for name in state if name not in updated])
        if not any(x.is_cuda for x in state.values()):
            self._copy(state, updated)
            return
        self._stream = self._stream or torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._copy(state, updated)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def wait(self) -> None:
        """Let the host wait until `tensors` holds the state. Any thread may call this."""
        if self._copied is not None:
            self._copied.synchronize()

    def _copy(self, state: Mapping[str, Tensor], names: Collection[str]) -> None:
        for name in names:
            local_part(self.tensors[name]).copy_(local_part(state[name]), non_blocking=True)

    def _update_waits(self) -> None:
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)


def _buffer(x: Tensor, memory: list[Tensor]) -> Tensor:
    """Return an uninitialised tensor on the host with shape, dtype and placements of x.

    If x is on a GPU, the memory is page-locked, and added to `memory`.
    """
    copy = torch.empty_like(x, device="cpu", requires_grad=False)
    if x.is_cuda:
        memory.append(_move_to_locked_memory(copy))
    return copy


@torch.no_grad()  # with gradients, the local part of a DTensor is a view of it
def _move_to_locked_memory(copy: Tensor) -> Tensor:
    local = local_part(copy)
    memory = page_locked_like(
        local, "checkpoint.async_mode = 'async_with_pinned_mem'", "use 'async'"
    )
    local.set_(memory)
    return memory
