"""The input of each checkpointed block waits for the backward in host memory, or is recomputed from another input.

If asked, the results of attention that selective checkpointing keeps wait there too, in the same way.

A checkpointed block keeps its input alone, 2 bytes an element in bfloat16, for every layer and token: at long context
this is the largest part of the activations. An offloaded input is copied to the host while its block computes. It comes
back while the next block's backward computes. So the device holds the inputs of about two blocks.

In groups of blocks, only the first block's input is kept. The backward of the last block first runs the blocks before
it forward, without gradients, and so computes the other inputs: each block except the last of a group runs once more.
FSDP gathers their weights then, and frees them after their backward.

All copies run on one stream of their own, so a host buffer that is used again needs no further order. The rules, each
of them once a bug of some program (torchtune pull request 1867, trl issue 7195):

* A copy waits for all work that the compute stream has queued by then. So its source is written, and nobody reads the
  memory of its target any more.
* A tensor is kept alive until the compute stream waits for the copy that reads it. Otherwise the next tensor of that
  stream would get its memory at once.
* A tensor that comes back is used after the compute stream waits for the copy.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from longshard.sharding.forward import replace_forward
from trainer.config.schema import ActivationCheckpoint
from trainer.parallel.machine import MACHINE, Machine


class CopyStream:
    """The stream of the copies between host and device. On CPUs a copy is done at once.

    Args:
        device_type: The device type of the job.
        key: The setting that asks for host memory, for messages.
        machine: The machine of this rank.
    """

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

    def copy(self, target: Tensor, source: Tensor) -> Any:
        """Queue a copy after all work that the current stream has queued so far.

        Args:
            target: A tensor of any shape.
            source: A tensor of the same shape.

        Returns:
            The argument of `wait`.
        """
        if self._stream is None:
            target.copy_(source)
            return None
        current = torch.accelerator.current_stream()
        self._stream.wait_event(current.record_event())
        with self._stream:
            target.copy_(source, non_blocking=True)
        return current, self._stream.record_event()

    def wait(self, copied: Any) -> None:
        """Let all later work wait for a copy, on the stream of the memory that it writes or reads.

        Args:
            copied: The result of `copy`.
        """
        if copied is not None:
            stream, event = copied
            stream.wait_event(event)

    def host_like(self, tensor: Tensor) -> Tensor:
        """Return host memory for a tensor. For a GPU it is page-locked; otherwise copies would not overlap.

        Args:
            tensor: A tensor of any shape.

        Raises:
            MemoryError: The system does not lock this amount of memory.
        """
        return self._machine.host_like(tensor, self._device.type, self._key)

    def device_like(self, buffer: Tensor) -> Tensor:
        """Return memory on the device for the contents of a buffer.

        Args:
            buffer: A tensor of any shape, in host memory.
        """
        return torch.empty_like(buffer, device=self._device)


@dataclass
class KeptInput:
    """A block's input between forward and backward: on the device, on the host, or being copied."""

    inputs: "HostInputs"
    kind: Hashable
    tensor: Any
    """The input on the device; None while it is on the host alone."""
    buffer: Any
    """The input in host memory; None if it stays on the device."""
    copied: Any
    """The last copy."""
    before: "weakref.ref[KeptInput | RecomputedInput] | None"
    """The input of the block before."""

    def fetch(self) -> Any:
        """Begin to copy the input back to the device, unless it is there.

        Returns:
            The input on the device. It can be read once `take` or `on_device` has waited for the copy.
        """
        if self.tensor is None:
            self.tensor = self.inputs.copies.device_like(self.buffer)
            self.copied = self.inputs.copies.copy(self.tensor, self.buffer)
        return self.tensor

    def on_device(self) -> Any:
        """Return the input on the device. If the host has it, the caller holds the last reference to it."""
        tensor = self.fetch()
        self.release()
        return tensor

    def take(self) -> Any:
        """Return the input on the device. If the host has a copy, drop it here: another call then copies it again.

        A backward in parts takes it repeatedly. The first call also begins to fetch the input of the block before.
        """
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
        self.release()  # it may have been fetched and not used
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
        """Return the input. It is computed once for all later blocks of the group, and stays until `take`."""
        if self.tensor is None:
            self.tensor = self.run(self.before.on_device())
        return self.tensor

    def take(self) -> Any:
        """Return the input, and drop it here. If the block before is the first of its group, fetch its input, too."""
        tensor = self.on_device()
        self.tensor = None
        self.before.fetch()
        return tensor


class HostInputs:
    """The inputs of a model part's blocks, and a pool of host buffers. All micro-batches in flight share it.

    Args:
        copies: A `CopyStream`, or a stand-in of a test.
    """

    def __init__(self, copies: Any) -> None:
        self.copies = copies
        self.free: dict[Hashable, list[Any]] = defaultdict(list)
        """Empty buffers. The next copy into a buffer is queued after the copies that still read it."""
        self._last: weakref.ref[KeptInput | RecomputedInput] | None = None
        self._leaving: KeptInput | None = None
        self.run: Callable[[Any], Any] | None = None
        """Computes the output of the latest block of a forward from its input, without gradients."""

    def recompute(self) -> RecomputedInput:
        """Return a record of a block's input. In the backward, the block before computes this input again."""
        self._leave()
        kept = RecomputedInput(self._last(), self.run)
        self._last = weakref.ref(kept)
        return kept

    def keep(self, tensor: Any, *, is_first: bool, to_host: bool) -> KeptInput:
        """Keep a block's input until its backward takes it. Drop the device's memory of the input that was kept before.

        Args:
            tensor: The input.
            is_first: Whether the block is the first of a forward: then its backward fetches no input of a block before.
            to_host: Whether to copy it to the host.

        Returns:
            The record of the input.
        """
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
        """Drop the device's memory of the last input.

        At most one input is kept, so memory does not grow with the layers.
        """
        if self._leaving is not None:
            self._leaving.release()
            self._leaving = None


def apply_offload(
    layers: Mapping[str, nn.Module],
    settings: ActivationCheckpoint,
    device_type: str,
    machine: Machine = MACHINE,
) -> None:
    """Keep inputs of checkpointed layers on the host until the backward, or recompute them.

    It changes the layers in place, as `settings` say. In a group of layers only the first layer's input is kept; the
    backward computes the others again from it. With `offload = "inputs+attention"`, results of attention that selective
    checkpointing keeps wait on the host in the same way.

    Call it after activation checkpointing and `torch.compile`, and before `fully_shard`.

    Args:
        layers: Layers of a model or of a pipeline's stage, in their order; names are numbers.
        settings: Table `[activation_checkpoint]`.
        device_type: The device type of the job.
        machine: The machine of this rank.
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
        keep = partial(inputs.keep, **how) if number in kept else lambda _: inputs.recompute()
        block = layers[str(number)]
        if settings.offload == "inputs+attention":
            block.keep_attention = lambda i, x, how=how: results[i].keep(x, **how)
        replace_forward(
            block, "offload", _offloading(block, inputs, keep, runs_again=following not in kept)
        )


def _offloading(
    block: nn.Module,
    inputs: HostInputs,
    keep: Callable[[Tensor], Any],
    *,
    runs_again: bool,
) -> Callable[..., Any]:
    forward = block.forward

    @wraps(forward)
    def offloading(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(x, *args, **kwargs)
        # both lists are emptied after the forward: autograd holds `pack` until the backward
        block_input = [x]
        kept = []

        def pack(tensor: Tensor) -> Any:
            if not _is_same(tensor, block_input[0]):
                return tensor
            if not kept:
                kept.append(keep(tensor))
            return kept[0]

        with saved_tensors_hooks(pack, _take):
            result = forward(x, *args, **kwargs)
        if not kept:
            raise RuntimeError(
                "activation_checkpoint.offload = 'inputs', or a group of layers, has not seen the input of a layer "
                f"among the tensors that PyTorch {torch.__version__} keeps for the backward; use neither"
            )
        block_input.clear()
        kept.clear()
        inputs.run = (
            torch.no_grad()(lambda x: block(x, *args, **kwargs)) if runs_again else None
        )
        return result

    return offloading


def _take(kept: Any) -> Tensor:
    return kept.take() if isinstance(kept, KeptInput | RecomputedInput) else kept


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are the same elements of the same memory, with the same dtype."""
    place = [
        (StorageWeakRef(x.untyped_storage()), x.dtype, x.storage_offset(), x.shape, x.stride())
        for x in (one, other)
    ]
    return place[0] == place[1]
