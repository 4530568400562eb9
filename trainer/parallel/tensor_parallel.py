"""Tensor parallelism with sequence parallelism for decoder blocks, and the loss over a sharded vocabulary.

Between blocks each tp rank holds a part of the sequence, (B, S / tp, dim). Inside attention and feed-forward it holds
the whole sequence and a part of the heads or of the hidden dimension (Korthikanti et al., arXiv 2205.05198).
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

Styles = dict[str, ParallelStyle]
"""How tensor-parallel ranks divide modules, by their names; "" is the module itself."""


def prefixed(name: str, styles: Styles) -> Styles:
    """Return the styles of a module's parts by their names in the module's owner.

    Args:
        name: Name of the module in its owner.
        styles: Styles of the parts.
    """
    return {f"{name}.{part}" if part else name: style for part, style in styles.items()}


def tokens_divided(modules: Iterable[str]) -> Styles:
    """Return styles of modules that each rank has whole, and applies to its own tokens, (B, S / tp, dim).

    Args:
        modules: Names of the modules.
    """
    return {name: SequenceParallel(use_local_output=True) for name in modules}


def sequence_gathered(*matrices: str) -> Styles:
    """Return styles of a module, of its first matrices and of `wo`.

    The module takes (B, S / tp, dim) and two more inputs, and gathers the whole sequence. The first matrices give
    channels of this rank's heads. `wo` sums over all ranks' heads, and each rank gets its own tokens, (B, S / tp, dim).

    Args:
        *matrices: Names of the first matrices.
    """
    whole = PrepareModuleInput(
        input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
    )
    styles = {"": whole, "wo": RowwiseParallel(output_layouts=Shard(1))}
    return styles | {name: ColwiseParallel() for name in matrices}


def shard_rows(_name: str, part: nn.Module, mesh: DeviceMesh) -> None:
    """Shard the first dimension of a module's own parameters, as `distribute_module` calls it.

    Each rank keeps a part of its own whole parameter, so no collective is needed.

    Args:
        _name: Not used.
        part: The module; its parameters are replaced by DTensors.
        mesh: The 1-D mesh.
    """
    for name, parameter in list(part.named_parameters(recurse=False)):
        shard = distribute_tensor(parameter, mesh, [Shard(0)], src_data_rank=None)
        part.register_parameter(
            name, nn.Parameter(shard, requires_grad=parameter.requires_grad)
        )


class OwnPositions(ParallelStyle):
    """Style for a module called with (B, S / tp, dim) and positions (B, S) or None.

    A rank passes on the positions of its rows.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        rank = device_mesh.get_local_rank()

        def own(_part: nn.Module, inputs: tuple[Tensor, Tensor | None]) -> tuple:
            x, positions = inputs
            rows = x.shape[1]
            return x, None if positions is None else positions.narrow(1, rank * rows, rows)

        module.register_forward_pre_hook(own)
        return module


class Distributed(ParallelStyle):
    """Style of a module that `distribute_module` changes by up to three functions.

    Args:
        partition: Shards the parameters; without it every rank has them whole.
        before: Makes the input a DTensor.
        after: Makes the output, any shape, a plain tensor.
    """

    def __init__(
        self,
        partition: Callable[..., None] | None = None,
        before: Callable[..., DTensor] | None = None,
        after: Callable[..., Tensor] | None = None,
    ) -> None:
        self._functions = partition, before, after

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, *self._functions)


def _own_part(_module: nn.Module, x: DTensor, _mesh: DeviceMesh) -> Tensor:
    return x.to_local()


def _used_in_part(_module: nn.Module, x: DTensor, _mesh: DeviceMesh) -> Tensor:
    """Return x, any shape, as a plain tensor. Each rank uses a part of it, and its gradients are summed over ranks."""
    return x.to_local(grad_placements=[Partial()])


def _channels(_module: nn.Module, inputs: tuple[Tensor, ...], mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(inputs[0], mesh, [Shard(2)], run_check=False)


def _gathered(_module: nn.Module, inputs: tuple[Tensor, ...], mesh: DeviceMesh) -> DTensor:
    """Return (B, S / tp, dim), the input of a module, with the whole sequence."""
    return DTensor.from_local(inputs[0], mesh, [Shard(1)], run_check=False).redistribute(
        mesh, [Replicate()]
    )


LOCAL_PARAMETER = Distributed(shard_rows, after=_own_part)
"""A module whose forward returns its `weight`: each rank gets the rows of its heads."""
REPLICATED = Distributed()
"""A module that every rank has whole; its output is a DTensor."""
LOCAL_COPY = Distributed(after=_used_in_part)
"""A module that every rank has whole; its output is a plain tensor, and each rank uses a part of it."""
GATHERED = Distributed(before=_gathered, after=_used_in_part)
"""An identity of (B, S / tp, dim): each rank gets the whole sequence, and uses it for its own heads."""
SHARDED_NORM = Distributed(shard_rows, _channels, _own_part)
"""A norm over the last dimension of (B, S, dim / tp), which ranks divide.

Inside, the input is a DTensor, so a mean over the dimension is a mean over all ranks.
"""
VOCABULARY_PARALLEL = Distributed(shard_rows, _gathered)
"""The projection to logits from (B, S / tp, dim): each rank has the logits of its part of the vocabulary.

The forward may also return losses instead of logits; `ColwiseParallel` could not return them.
"""


@contextmanager
def preserve_ties(module: nn.Module) -> Iterator[None]:
    """Tie again, at the end, the parameters that modules shared at the start.

    Inside, parameters may be replaced (`parallelize_module`, `to_empty`).

    Args:
        module: The module, changed in place.

    Yields:
        None.
    """
    owners = {}
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            owners.setdefault(parameter, []).append((owner, name))
    yield
    for (first, first_name), *others in owners.values():
        for owner, name in others:
            setattr(owner, name, getattr(first, first_name))


def apply_tensor_parallel(module: nn.Module, mesh: DeviceMesh, styles: Styles) -> None:
    """Apply styles over a mesh; tied parameters stay tied.

    Args:
        module: The module, changed in place.
        mesh: The 1-D mesh.
        styles: Style of each submodule, by its name.
    """
    with preserve_ties(module):
        parallelize_module(module, mesh, styles)


def loss_context(tp_mesh: DeviceMesh, *, disabled: bool) -> AbstractContextManager:
    """Return the context for loss AND backward in which logits stay sharded over the vocabulary.

    Args:
        tp_mesh: The tensor-parallel mesh.
        disabled: `parallelism.disable_loss_parallel`.
    """
    return loss_parallel() if tp_mesh.size() > 1 and not disabled else nullcontext()


def logits_layout(*, disable_loss_parallel: bool) -> Shard | Replicate:
    """Return the placement of the logits: sharded over the vocabulary for the parallel loss, or replicated.

    Args:
        disable_loss_parallel: Replicate the logits.
    """
    return Replicate() if disable_loss_parallel else Shard(-1)
