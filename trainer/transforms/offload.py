"""The input of each checkpointed block waits for the backward in host memory, or is computed again from another one.

If asked, the results of attention that selective checkpointing keeps wait there too, in the same way.

A checkpointed block keeps its input alone, 2 bytes an element in bfloat16, for every layer and token: at long context
this is the largest part of the activations. Offloaded, it is copied to the host while the block computes, and comes
back while the backward of the block after it computes, so that the device holds the inputs of about two blocks. In
groups of blocks, the first one's input is kept. The backward of the last one first runs the blocks before it forward,
without gradients, and has the other inputs from there: each block but the last of a group runs once more. FSDP gathers
their weights then, and frees them after their backward.

Copies run on a stream of their own, all on one, so that a host buffer that is used again needs no further order. The
rules, of which each was a bug of some program (torchtune pull request 1867, trl issue 7195):

* a copy waits for what the compute stream of that moment has queued, so that its source is written and the memory of
  its target is no longer read;
* a tensor is kept alive until the compute stream waits for the copy that reads it, because its memory goes to the next
  tensor of that stream at once;
* what comes back is used after the compute stream waits for the copy.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from longshard.sharding.forward import replace_forward
from trainer.config.schema import ActivationCheckpoint
from trainer.parallel.machine import MACHINE, Machine


class CopyStream:
    """The stream of the copies between host and device. On CPUs a copy is done when it is posted."""

    def __init__(
        self,
        device_type: str,
        key: str = "activation_checkpoint.offload = 'inputs'",
        machine: Machine = MACHINE,
    ) -> None:
        self._device = torch.device(device_type)
        self._key = key
        self._machine = machine
        self._stream = None if device_type == "cpu" else torch.Stream(self._device)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        """Queue a copy after what the current stream has queued so far; return what `wait` takes."""
        if self._stream is None:
            target.copy_(source)
            return None
        current = torch.accelerator.current_stream()
        self._stream.wait_event(current.record_event())
        with self._stream:
            target.copy_(source, non_blocking=True)
        return current, self._stream.record_event()

    def wait(self, copied: Any) -> None:
        """Let what is queued from here on wait for a copy, on the stream of the memory that it writes or reads."""
        if copied is not None:
            stream, event = copied
            stream.wait_event(event)

    def host_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return host memory for a tensor, page-locked for a GPU, without which copies do not overlap.

        Raises:
            MemoryError: the system does not lock so much.
        """
        return self._machine.host_like(tensor, self._device.type, self._key)

    def device_like(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return memory on the device for what a buffer holds."""
        return torch.empty_like(buffer, device=self._device)


@dataclass
class KeptInput:
    """A block's input between forward and backward: on the device, on the host, on its way, or to be computed again."""

    inputs: "HostInputs"
    kind: Hashable
    tensor: Any
    """On the device; None while it is on the host alone."""
    buffer: Any
    """In host memory; None if it stays on the device."""
    copied: Any
    """The last copy."""
    before: "weakref.ref[KeptInput | RecomputedInput] | None"
    """The input of the block before."""

    def fetch(self) -> Any:
        """Begin to copy it back to the device, unless it is there; return what `take` will return."""
        if self.tensor is None:
            self.tensor = self.inputs.copies.device_like(self.buffer)
            self.copied = self.inputs.copies.copy(self.tensor, self.buffer)
        return self.tensor

    def on_device(self) -> Any:
        """Return it on the device, where the caller is the last to hold it if the host has it."""
        tensor = self.fetch()
        self.release()
        return tensor

    def take(self) -> Any:
        """Return it on the device, and fetch the input of the block before. A backward in parts takes it repeatedly."""
        tensor = self.on_device()
        before = self.before and self.before()
        self.before = None
        if before is not None:
            before.fetch()
        return tensor

    def release(self) -> None:
        """Drop the device's memory once its copy is done, if the host has it."""
        if self.tensor is not None and self.buffer is not None:
            self.inputs.copies.wait(self.copied)
            self.tensor = None

    def __del__(self) -> None:
        self.release()  # it may have been fetched for nothing
        if self.buffer is not None:
            self.inputs.free[self.kind].append(self.buffer)


@dataclass
class RecomputedInput:
    """A block's input that the block before it computes again, from its own input."""

    before: "KeptInput | RecomputedInput"
    run: Callable[[Any], Any]
    tensor: Any = None

    def fetch(self) -> None:
        """Begin to copy the input of the group's first block back to the device."""
        if self.tensor is None:
            self.before.fetch()

    def on_device(self) -> Any:
        """Return it, computed unless it was for a later block of the group; it stays until `take`."""
        if self.tensor is None:
            self.tensor = self.run(self.before.on_device())
        return self.tensor

    def take(self) -> Any:
        """Return it, and fetch the input of the block before if that is the group's first."""
        tensor = self.on_device()
        self.tensor = None
        self.before.fetch()
        return tensor


class HostInputs:
    """The inputs of a model part's blocks, and a pool of host buffers. All micro-batches in flight share it."""

    def __init__(self, copies: Any) -> None:
        self.copies = copies
        """A `CopyStream`, or what a test puts in its place."""
        self.free: dict[Hashable, list[Any]] = defaultdict(list)
        """Buffers that hold nothing. The next copy into one is queued after those that still read it."""
        self._last: weakref.ref[KeptInput | RecomputedInput] | None = None
        self._leaving: KeptInput | None = None
        self.run: Callable[[Any], Any] | None = None
        """What computes the output of the last block of a forward so far from its input, without gradients."""

    def recompute(self) -> RecomputedInput:
        """Return the input of a block, to be computed again by the block before it."""
        self._leave()
        kept = RecomputedInput(self._last(), self.run)
        self._last = weakref.ref(kept)
        return kept

    def keep(self, tensor: Any, *, is_first: bool, to_host: bool) -> KeptInput:
        """Keep a block's input until its backward takes it. is_first: of the blocks of a forward."""
        self._leave()
        before = None if is_first else self._last
        kind = (tensor.shape, tensor.stride(), tensor.dtype)
        buffer = None
        copied = None
        if to_host:
            buffer = self.free[kind].pop() if self.free[kind] else self.copies.host_like(tensor)
            copied = self.copies.copy(buffer, tensor)
        kept = KeptInput(self, kind, tensor, buffer, copied, before)
        self._last = weakref.ref(kept)
        self._leaving = kept if to_host else None
        return kept

    def _leave(self) -> None:
        """Drop the device's memory of the last input: with one at most, it does not grow with the layers."""
        if self._leaving is not None:
            self._leaving.release()
            self._leaving = None


def apply_offload(
    layers: Mapping[str, nn.Module],
    settings: ActivationCheckpoint,
    device_type: str,
    machine: Machine = MACHINE,
) -> None:
    """Let the inputs of the checkpointed layers wait on the host, or be computed again, as `settings` say; in place.

    layers: of a model or of a pipeline's stage, in their order. Call it after activation checkpointing and
    `torch.compile`, and before `fully_shard`.
    """
    checkpointed, kept, offloaded = (
        choose(map(int, layers))
        for choose in (settings.checkpointed, settings.kept, settings.offloaded)
    )
    if not offloaded and settings.group == 1:
        return
    copies = CopyStream(device_type, machine=machine)
    inputs = HostInputs(copies)
    results = defaultdict(lambda: HostInputs(copies))
    for number, following in zip(checkpointed, [*checkpointed[1:], kept[0]], strict=True):
        how = {"is_first": number == kept[0], "to_host": number in offloaded}
        keep: Callable[[torch.Tensor], KeptInput | RecomputedInput] = (
            partial(inputs.keep, **how) if number in kept else lambda _: inputs.recompute()
        )
        block = layers[str(number)]
        if settings.offload == "inputs+attention":
            block.keep_attention = lambda i, x, how=how: results[i].keep(x, **how)
        replace_forward(
            block, "offload", _offloading(block, inputs, keep, runs_again=following not in kept)
        )


def _offloading(
    block: nn.Module,
    inputs: HostInputs,
    keep: Callable[[torch.Tensor], Any],
    *,
    runs_again: bool,
) -> Callable[..., Any]:
    forward = block.forward

    @wraps(forward)
    def offloading(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(x, *args, **kwargs)
        # emptied after the forward: autograd holds `pack` until the backward
        given = [x]
        found = []

        def pack(tensor: torch.Tensor) -> Any:
            if not _is_same(tensor, given[0]):
                return tensor
            if not found:
                found.append(keep(tensor))
            return found[0]

        with saved_tensors_hooks(pack, _take):
            result = forward(x, *args, **kwargs)
        if not found:
            raise RuntimeError(
                "activation_checkpoint.offload = 'inputs', or a group of layers, has not seen the input of a layer "
                f"among the tensors that PyTorch {torch.__version__} keeps for the backward; use neither"
            )
        given.clear()
        found.clear()
        inputs.run = (
            torch.no_grad()(lambda x: block(x, *args, **kwargs)) if runs_again else None
        )
        return result

    return offloading


def _take(kept: Any) -> torch.Tensor:
    return kept.take() if isinstance(kept, KeptInput | RecomputedInput) else kept


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are the same elements of the same memory."""
    place = [
        (StorageWeakRef(x.untyped_storage()), x.storage_offset(), x.shape, x.stride())
        for x in (one, other)
    ]
    return place[0] == place[1]
