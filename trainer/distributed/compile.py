"""torch.compile of decoder blocks, one graph each; all blocks of one shape share one compiled code."""

import logging
from collections.abc import Sequence

import torch
from torch import nn

from trainer.config.errors import ConfigError
from trainer.config.schema import Compile


def apply_compile(blocks: Sequence[nn.Module], config: Compile, *, embedding: nn.Module | None = None) -> None:
    """Compile the forward of each block as one graph, in place; modules and names stay as they are.

    Call it after tensor parallelism and activation checkpointing, which become part of the graph, and before
    `fully_shard`, whose gathering stays outside. embedding: what feeds the first block, if it is tensor-parallel.
    """
    if not config.enable:
        return
    # It asks to look for in-place operators in checkpointed blocks, on every rank; there are none.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    options = {}
    if config.backend == "inductor" and torch.are_deterministic_algorithms_enabled():
        options = {"options": {"deterministic": True}}  # kernels are not chosen by their time
    for block in blocks:
        block.forward = torch.compile(block.forward, backend=config.backend, fullgraph=True, **options)
    if embedding is not None:
        embedding.register_forward_hook(_wait_inside_autograd)


def _wait_inside_autograd(_module: nn.Module, _args: object, output: torch.Tensor) -> torch.Tensor:
    """Turn a result that may still be on its way into a plain tensor, by an operator that autograd sees.

    A compiled block would unwrap it unseen: the gradient of a tensor-parallel embedding is then silently zero under
    FSDP, and the first backward fails without (pytorch issue 179849).
    """
    return output * 1


def check_compiler(config: Compile) -> None:
    """Look for what the backend needs on this machine, before anything is built.

    Raises:
        ConfigError: there is no C++ compiler.
    """
    if not config.enable or config.backend != "inductor":
        return
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise ConfigError(
            "compile.backend = 'inductor' needs a C++ compiler, and none was found: install g++, name one in the "
            "variable CXX, or use compile.backend = 'aot_eager' or compile.enable = false"
        ) from None
