"""torch.compile of decoder blocks, one graph each; all blocks of one shape share one compiled code. And of the loss."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from trainer.config.errors import ConfigError
from trainer.distributed.parallel_dims import ParallelDims
from trainer.job.compilation import CompileOptions
from trainer.transforms.forward import replace_forward

logger = logging.getLogger("trainer")
F = TypeVar("F", bound=Callable)
_TAG = " rank "  # what comes before it in the key of the caches is the user's


def apply_compile(blocks: Sequence[nn.Module], options: CompileOptions, *, embedding: nn.Module | None = None) -> None:
    """Compile the forward of each block as one graph, in place; modules and names stay as they are.

    Call it after tensor parallelism and activation checkpointing, which become part of the graph, and before
    `fully_shard`, whose gathering stays outside. embedding: what feeds the first block, if it is tensor-parallel.
    """
    if not options.model:
        return
    # It asks to look for in-place operators in checkpointed blocks, on every rank; there are none.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    for block in blocks:
        replace_forward(block, "compile", _compiled(block.forward, options))
    if embedding is not None:
        embedding.register_forward_hook(_wait_inside_autograd)


def compiled_loss(loss: F, options: CompileOptions) -> F:
    """Return `loss`, compiled if the options say so."""
    return _compiled(loss, options) if options.loss else loss


def _compiled(function: F, options: CompileOptions) -> F:
    inductor = {}
    if torch.are_deterministic_algorithms_enabled():
        inductor["deterministic"] = True  # kernels are not chosen by their time
    if options.overlaps_tensor_parallel:
        inductor["_micro_pipeline_tp"] = True
    if options.rounds_as_eager:
        inductor["emulate_precision_casts"] = True
    if options.backend != "inductor":
        inductor = {}
    return torch.compile(function, backend=options.backend, fullgraph=True, options=inductor or None)


@contextmanager
def compiler_settings(options: CompileOptions) -> Iterator[None]:
    """Around forward and backward: how the graphs that are compiled inside are divided between the two.

    Inductor's own settings are options of each function: it may compile a backward on another thread, which does not
    see a context.
    """
    settings = {}
    if options.splits_backward:
        settings["donated_buffer"] = False  # else the first run overwrites what the second needs
    if options.memory_budget is not None:
        settings["activation_memory_budget"] = options.memory_budget
        # Process groups are arguments of graphs with tensor parallelism; they hold no tensors.
        if hasattr(torch._functorch.config, unsized := "unsafe_treat_script_objects_as_zero_size"):
            settings[unsized] = True
    with torch._functorch.config.patch(settings) if options.any and settings else nullcontext():
        yield


def keep_caches_apart(dims: ParallelDims) -> None:
    """Let this process find in the compiler's caches only what was compiled on this rank, for these process groups.

    Compiled code has the rank's part of a DTensor and the names of its groups in it, and the key of the cache has
    neither: a second run would find another rank's code, and be wrong without an error (pytorch issue 188390).
    """
    settings = torch.compiler.config
    settings.cache_key_tag = (
        f"{settings.cache_key_tag.partition(_TAG)[0]}{_TAG}{dims.rank('world')} {dims.group_names()}"
    )


def _check_symmetric_memory(device: torch.device) -> None:
    key = "parallelism.enable_async_tensor_parallel = true needs GPUs that reach each other's memory"
    if device.type != "cuda":
        raise ConfigError(f"{key}, and this runs on the {device.type.upper()}; leave it out here")
    others = [i for i in range(torch.cuda.device_count()) if i != device.index]
    unreachable = [i for i in others if not torch.cuda.can_device_access_peer(device.index, i)]
    if unreachable:
        raise ConfigError(f"{key}, and GPU {device.index} cannot reach {unreachable}; leave it out on this machine")


def share_memory(mesh: DeviceMesh) -> None:
    """Let the ranks of a 1-D mesh read and write each other's memory: asynchronous tensor parallelism works by it."""
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    enable_symm_mem_for_group(mesh.get_group().group_name)


class Recompilations:
    """Counts the graphs that are compiled, and tells of those after the first steps: there should be none.

    first_step: of this run, after which the compiler may still meet something new once.
    """

    def __init__(self, options: CompileOptions, first_step: int) -> None:
        self._enabled = options.any
        self._expected_until = first_step + 1
        self._graphs = 0

    def step(self, step: int) -> None:
        """To be called after each step."""
        if not self._enabled:
            return
        before, self._graphs = self._graphs, compiled_graphs()
        if self._graphs > before and step > self._expected_until:
            new = self._graphs - before
            logger.warning(f"step {step}: {new} graph(s) were compiled again; TORCH_LOGS=recompiles says why")


def compiled_graphs() -> int:
    """Graphs that this process has compiled so far."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def _wait_inside_autograd(_module: nn.Module, _args: object, output: torch.Tensor) -> torch.Tensor:
    """Turn a result that may still be on its way into a plain tensor, by an operator that autograd sees.

    A compiled block would unwrap it unseen: the gradient of a tensor-parallel embedding is then silently zero under
    FSDP, and the first backward fails without (pytorch issue 179849).
    """
    return output * 1


def check_compiler(options: CompileOptions, device: torch.device) -> None:
    """Look for what compilation needs on this machine, before anything is built.

    Raises:
        ConfigError: there is no C++ compiler; for asynchronous tensor parallelism, no memory that GPUs share.
    """
    if options.overlaps_tensor_parallel:
        _check_symmetric_memory(device)
    if not options.any or options.backend != "inductor":
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
