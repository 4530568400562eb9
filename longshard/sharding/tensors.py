"""Small functions for tensors and meshes: hashes, copies, versions, adjoints, and constants of compiled code."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor

F = TypeVar("F", bound=Callable)


def planned(function: F) -> F:
    """Cache a function of plain data. torch.compile calls the function and keeps the result; it does not trace it.

    The arguments must be numbers, strings and tuples of them: torch.compile would check other objects by identity. The
    result must not be a tensor: torch.compile gives all constants of one name one source.

    Args:
        function: The function.

    Returns:
        The cached function.
    """
    cached = lru_cache(maxsize=1024)(function)

    @torch.compiler.assume_constant_result
    @wraps(function)
    def call(*args: object) -> object:
        return cached(*args)

    return call


def content_hash(tensors: Mapping[str, Tensor]) -> int:
    """Return a 63-bit hash of names, shapes, types and bytes, which is the same in every process.

    Ranks compare tensors by it. The order of the mapping does not matter. Each tensor is copied to the CPU.

    Args:
        tensors: Name to tensor, any shape.
    """
    digest = hashlib.blake2b(digest_size=8)
    for name in sorted(tensors):
        # Copy, because `numpy()` would fix the size of the tensor's memory. View as bytes: numpy lacks some types.
        tensor = tensors[name].detach().to("cpu", copy=True).contiguous()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.view(-1).view(torch.uint8).numpy())
    return int.from_bytes(digest.digest(), "little") >> 1


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device.

    A GPU copies host memory from pinned memory: the host waits neither for earlier kernels nor for the copy.

    Args:
        x: The tensor, any shape.
        device: The device of the result.
    """
    if device.type != "cuda" or x.device.type != "cpu" or torch.compiler.is_compiling():
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


def local_part(x: Tensor) -> Tensor:
    """Return the shard of this rank; of a plain tensor, the tensor itself.

    Args:
        x: A tensor or DTensor of any shape.
    """
    return x.to_local() if isinstance(x, DTensor) else x


def joined(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Return tensors put together in a dimension. A single one is not copied.

    Args:
        parts: The tensors, at least one, any shape that torch.cat takes.
        dim: The dimension.
    """
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


_PART = 1 << 26
"""Number of elements that are copied to float32 at a time: 256 MiB."""


def in_parts(*rows: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield parts of the tensors, row block by row block; a block has at most `_PART` elements of the first tensor.

    Args:
        *rows: Tensors with the same number of rows; the first is (T, C).
    """
    step = max(_PART // max(rows[0].shape[1], 1), 1)
    return zip(*(x.split(step) for x in rows), strict=True)


def added_rows(
    rows: Tensor, places: Tensor, number: int, weights: Tensor | None = None
) -> Tensor:
    """Return the sum of the rows of each place: (number, C), in the type of `rows`. Not differentiable.

    The rows are added in float32 at least. They are weighted and copied to that type a part at a time.

    Args:
        rows: The rows, (T, C).
        places: The place of each row, (T,).
        number: Number of places.
        weights: The factor of each row, (T,); None if absent.
    """
    total = rows.new_zeros(number, rows.shape[1], dtype=wide_type(rows.dtype))
    optional = [] if weights is None else [weights]
    for part, part_places, *weight in in_parts(rows, places, *optional):
        part = part * weight[0].unsqueeze(1) if weight else part
        total.index_add_(0, part_places, part.to(total.dtype))
    return total.to(rows.dtype)


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which values of a floating type are summed: float32 at least.

    Args:
        dtype: The floating type.
    """
    return torch.promote_types(dtype, torch.float32)


def wide(x: Tensor) -> Tensor:
    """Return x; a tensor of half precision is copied to float32.

    Args:
        x: A floating tensor of any shape.
    """
    return x.to(wide_type(x.dtype))


def fsdp_groups(module: nn.Module) -> list[Any]:
    """Return FSDP's groups of parameters of a module that `fully_shard` has wrapped.

    Args:
        module: The wrapped module.
    """
    state = module._get_fsdp_state()  # no public name as of torch 2.13
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def version_of(x: Tensor) -> int:
    """Return the number of in-place changes that autograd has counted; 0 for a tensor of inference mode.

    Args:
        x: The tensor, any shape.
    """
    return 0 if x.is_inference() else x._version  # no public name as of torch 2.13


TensorFunction = Callable[[Tensor], Tensor]


def with_adjoint(x: Tensor, function: TensorFunction, adjoint: TensorFunction) -> Tensor:
    """Return function(x). The backward applies the adjoint to the gradient, and can be differentiated.

    It is one node of the graph, so that a rank without rows to send or receive still joins, forward and backward.

    Args:
        x: The tensor, any shape.
        function: A linear function.
        adjoint: The adjoint of the function.
    """
    return _WithAdjoint.apply(x, function, adjoint)


class _WithAdjoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, function, adjoint):
        ctx.both = function, adjoint
        return function(x)

    @staticmethod
    def backward(ctx, gradient):
        function, adjoint = ctx.both
        return with_adjoint(gradient, adjoint, function), None, None


def flattened(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Return the 1-D mesh of all ranks of a mesh.

    Args:
        mesh: The mesh.
        name: The name of the new dimension.
    """
    return mesh._flatten(name)
