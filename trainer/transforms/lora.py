"""Low-rank adapters of linear modules (LoRA, arXiv 2106.09685): weights are frozen, and only adapters are trained.

    y = W x + b + (alpha / rank) B A x        A: (rank, inputs), B: (outputs, rank), zero at the start

Adapters are parameters `lora_a` and `lora_b` of the module itself, so that names of weights stay. With tensor
parallelism W is cut over rows or columns, so are B or A, and the other one is whole on each rank.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from trainer.config.schema import LoRA
from trainer.distributed.sharding.forward import replace_forward

A, B = "lora_a", "lora_b"


def apply_lora(model: nn.Module, settings: LoRA) -> None:
    """Freeze all parameters of a model on meta, or of a stage of it, and add adapters to the chosen modules, in place.

    Call it after tensor parallelism, and before a layer's forward is replaced.
    """
    if not settings.rank:
        return
    model.requires_grad_(False)
    for name, module in model.named_modules():
        if settings.adapts(name) and isinstance(module, nn.Linear):
            _adapt(module, settings.rank, settings.scale)


def merged(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, settings: LoRA) -> torch.Tensor:
    """Return W + (alpha / rank) B A of whole tensors, multiplied in at least float32, in the data type of W."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    return (weight.to(wide) + settings.scale * (b.to(wide) @ a.to(wide))).to(weight.dtype)


def is_adapter(name: str) -> bool:
    """Return whether a parameter of that name is one of an adapter."""
    return name.rpartition(".")[2] in (A, B)


def init_adapter(name: str, parameter: torch.Tensor, generator: torch.Generator) -> None:
    """Draw A uniformly, with a variance of 1 / (3 inputs), and set B to zero, so that training starts from W."""
    if name.endswith(A):
        bound = parameter.shape[1] ** -0.5
        parameter.uniform_(-bound, bound, generator=generator)
    else:
        parameter.zero_()


def _adapt(module: nn.Linear, rank: int, scale: float) -> None:
    weight = module.weight
    sizes = {A: (rank, module.in_features), B: (module.out_features, rank)}
    for name, size in sizes.items():
        parameter = torch.empty(size, dtype=weight.dtype, device=weight.device)
        if isinstance(weight, DTensor):
            (placement,) = weight.placements
            cut = {A: Shard(1), B: Shard(0)}[name]
            parameter = distribute_tensor(
                parameter, weight.device_mesh, [cut if cut == placement else Replicate()], src_data_rank=None
            )
        module.register_parameter(name, nn.Parameter(parameter))
    over_inputs = isinstance(weight, DTensor) and weight.placements[0] == Shard(1)
    forward = partial(_row_wise if over_inputs else _adapted, module, module.forward, scale)
    replace_forward(module, "adapters", forward)


Linear = Callable[[torch.Tensor], torch.Tensor]


def _adapted(module: nn.Linear, linear: Linear, scale: float, x: torch.Tensor) -> torch.Tensor:
    return linear(x) + scale * F.linear(F.linear(x, module.lora_a), module.lora_b)


def _row_wise(module: nn.Linear, linear: Linear, scale: float, x: DTensor) -> DTensor:
    """As `_adapted` where each rank has a part of the inputs: the sums over ranks stay open, as those of W x do."""
    mesh = x.device_mesh
    low = F.linear(x.to_local(), module.lora_a.to_local())
    added = scale * F.linear(low, module.lora_b.to_local(grad_placements=[Partial()]))
    return linear(x) + DTensor.from_local(added, mesh, [Partial()], run_check=False)
