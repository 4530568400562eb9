"""Frozen weights in four bits (NF4; QLoRA, arXiv 2305.14314), through bitsandbytes, which is imported only if used.

A linear module then holds a packed weight, and dequantises it for each product, in the forward and in the backward.
64 weights of a row are a block of 36 bytes: 64 codes of four bits, and their largest absolute value in float32.

    row of W:       [64 weights][64 weights] ...
    packed row:     [32 bytes of codes, 4 of scale][32 bytes of codes, 4 of scale] ...

The bytes are stored as numbers of the dtype in which the model computes. FSDP gathers parameters in that dtype, so it
moves these bits without a cast. No block crosses a row, and tensor parallelism cuts between blocks. So a weight has the
same codes on every layout.

These are the codes of bitsandbytes for blocks of 64, without double quantisation.

State of the process: The level of a logger, while bitsandbytes is imported.
"""

import logging
from collections.abc import Iterable, Iterator
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from longshard.sharding.forward import replace_forward
from longshard.sharding.tensors import local_part
from trainer.config.errors import ConfigError
from trainer.config.transforms import NF4_BLOCK, NF4_BYTES, LoRA

_CODES = NF4_BLOCK // 2
"""Bytes of a block's codes; its scale has the other bytes."""


def check_quantization_package(settings: LoRA) -> None:
    """Check that bitsandbytes is installed if frozen weights have four bits.

    Args:
        settings: Table `[lora]`.

    Raises:
        ConfigError: It is not installed.
    """
    if settings.quantize != "none":
        _import_package()


def quantize_linear(module: nn.Linear, dtype: torch.dtype) -> None:
    """Replace the weight of a module on meta by its packed form, which is empty and frozen, and set its forward.

    The module also gets an `init_parameter` that fills the packed weight with zeros.

    Args:
        module: The module, after tensor parallelism. A rank's inputs are a multiple of 64.
        dtype: The dtype in which FSDP gathers parameters.

    Raises:
        ConfigError: bitsandbytes is not installed.
    """
    _import_package()
    weight = module.weight
    size = module.out_features, module.in_features // NF4_BLOCK * _numbers(dtype)
    packed = torch.empty(size, dtype=dtype, device=weight.device)
    if isinstance(weight, DTensor):
        packed = distribute_tensor(
            packed, weight.device_mesh, weight.placements, src_data_rank=None
        )
    module.weight = nn.Parameter(packed, requires_grad=False)
    module.init_parameter = _set_to_zero
    module.is_quantized = True
    replace_forward(module, "packed weights", partial(_forward, module))


def quantized_weights(model_parts: Iterable[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Yield the packed weights, with their names in the model.

    Args:
        model_parts: The model parts of this rank.

    Yields:
        The name, and the packed weight, (outputs, numbers of the packed row).
    """
    for part in model_parts:
        for name, module in part.named_modules():
            if getattr(module, "is_quantized", False):
                yield f"{name}.weight", module.weight


def empty_like_unpacked(packed: Tensor) -> Tensor:
    """Return an empty float32 weight, (outputs, inputs), that the ranks divide as they divide the packed weight.

    Args:
        packed: The packed weight, (outputs, numbers).
    """
    weight = torch.empty(_weight_shape(local_part(packed)), device=packed.device)
    if not isinstance(packed, DTensor):
        return weight
    shape = _weight_shape(packed)
    return DTensor.from_local(
        weight,
        packed.device_mesh,
        packed.placements,
        run_check=False,
        shape=shape,
        stride=(shape[1], 1),
    )


@torch.no_grad()
def pack_into(packed: Tensor, weight: Tensor) -> None:
    """Quantise a weight into its packed form; each rank quantises its own part.

    Args:
        packed: The packed weight, (outputs, numbers), filled in place.
        weight: The weight, (outputs, inputs), float32, divided as the packed weight is.
    """
    own = local_part(weight).contiguous()
    if own.numel() == 0:
        return
    codes, scales = torch.ops.bitsandbytes.quantize_4bit(own, NF4_BLOCK, "nf4", torch.uint8)
    blocks = _blocks(local_part(packed))
    blocks[:, :_CODES] = codes.view(-1, _CODES)
    blocks[:, _CODES:NF4_BYTES] = scales.view(-1, 1).view(torch.uint8)


def unpacked(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight that a packed weight stands for, (outputs, inputs).

    Args:
        packed: A rank's packed weight, (outputs, numbers).
        dtype: The dtype of the result. If it is float64, the weight is computed in float32.
    """
    blocks = _blocks(packed.contiguous())
    codes = blocks[:, :_CODES].contiguous()
    scales = blocks[:, _CODES:NF4_BYTES].contiguous().view(torch.float32)
    computed = torch.float32 if dtype == torch.float64 else dtype
    weight = torch.ops.bitsandbytes.dequantize_4bit(
        codes.view(-1, 1), scales.flatten(), NF4_BLOCK, "nf4", _weight_shape(packed), computed
    )
    return weight.to(dtype)


def _import_package() -> None:
    # on a CPU, importing bitsandbytes warns of a kernel for inference
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    try:
        import_module("bitsandbytes")  # registers its operators
    except ImportError as error:
        raise ConfigError(
            f"lora.quantize = 'nf4' needs bitsandbytes ({error}); install it with pip install '.[qlora]' "
            "in the folder of this program or with pip install bitsandbytes, or leave lora.quantize out"
        ) from None


def _numbers(dtype: torch.dtype) -> int:
    """Return how many numbers of this dtype hold a block."""
    return -(-NF4_BYTES // dtype.itemsize)


def _weight_shape(packed: Tensor) -> torch.Size:
    rows, numbers = packed.shape
    return torch.Size((rows, numbers // _numbers(packed.dtype) * NF4_BLOCK))


def _blocks(packed: Tensor) -> Tensor:
    """Return the bytes of a contiguous packed weight, one row for each block."""
    return packed.view(torch.uint8).view(-1, _numbers(packed.dtype) * packed.itemsize)


def _set_to_zero(name: str, parameter: Tensor, generator: torch.Generator) -> None:
    parameter.zero_()


def _forward(module: nn.Linear, x: Tensor) -> Tensor:
    """Return x, (..., inputs), times the frozen weight, plus the bias, in the layout of a plain linear module."""
    weight = module.weight
    if not isinstance(weight, DTensor):
        product = _Product.apply(x, weight)
    else:
        (cut,) = weight.placements
        laid_out = {
            Shard(0): Shard(x.ndim - 1),  # each rank has some of the outputs
            Shard(1): Partial(),  # each rank has a part of the sum over inputs
            Replicate(): x.placements[0],
        }[cut]
        gradient = [Partial()] if cut == Shard(0) else x.placements
        local = _Product.apply(x.to_local(grad_placements=gradient), weight.to_local())
        product = DTensor.from_local(local, x.device_mesh, [laid_out], run_check=False)
    return product if module.bias is None else product + module.bias


class _Product(torch.autograd.Function):
    """Multiply by a packed weight. Only the packed weight waits for the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor) -> Tensor:
        """Return the product, (..., outputs), of x, (..., inputs)."""
        ctx.save_for_backward(packed)
        return F.linear(x, unpacked(packed, x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of x, (..., inputs)."""
        (packed,) = ctx.saved_tensors
        return grad @ unpacked(packed, grad.dtype), None
