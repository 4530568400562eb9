"""Low-rank adapters (LoRA, arXiv 2106.09685): weights are frozen, and only adapters are trained.

    y = W x + b + scale B A dropout(x)        A: (rank, inputs), B: (outputs, rank), zero at the start
    scale = alpha / rank

Adapters are parameters `lora_a` and `lora_b` of the linear module itself, so the names of weights stay. If tensor
parallelism cuts the rows of W, it cuts B; if it cuts the columns, it cuts A. The other adapter is whole on each rank. A
stacked weight of experts, for example `w13`, has an adapter for each expert: `w13_lora_a` (E, rank, inputs),
`w13_lora_b` (E, outputs, rank).

A hash of the seed, the module's name, the token's number in the run, and the feature decides which inputs are dropped.
So every layout, a recomputed layer and a resumed run drop the same inputs.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from longshard.sharding.forward import replace_forward
from longshard.sharding.random_bits import parameter_seed, random_bits
from longshard.sharding.tensors import wide_type
from trainer.config.schema import LoRA
from trainer.transforms.quantized import quantize_linear

A, B = "lora_a", "lora_b"


@dataclass(frozen=True)
class Dropout:
    """Sets a share of the features of each token to zero, and multiplies the others by 1 / (1 - share).

    Attributes:
        key: Key of the module, 63 bits.
        share: Share of dropped features, rounded to a multiple of 2^-16.
    """

    key: int
    share: float

    def factors(self, token_numbers: Tensor, features: range, dtype: torch.dtype) -> Tensor:
        """Return the factor of each feature of each token, (B, S, features).

        Args:
            token_numbers: Numbers of the tokens in the run, (B, S), int64.
            features: The features of this rank.
            dtype: Dtype of the result.
        """
        dropped = round(self.share * 2**16)
        groups = torch.arange(
            features.start // 4, -(-features.stop // 4), device=token_numbers.device
        )
        token_bits = random_bits(token_numbers.clone(), self.key).unsqueeze(-1)
        # 16 bits for each of four features
        bits = random_bits(groups.expand(*token_numbers.shape, -1).clone(), token_bits)
        first = features.start % 4
        kept = bits.view(torch.int16)[..., first : first + len(features)] >= dropped - 2**15
        return kept.to(dtype) * (2**16 / (2**16 - dropped))


def apply_lora(
    model: nn.Module,
    settings: LoRA,
    seed: int = 0,
    quantized_for: torch.dtype | None = None,
) -> None:
    """Freeze a model on meta, or a stage of it, except `settings.whole`, and add adapters to the chosen modules.

    Call it after tensor parallelism, before expert parallelism, and before a layer's forward is replaced. With dropout
    the linear modules of layers take `token_numbers`, (B, S), see `Dropout`. If `settings.rank` is 0, nothing happens.

    Args:
        model: The model or stage, changed in place.
        settings: Table `[lora]`.
        seed: Seed of the dropout.
        quantized_for: The dtype in which FSDP gathers parameters; packed ones replace the weights that
            `settings.quantize` names. None: nothing is packed, and weights keep the shapes that files have.
    """
    if not settings.rank:
        return
    model.requires_grad_(False)
    for name in settings.whole:
        if (module := getattr(model, name)) is not None:  # a stage of a pipeline may lack it
            module.requires_grad_(True)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            dtype = module.weight.dtype
            if quantized_for is not None and settings.quantizes(name):
                quantize_linear(module, quantized_for)
            if settings.adapts(name):
                dropout = Dropout(parameter_seed(seed, f"{name}/dropout"), settings.dropout)
                _adapt(module, settings, dropout, dtype)
            elif settings.dropout and name.startswith("layers."):
                replace_forward(module, "adapters", partial(_without_adapter, module.forward))
        for weight in getattr(module, "stacked", ()):
            if settings.adapts(f"{name}.{weight}"):
                module.adapter_scale = settings.scale
                _adapt_stacked(module, weight, settings.rank)


@contextmanager
def without_adapters(model_parts: Iterable[nn.Module]) -> Iterator[None]:
    """Disable adapters inside this context: forwards use the frozen weights.

    Args:
        model_parts: The model parts of this rank.

    Yields:
        None.
    """
    adapted = [
        module
        for part in model_parts
        for module in part.modules()
        if hasattr(module, "adapters_on")
    ]
    for module in adapted:
        module.adapters_on = False
    try:
        yield
    finally:
        for module in adapted:
            module.adapters_on = True


def merged(weight: Tensor, a: Tensor, b: Tensor, settings: LoRA) -> Tensor:
    """Return W + scale B A, for whole tensors or for each expert, in float32 or wider.

    Args:
        weight: W, (..., outputs, inputs).
        a: A, (..., rank, inputs).
        b: B, (..., outputs, rank).
        settings: Table `[lora]`.
    """
    wide = wide_type(weight.dtype)
    return weight.to(wide) + settings.scale * (b.to(wide) @ a.to(wide))


def is_adapter(name: str) -> bool:
    """Return whether a parameter belongs to an adapter.

    Args:
        name: Name of the parameter.
    """
    return name.endswith((A, B))


def init_adapter(name: str, parameter: Tensor, generator: torch.Generator) -> None:
    """Draw A uniformly, with a variance of 1 / (3 inputs), and set B to zero, so that training starts from W.

    Args:
        name: Name of the parameter.
        parameter: A or B, (..., rank, inputs) or (..., outputs, rank), filled in place.
        generator: The source of random numbers.
    """
    if name.endswith(A):
        bound = parameter.shape[-1] ** -0.5
        parameter.uniform_(-bound, bound, generator=generator)
    else:
        parameter.zero_()


def _adapt(module: nn.Linear, settings: LoRA, dropout: Dropout, dtype: torch.dtype) -> None:
    weight = module.weight
    rank = settings.rank
    sizes = {A: (rank, module.in_features), B: (module.out_features, rank)}
    for name, size in sizes.items():
        parameter = torch.empty(size, dtype=dtype, device=weight.device)
        if isinstance(weight, DTensor):
            (placement,) = weight.placements
            cut = {A: Shard(1), B: Shard(0)}[name]
            parameter = distribute_tensor(
                parameter,
                weight.device_mesh,
                [cut if cut == placement else Replicate()],
                src_data_rank=None,
            )
        module.register_parameter(name, nn.Parameter(parameter))
    module.adapters_on = True
    over_inputs = isinstance(weight, DTensor) and weight.placements[0] == Shard(1)
    forward = partial(_adapted, module, module.forward, settings.scale, dropout, over_inputs)
    replace_forward(module, "adapters", forward)


def _adapt_stacked(module: nn.Module, name: str, rank: int) -> None:
    weight = getattr(module, name)
    number, outputs, inputs = weight.shape
    for adapter, size in ((A, (number, rank, inputs)), (B, (number, outputs, rank))):
        module.register_parameter(f"{name}_{adapter}", nn.Parameter(weight.new_empty(size)))
    module.adapters_on = True


Linear = Callable[[Tensor], Tensor]


def _without_adapter(linear: Linear, x: Tensor, token_numbers: Tensor | None = None) -> Tensor:
    return linear(x)


def _adapted(
    module: nn.Linear,
    linear: Linear,
    scale: float,
    dropout: Dropout,
    over_inputs: bool,
    x: Tensor,
    token_numbers: Tensor | None = None,
) -> Tensor:
    """Return the output with the adapter, or without it inside `without_adapters`. No token_numbers: no dropout.

    linear: the forward without the adapter. over_inputs: each rank has a part of the inputs; the result is a partial
    sum over ranks, like W x.
    """
    if not module.adapters_on:
        return linear(x)
    kept = x.to_local() if over_inputs else x
    if token_numbers is not None:
        features = kept.shape[-1]
        first = x.device_mesh.get_local_rank() * features if over_inputs else 0
        factors = dropout.factors(token_numbers, range(first, first + features), kept.dtype)
        if isinstance(kept, DTensor):
            factors = DTensor.from_local(factors, x.device_mesh, [Replicate()], run_check=False)
        kept = kept * factors
    if not over_inputs:
        return linear(x) + scale * F.linear(F.linear(kept, module.lora_a), module.lora_b)
    low = F.linear(kept, module.lora_a.to_local())
    added = scale * F.linear(low, module.lora_b.to_local(grad_placements=[Partial()]))
    return linear(x) + DTensor.from_local(added, x.device_mesh, [Partial()], run_check=False)
