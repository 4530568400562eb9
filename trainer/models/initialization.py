"""Initial weights that do not depend on the layout.

Each parameter is drawn whole from a generator seeded by (seed, name), then sharded. If each rank drew its shard from
one seed, all shards would be equal on CPU, and would depend on the layout on any device.

A module that owns weights draws them; the model draws the weights of its other modules. The method
`init_parameter(name, parameter, generator)` of a module fills the whole parameter of that name in place.
"""

import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from longshard.sharding.random_bits import parameter_seed
from trainer.parallel.tensor_parallel import preserve_ties
from trainer.transforms.lora import init_adapter, is_adapter


def draw(parameter: Tensor, generator: torch.Generator, *, branches: int = 1) -> None:
    """Draw a matrix that keeps the scale of activations.

    Args:
        parameter: (outputs, ...), filled in place.
        generator: The source of random numbers.
        branches: For the last matrix of a residual branch: number of branches, whose sum keeps the scale. Otherwise 1.
    """
    inputs = parameter[0].numel()
    parameter.normal_(0.0, 1.0 / math.sqrt(inputs * branches), generator=generator)


def fill(
    name: str, parameter: Tensor, generator: torch.Generator, *, branches: int = 1
) -> None:
    """Draw a matrix, see `draw`, or set a vector: biases to zero, weights of norms to one.

    Args:
        name: Name of the parameter.
        parameter: The whole parameter, any shape, filled in place.
        generator: The source of random numbers.
        branches: See `draw`.
    """
    if parameter.ndim == 1:
        parameter.fill_(0.0 if name.endswith("bias") else 1.0)
    else:
        draw(parameter, generator, branches=branches)


class Branch(nn.Module):
    """A residual branch of a layer. Its last matrix keeps the scale of the sum of all branches, see `draw`."""

    branches = 1
    last = "wo.weight"

    def init_parameter(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """Draw a parameter, see `fill`.

        Args:
            name: Name of the parameter in this module.
            parameter: The whole parameter, any shape, filled in place.
            generator: The source of random numbers.
        """
        fill(name, parameter, generator, branches=self.branches if name == self.last else 1)


def stored_as(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return `model`, cast to its storage dtype.

    If a module's attribute `float32_at_least` is true, the module and all modules below it are cast to float32 or
    wider.

    Args:
        model: A model on meta, cast in place.
        dtype: The storage dtype.
    """
    model.to(dtype)
    for module in model.modules():
        if getattr(module, "float32_at_least", False):
            module.to(torch.promote_types(dtype, torch.float32))
    return model


@torch.no_grad()
def initialize(
    model: nn.Module, *, seed: int, device: torch.device, offload: bool = False
) -> None:
    """Give the model on meta its storage, weights and buffers.

    Every rank draws the same whole parameters, and keeps its own shard of each. So no collective is needed.

    Args:
        model: The model, changed in place.
        seed: Seed of all parameters.
        device: Where the model computes, and where weights are drawn, one whole parameter at a time.
        offload: Keep the weights in host memory.

    Raises:
        TypeError: No module draws a parameter.
    """
    with preserve_ties(model):
        model.to_empty(device="cpu" if offload else device)
    for name, parameter in model.named_parameters():
        generator = torch.Generator(device).manual_seed(parameter_seed(seed, name))
        whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        if is_adapter(name):
            init_adapter(name, whole, generator)
        else:
            owner, own_name = _owner(model, name)
            owner.init_parameter(own_name, whole, generator)
        if isinstance(parameter, DTensor):
            # Every rank drew the same numbers, so no rank sends them.
            local = distribute_tensor(
                whole, parameter.device_mesh, parameter.placements, src_data_rank=None
            )
            parameter.to_local().copy_(local.to_local())
        else:
            parameter.copy_(whole)
    model.init_buffers(device)


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the innermost module with a method `init_parameter` for this parameter, and the parameter's name in it.

    The module can be the model itself. If no module has the method, it raises TypeError.
    """
    parts = name.split(".")
    for depth in range(len(parts) - 1, -1, -1):
        module = model.get_submodule(".".join(parts[:depth]))
        if hasattr(module, "init_parameter"):
            return module, ".".join(parts[depth:])
    raise TypeError(f"{type(model).__name__} has no method init_parameter, which draws {name}")


class Weights(nn.Module):
    """A module that returns its parameter.

    With tensor parallelism it returns the rows of this rank's heads or channels.

    Args:
        *shape: The shape of the parameter.
    """

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))

    def forward(self) -> Tensor:
        """Return the parameter."""
        return self.weight


class Filled(Weights):
    """A 1-D parameter that begins with one value everywhere.

    Args:
        size: Number of elements.
        value: The value.
    """

    def __init__(self, size: int, value: float) -> None:
        super().__init__(size)
        self.value = value

    def init_parameter(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """Set the parameter.

        Args:
            name: Name of the parameter in this module.
            parameter: (size,), filled in place.
            generator: Not used.
        """
        parameter.fill_(self.value)
