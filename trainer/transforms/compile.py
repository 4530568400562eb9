"""torch.compile of the loss and of decoder blocks, one graph each; blocks of one shape share compiled code.

State of the process: The level of a logger of PyTorch; and the tag of the compiler's caches, as ranks must not share
compiled code.
"""

import logging
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from longshard.sharding.forward import replace_forward
from trainer.config.errors import ConfigError
from trainer.job.transforms import CompileOptions
from trainer.parallel.parallel_dims import ParallelDims

logger = logging.getLogger("trainer")
F = TypeVar("F", bound=Callable)
_GRAPHS = 64
"""Largest number of graphs of one function. PyTorch allows 8, and then the run ends. A layer has a graph for each kind
of layer, with and without gradients, with and without optional arguments, and one more when sizes begin to vary."""
_TAG = " rank "  # in the caches' key, the text before it belongs to the user


def apply_compile(
    layers: Mapping[str, nn.Module],
    options: CompileOptions,
    *,
    embedding: nn.Module | None = None,
    apart: Mapping[nn.Module, Sequence[tuple[nn.Module, str]]] | None = None,
) -> None:
    """Compile the forward of each block as one graph, in place; modules and names stay the same.

    Call it after tensor parallelism and activation checkpointing, which become part of the graph, and before
    `fully_shard`, whose all-gathers stay outside. Nothing happens without `options.model`.

    Args:
        layers: Blocks by number, so that a pipeline's stages recompute the same layers as the whole model.
        options: Compilation of the job.
        embedding: The module before the first block, if it is tensor-parallel.
        apart: Blocks that are not compiled as a whole, with the methods of modules that are compiled, as a graph each.
    """
    if not options.model:
        return
    # This logger warns of in-place operators in checkpointed blocks, on every rank; the blocks have none.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    for number, block in layers.items():
        if apart and block in apart:
            for module, method in apart[block]:
                setattr(module, method, _compiled(getattr(module, method), options))
            continue
        forward = block.forward
        if (
            recomputed := options.recomputes_every
            and (int(number) + 1) % options.recomputes_every == 0
        ):
            forward = types.MethodType(_forward_without_budget, block)
        forward = _compiled(forward, options)
        if recomputed:
            # the graphs of its first call keep only their inputs, and compute the rest again
            forward = torch._functorch.config.patch(_budget(0.0))(forward)
        replace_forward(block, "compile", forward)
    if embedding is not None:
        embedding.register_forward_hook(_wait_inside_autograd)


def _forward_without_budget(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run the forward of a block. As a function of its own it has its own graphs, which other blocks do not share."""
    return type(self).forward(self, *args, **kwargs)


def _budget(share: float) -> dict[str, object]:
    settings = {"activation_memory_budget": share}
    # Process groups are arguments of graphs with tensor parallelism; they hold no tensors.
    if hasattr(torch._functorch.config, unsized := "unsafe_treat_script_objects_as_zero_size"):
        settings[unsized] = True
    return settings


def compiled_loss(loss: F, options: CompileOptions) -> F:
    """Return `loss`, or its compiled form if the options say so.

    Args:
        loss: A function.
        options: Compilation of the job.
    """
    return _compiled(loss, options) if options.loss else loss


def rows_vary(*tensors: Tensor, dim: int = 0) -> None:
    """Mark the rows of these tensors as dynamic, so that one graph serves all numbers of rows.

    Args:
        *tensors: Tensors of any shape.
        dim: The dimension of the rows.
    """
    from torch._dynamo import maybe_mark_dynamic

    for tensor in tensors:
        maybe_mark_dynamic(tensor, dim)


def _compiled(function: F, options: CompileOptions) -> F:
    inductor = {}
    if torch.are_deterministic_algorithms_enabled():
        inductor["deterministic"] = True  # kernels are not chosen by their measured time
    if options.overlaps_tensor_parallel:
        inductor["_micro_pipeline_tp"] = True
    if options.rounds_as_eager:
        inductor["emulate_precision_casts"] = True
    if options.backend != "inductor":
        inductor = {}
    dynamic = False if options.fixed_shapes else None
    return torch.compile(
        function,
        fullgraph=True,
        backend=options.backend,
        dynamic=dynamic,
        options=inductor or None,
    )


@contextmanager
def compiler_settings(options: CompileOptions) -> Iterator[None]:
    """Set how graphs that are compiled inside are divided between forward and backward; enter it around both.

    Inductor's settings are options of each function instead, because it may compile a backward on another thread, which
    does not see a context.

    Args:
        options: Compilation of the job.

    Yields:
        None.
    """
    if not options.any:
        yield
        return
    from torch._dynamo import config  # the import of the compiler takes a second

    settings = {}
    if options.splits_backward:
        # otherwise the first run overwrites inputs of the second
        settings["donated_buffer"] = False
    if options.memory_budget is not None:
        settings |= _budget(options.memory_budget)
    more_graphs = config.patch(recompile_limit=max(config.recompile_limit, _GRAPHS))
    with torch._functorch.config.patch(settings), more_graphs:
        yield


def keep_caches_apart(dims: ParallelDims) -> None:
    """Restrict the compiler's caches to code that was compiled on this rank, for these process groups.

    Compiled code contains the rank's part of a DTensor and the names of its groups, but the key of the cache does not:
    a second run would find another rank's code, and be wrong without an error (pytorch issue 188390).

    Args:
        dims: The meshes of the run.
    """
    settings = torch.compiler.config
    others = settings.cache_key_tag.partition(_TAG)[0]
    settings.cache_key_tag = f"{others}{_TAG}{dims.rank('world')} {dims.group_names()}"


def _check_async(device: torch.device) -> None:
    if (2, 12) <= torch.__version__ < (2, 13):  # pytorch issue 182124
        raise ConfigError(
            "parallelism.enable_async_tensor_parallel = true gives other results than without it under PyTorch 2.12, "
            f"and this is {torch.__version__}; use another version, such as 2.13, or leave it out"
        )
    key = "parallelism.enable_async_tensor_parallel = true needs GPUs that reach each other's memory"
    if device.type != "cuda":
        raise ConfigError(
            f"{key}, and this runs on the {device.type.upper()}; leave it out here"
        )
    others = [i for i in range(torch.cuda.device_count()) if i != device.index]
    unreachable = [i for i in others if not torch.cuda.can_device_access_peer(device.index, i)]
    if unreachable:
        raise ConfigError(
            f"{key}, and GPU {device.index} cannot reach {unreachable}; leave it out on this machine"
        )


def share_memory(mesh: DeviceMesh) -> None:
    """Let the ranks of a mesh read and write each other's memory, for asynchronous tensor parallelism.

    Args:
        mesh: A 1-D mesh.
    """
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    enable_symm_mem_for_group(mesh.get_group().group_name)


class Recompilations:
    """A counter of compiled graphs, which warns of graphs that are compiled after the first steps.

    Args:
        options: Compilation of the job.
        first_step: First step of this run. In the step after it, the compiler may still see new shapes.
    """

    def __init__(self, options: CompileOptions, first_step: int) -> None:
        self._enabled = options.any
        self._expected_until = first_step + 1
        self._graphs = 0

    def expected(self) -> None:
        """Treat all graphs that were compiled since the last step as expected."""
        self._graphs = compiled_graphs() if self._enabled else 0

    def step(self, step: int) -> None:
        """Warn if a step after the first two compiled a graph; call it after each step.

        Args:
            step: Number of the step.
        """
        if not self._enabled:
            return
        new = compiled_graphs() - self._graphs
        self._graphs += new
        if new > 0 and step > self._expected_until:
            logger.warning(
                f"step {step}: {new} graph(s) were compiled again; TORCH_LOGS=recompiles says why"
            )


def compiled_graphs() -> int:
    """Return how many graphs this process has compiled so far."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def _wait_inside_autograd(_module: nn.Module, _args: object, output: Tensor) -> Tensor:
    """Turn an asynchronous result into a plain tensor, by an operator that autograd records.

    A compiled block would unwrap it without autograd: under FSDP the gradient of a tensor-parallel embedding is then
    zero without an error, and without FSDP the first backward fails (pytorch issue 179849).
    """
    return output * 1


def check_compiler(options: CompileOptions, device: torch.device) -> None:
    """Check that this machine can compile, before anything is built.

    Args:
        options: Compilation of the job.
        device: The device of this rank.

    Raises:
        ConfigError: There is no C++ compiler, or this PyTorch cannot compile domain tensors. With asynchronous tensor
            parallelism: this PyTorch computes it wrong, or GPUs cannot share memory.
    """
    if options.overlaps_tensor_parallel:
        _check_async(device)
    if options.fixed_shapes and options.model and torch.__version__ < (2, 13):
        raise ConfigError(
            "compile.enable of a model on domain tensors needs PyTorch 2.13 or newer, and this is "
            f"{torch.__version__}, whose compiler cannot follow its operators; leave it out"
        )
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
