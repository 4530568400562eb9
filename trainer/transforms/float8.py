"""Matrix products in float8 through torchao, which is imported only if they are enabled.

Weights, gradients and optimizer state keep their dtype. The inputs of a product are scaled and rounded to float8 at
each use: tensorwise with one scale for a tensor, rowwise with one scale for each row (torchao's "dynamic scaling").

State of the process: The levels of loggers, while torchao is imported.
"""

import logging
from dataclasses import replace
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainer.config.errors import ConfigError
from trainer.config.schema import Float8, JobConfig

# Ada, Hopper and later; AMD's MI300 counts as 9.4.
_CAPABILITY = (8, 9)


def apply_float8(model: nn.Module, config: Float8, *, sharded: bool = True) -> None:
    """Let the linear modules of `model` multiply in float8, in place; parameters keep their names.

    Nothing happens without `config.enable`.

    Args:
        model: On meta, whole or a stage, before tensor parallelism.
        config: Table `[float8]`. Modules whose name contains an entry of `filter_fqns` are left out.
        sharded: Whether FSDP gathers weights, which it can do in float8.
    """
    if not config.enable:
        return
    torchao = _torchao()
    recipe = replace(
        torchao.Float8LinearConfig.from_recipe_name(config.recipe_name),
        enable_fsdp_float8_all_gather=config.enable_fsdp_float8_all_gather and sharded,
        emulate=config.emulate,
        # The gradient of a weight sums over a rank's tokens, and kernels need a multiple of 16 of them.
        pad_inner_dim=True,
    )

    def chosen(module: nn.Module, name: str) -> bool:
        return type(module) is nn.Linear and not any(
            part in name for part in config.filter_fqns
        )

    torchao.convert_to_float8_training(model, config=recipe, module_filter_fn=chosen)


def precompute_scales(model: nn.Module, config: JobConfig) -> None:
    """Compute the scales of all weights for a step's float8 all-gathers, by one reduction over the ranks.

    Nothing happens without such all-gathers, or with `training.enable_cpu_offload`. Weights on the host are copied to
    the GPU without these scales, and compute their own.

    Args:
        model: The model part.
        config: The configuration.
    """
    float8 = config.float8
    on_host = config.training.enable_cpu_offload
    if float8.enable and float8.enable_fsdp_float8_all_gather and not on_host:
        _torchao().precompute_float8_dynamic_scale_for_fsdp(model)


def without_float8_cast(tensor: Tensor) -> Tensor:
    """Return a weight without the wrapper for float8 all-gathers, in the same memory.

    A tensor without the wrapper is returned as it is. Checkpoints use it: a file of the wrapped weight could be read
    only with torchao installed.

    Args:
        tensor: A tensor of any shape.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    local = tensor.to_local()
    if not hasattr(local, "fsdp_pre_all_gather"):
        return tensor
    return DTensor.from_local(
        local._tensor,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def check_float8_machine(
    settings: Float8, device: torch.device, *, norms_have_parameters: bool = True
) -> None:
    """Check that this machine can train in float8, before anything is built. Without `float8.enable`, check nothing.

    Args:
        settings: Table `[float8]`.
        device: The device of this rank.
        norms_have_parameters: Whether the model's norms have parameters. Without them FSDP gathers float8 weights
            alone, which a CPU cannot do.

    Raises:
        ConfigError: torchao is not installed, or the device cannot multiply or gather in float8.
    """
    if not settings.enable:
        return
    try:
        _torchao()
    except ImportError as error:
        raise ConfigError(
            f"float8.enable = true needs torchao ({error}); install it with pip install '.[float8]' in the folder of "
            f"this program or with pip install torchao, or leave float8.enable out"
        ) from None
    if not settings.emulate and (
        device.type != "cuda" or torch.cuda.get_device_capability(device) < _CAPABILITY
    ):
        machine = "CPU"
        if device.type == "cuda":
            capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
            machine = f"{torch.cuda.get_device_name(device)} with {capability}"
        raise ConfigError(
            f"float8.enable = true needs a GPU of compute capability {'.'.join(map(str, _CAPABILITY))} "
            f"or more, and this is a {machine}; set float8.emulate = true for its rounding alone, or "
            "leave float8.enable out"
        )
    # An FSDP unit of float8 weights alone is sent as float8, which gloo does not support; a mixed unit as bytes.
    alone = not norms_have_parameters or not any(
        part in "output" for part in settings.filter_fqns
    )
    if settings.enable_fsdp_float8_all_gather and device.type == "cpu" and alone:
        raise ConfigError(
            "float8.enable_fsdp_float8_all_gather = true on a CPU needs other parameters than float8 weights in each "
            "layer and in the output: a model.norm_type other than 'np_layernorm', and 'output' in float8.filter_fqns"
        )


def _torchao() -> ModuleType:
    # importing torchao warns of kernels for other machines, and of torchao itself
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    import torchao.float8

    return torchao.float8
