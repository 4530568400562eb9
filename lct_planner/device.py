"""One process of a job on a device that does not exist: tensors without memory, a process group that sends nothing.

Every operation on a tensor of the device computes its shape, strides, dtype and device, and nothing else. Host memory
is real: an operation without such a tensor runs as always. So a plan, a mesh or a batch has the values of a real job. A
host that reads a value of the device raises by itself (DataDependentOutputException).

The device is CUDA, or stands for a CPU. If it stands for a CPU, tensors of real numbers with more than one element
belong to the device. Integers, from which plans and batches are made, belong to the host. Weights that begin on the
meta device have no memory on the host either.

The operators of this project are opaque to a graph. Here their bodies run, and their results must have the shape,
strides and dtype that the operators promise to the compiler (`register_fake`).

CUDA needs the library of `shim.py`, loaded before torch.

State of the process: This module replaces functions of PyTorch that allocate page-locked memory or ask the device,
until the tracing process ends.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch._library.fake_impl import set_ctx_getter
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves, tree_map_only

Observer = Callable[[torch._ops.OpOverload, tuple, dict[str, Any], Any], None]
Around = Callable[[str, tuple, Callable[[], Any]], Any]


@dataclass(frozen=True)
class Gpu:
    """The properties of a GPU that the program may read before it chooses kernels."""

    name: str = "NVIDIA H200"
    capability: tuple[int, int] = (9, 0)
    memory: int = 150 << 30


GPU = Gpu()


class FakeDevice(FakeTensorMode):
    """The mode in which tensors of a device have no memory.

    Args:
        device_type: "cuda" or "cpu".
        observe: Called after each operation of the device, with the operator, its arguments and its result.
        around: Called with each of this project's operators instead of its body, which is the last argument.
    """

    def __init__(
        self, device_type: str, observe: Observer | None = None, around: Around | None = None
    ) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._device_type = device_type
        self._observe = observe or (lambda *_: None)
        self._around = around or (lambda _name, _args, run: run())
        self._inside = False  # of one operation, which PyTorch computes by others
        self.checks: Mapping[str, Callable[..., None]] = {}
        """Qualified name of an operator of PyTorch -> what its CUDA code refuses."""
        self.stand_ins: Mapping[str, Callable[..., Any]] = {}
        """Qualified name of an operator of PyTorch -> what runs instead, under this mode."""

    @property
    def avoid_device_init(self) -> bool:
        """Whether PyTorch must not start the CUDA driver: always, because there may be no GPU."""
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self._inside or func.namespace == "prim":  # prim: questions, such as for the device
            return super().__torch_dispatch__(func, types, args, kwargs)
        name = func._schema.name
        if not _is_of_device(args, kwargs, self._device_type):
            if any(issubclass(x, DTensor) for x in types):  # its parts come by themselves
                return NotImplemented
            if self._device_type == "cuda" and not any(
                isinstance(x, Tensor) and x.is_meta for x in args
            ):
                return func(*args, **kwargs)
            result = tree_map_only(Tensor, self._without_memory, func(*args, **kwargs))
            self._observe(func, args, kwargs, result)
            return result
        with self:
            if func.namespace == "longshard":
                return self._around(
                    name, (*args, *kwargs.values()), lambda: self._run_body(name, args, kwargs)
                )
            # In the body of an operator, below autograd, PyTorch asks for composites of other operators as a whole.
            if (
                _is_composite(func)
                and (result := func.decompose(*args, **kwargs)) is not NotImplemented
            ):
                return result
        if (check := self.checks.get(name)) is not None:
            check(*args)
        if (body := self.stand_ins.get(name)) is not None:
            with self:
                result = body(*args, **kwargs)
        else:
            result = self._computed(func, types, args, kwargs)
        if result is not NotImplemented:  # a DTensor's turn
            self._observe(func, args, kwargs, result)
        return result

    def _without_memory(self, x: Tensor) -> Tensor:
        """Return a tensor of the device for a host tensor of several real numbers, if the device stands for a CPU.

        Other tensors stay on the host, and are returned as they are.
        """
        is_of_device = (
            type(x) is Tensor
            and x.device.type == "cpu"
            and x.is_floating_point()
            and x.numel() > 1
        )
        return self.from_tensor(x, static_shapes=True) if is_of_device else x

    def _computed(self, func, types, args, kwargs) -> Any:
        """Return the result of an operator as tensors without memory; NotImplemented if it is a DTensor's turn.

        PyTorch may compute the result by other operators, which are not observed.
        """
        self._inside = True
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self._inside = False

    def _run_body(self, name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run an operator's body, and return its results. AssertionError if they are not as the operator promises."""
        operator = OPDEFS[name]
        with set_ctx_getter(_AnySize):
            promised = list(map(form, tree_leaves(operator._abstract_fn(*args, **kwargs))))
        results = operator._init_fn(*args, **kwargs)
        for number, (want, have) in enumerate(
            zip(promised, map(form, tree_leaves(results)), strict=True)
        ):
            assert want == have, f"{name} result {number}: promised {want}, returned {have}"
        return results


@cache
def _is_composite(func: torch._ops.OpOverload) -> bool:
    """Return whether PyTorch computes an operator by others on every device.

    Operators with kernels, like silu_backward, are not.
    """
    return func._can_decompose() and not torch._C._dispatch_has_kernel_for_dispatch_key(
        func.name(), "CPU"
    )


class _AnySize:
    """The context of `register_fake`: a number of bytes that depends on the layout of a batch is any number."""

    def new_dynamic_size(self) -> int:
        return 0


def form(x: Tensor) -> tuple:
    """Return shape, strides, dtype and device type, on which a graph relies.

    Left out are the strides of dimensions with size 1. For uint8, the number of dimensions replaces shape and strides.

    Args:
        x: A tensor of any shape.
    """
    if x.dtype == torch.uint8:
        return x.ndim, x.dtype, x.device.type
    strides = (
        tuple(s for s, n in zip(x.stride(), x.shape, strict=True) if n > 1) if x.numel() else ()
    )
    return tuple(x.shape), strides, x.dtype, x.device.type


def _is_of_device(args: tuple, kwargs: dict[str, Any], device_type: str) -> bool:
    for x in (*args, *kwargs.values()):
        if isinstance(x, FakeTensor) or (
            isinstance(x, torch.device) and x.type == device_type == "cuda"
        ):
            return True
        if isinstance(x, list | tuple) and _is_of_device(tuple(x), {}, device_type):
            return True
    return False


# ---- torch.cuda


class _Stream:
    """A stream, or an event: all its work is done already."""

    device = torch.device("cuda", 0)
    stream_id = 1
    cuda_stream = 1

    def __init__(self, *_args: Any, **_kwargs: Any) -> None: ...

    def record_event(self, event: "_Stream | None" = None) -> "_Stream":
        return event or _Stream()

    def record(self, *_args: Any) -> "_Stream":
        return self

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def elapsed_time(self, _other: object) -> float:
        return 1.0

    def wait_stream(self, _stream: object) -> None: ...

    def wait_event(self, _event: object) -> None: ...

    def wait(self, *_args: Any) -> None: ...

    def synchronize(self) -> None: ...

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *_: Any) -> None: ...


_ONLY = _Stream()


def _torch_cuda_patches(gpu: Gpu) -> dict[str, Any]:
    class Properties:
        name, major, minor, total_memory = gpu.name, *gpu.capability, gpu.memory
        multi_processor_count = 132
        warp_size = 32
        max_threads_per_multi_processor = 2048
        regs_per_multiprocessor = 65536
        gcnArchName = ""
        L2_cache_size = 50 << 20
        shared_memory_per_block_optin = 232448
        shared_memory_per_multiprocessor = 233472

    names = ["set_device", "synchronize", "empty_cache", "init", "_lazy_init", "set_rng_state"]
    nothing = {name: lambda *_a, **_k: None for name in (*names, "reset_peak_memory_stats")}
    return nothing | {
        "Stream": _Stream,
        "Event": _Stream,
        "stream": lambda _stream: nullcontext(),
        "current_stream": lambda *_a, **_k: _ONLY,
        "default_stream": lambda *_a, **_k: _ONLY,
        "is_initialized": lambda: True,
        "is_available": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "is_bf16_supported": lambda *_a, **_k: True,
        "current_device": lambda: 0,
        "device_count": lambda: 8,
        "get_device_name": lambda *_a: gpu.name,
        "get_device_capability": lambda *_a: gpu.capability,
        "get_device_properties": lambda *_a: Properties(),
        "max_memory_allocated": lambda *_a: 0,
        "max_memory_reserved": lambda *_a: 0,
        "memory_stats": lambda *_a: {},
        "get_rng_state": lambda *_a: torch.zeros(16, dtype=torch.uint8),
        "mem_get_info": lambda *_a: (gpu.memory, gpu.memory),
    }


class _Generator(torch.Generator):
    """A generator of the host, for any device."""

    def __new__(cls, _device: object = "cpu") -> "_Generator":
        return super().__new__(cls, "cpu")


_pinned: set[int] = set()


def _pin(x: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
    """Copy a tensor into pinned host memory."""
    return pinned(x.clone())


def pinned(x: Tensor) -> Tensor:
    """Mark host memory as pinned, and return it: the device can read it by itself.

    Args:
        x: A host tensor of any shape.

    Returns:
        The same tensor.
    """
    _pinned.add(x.untyped_storage()._cdata)
    return x


def is_pinned(x: Tensor) -> bool:
    """Return whether a host tensor is in pinned memory.

    Args:
        x: A host tensor of any shape.
    """
    return x.untyped_storage()._cdata in _pinned


@contextmanager
def entered(*contexts: Any) -> Iterator[None]:
    """Enter all of these contexts, in this order.

    Args:
        *contexts: Context managers.

    Yields:
        None.
    """
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


@contextmanager
def machine(rank: int, world: int, gpu: Gpu | None = Gpu()) -> Iterator[None]:
    """Act as one rank, with a GPU that does not exist, and a process group that sends nothing.

    Args:
        rank: The rank.
        world: Number of ranks.
        gpu: The GPU. None for a CPU.

    Yields:
        None.
    """
    patches = [] if gpu is None else _gpu_patches(gpu)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        # the mode is of one thread
        with entered(*patches, torch.autograd.set_multithreading_enabled(False)):
            yield
    finally:
        _pinned.clear()
        dist.destroy_process_group()


def _gpu_patches(gpu: Gpu) -> list[Any]:
    return [
        *(
            mock.patch.object(torch.cuda, name, x)
            for name, x in _torch_cuda_patches(gpu).items()
        ),
        mock.patch.object(torch.accelerator, "current_stream", return_value=_ONLY),
        # PyTorch up to 2.12 makes a tensor of the device here, which PyTorch for CUDA tries in earnest.
        mock.patch.object(fake_tensor, "init_gpu_context"),
        mock.patch.object(torch.version, "cuda", "13.0"),
        mock.patch.object(torch, "Generator", _Generator),
        mock.patch.object(torch, "Stream", _Stream),
        mock.patch.object(Tensor, "pin_memory", _pin),
    ]
