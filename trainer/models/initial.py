"""How weights start. A module that owns weights draws them; the model draws those of its other modules.

`init_parameter(name, parameter, generator)` of a module fills the whole parameter of that name in place, before it is
sharded. The numbers depend on the generator alone, whose seed is that of the parameter's name in the model.
"""

import math

import torch


def draw(parameter: torch.Tensor, generator: torch.Generator, *, fan_in: int | None = None, branches: int = 1) -> None:
    """Draw a matrix that keeps the scale of activations.

    parameter: (outputs, ...); fan_in: inputs of an output, by default all but the first dimension. branches: residual
    branches of the model, for the matrix at the end of one: the sum of all keeps the scale.
    """
    inputs = parameter[0].numel() if fan_in is None else fan_in
    parameter.normal_(0.0, 1.0 / math.sqrt(inputs * branches), generator=generator)


def start(name: str, parameter: torch.Tensor) -> None:
    """Set a vector: biases to zero, weights of norms to one."""
    parameter.fill_(0.0 if name.endswith("bias") else 1.0)
