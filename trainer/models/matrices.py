"""Which parameters of a model are matrices for Muon, and the rows of each matrix in a parameter that holds several.

It is decided by the kind of the module that owns a parameter, never by its number of dimensions: a router, an embedding
or the taps of a convolution have two and more, and are no maps between features. A kind of module, also of a package,
says it with `muon_matrices`, a tuple of the names of its own parameters. What is known here:

    nn.Linear                   one matrix, but for the output, and those that `LinearArgs.gates` names
    Experts                     gate, up and down projection of each expert
    attention with gates        queries and gates apart; with `per_head`, the rows of each head
    Gated DeltaNet              queries, keys, values and gates apart, of all heads
    latent attention            what makes keys and what makes values of latents apart
"""

from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from longshard.sharding.ranges import Range, Ranges
from trainer.config.errors import ConfigError
from trainer.models.experts import Experts
from trainer.models.linear_attention import LinearAttention

_NO_MATRICES = (nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def matrices_of(
    model_parts: Iterable[nn.Module], *, per_head: bool = False
) -> dict[nn.Parameter, tuple[Ranges, ...]]:
    """Return the trained parameters that Muon updates, each with the rows of its matrices.

    Rows are those of the parameter with all dimensions but the last made one; each row belongs to one matrix.

    Raises:
        ConfigError: a kind of module that does not say whether its parameter of two and more dimensions is a matrix, or
            two that share one and say different things.
    """
    found: dict[nn.Parameter, tuple[Ranges, ...]] = {}
    others: dict[nn.Parameter, str] = {}
    gates: set[nn.Parameter] = set()
    for part in model_parts:
        output = getattr(part, "output", None)
        several = {}
        for module in part.modules():
            several |= _rows_within(module, per_head)
            if isinstance(module, LinearAttention):
                gates |= {getattr(module, gate).weight for gate in module.args.gates}
        for name, module in part.named_modules():
            names = () if module is output else _names(module)
            for own_name, parameter in module.named_parameters(recurse=False):
                if not parameter.requires_grad or parameter.ndim < 2 or parameter in gates:
                    continue
                if names is None:
                    raise ConfigError(_unknown(f"{name}.{own_name}", module))
                if own_name in names:
                    found[parameter] = several.get(parameter) or _whole(parameter)
                else:
                    others[parameter] = f"{name}.{own_name}"
    if twice := [name for parameter, name in others.items() if parameter in found]:
        raise ConfigError(
            f"optimizer.name = 'Muon': {twice[0]} is a matrix in one module and none in another that shares it; give "
            "both the same muon_matrices"
        )
    return found


def _names(module: nn.Module) -> Sequence[str] | None:
    """Return which of its own parameters a module says are matrices; None if it says nothing."""
    declared = getattr(module, "muon_matrices", None)
    if declared is not None:
        return declared
    if isinstance(module, _NO_MATRICES):
        return ()
    if isinstance(module, nn.Linear):
        return ("weight",)
    return (
        ()
        if all(parameter.ndim < 2 for parameter in module.parameters(recurse=False))
        else None
    )


def _unknown(name: str, module: nn.Module) -> str:
    kind = type(module).__name__
    return (
        f"optimizer.name = 'Muon' does not know whether {name}, of a module {kind}, is a matrix; give {kind} an "
        f"attribute muon_matrices = ({name.rpartition('.')[2]!r},), or () if AdamW is to update it"
    )


def _whole(parameter: nn.Parameter) -> tuple[Ranges, ...]:
    """Return one matrix, or with leading dimensions one for each of their places."""
    rows = parameter.shape[-2]
    return tuple(
        ((start, start + rows),) for start in range(0, parameter.shape[:-1].numel(), rows)
    )


def _rows_within(
    module: nn.Module, per_head: bool
) -> Mapping[nn.Parameter, tuple[Ranges, ...]]:
    """Return the matrices of parameters below `module` that hold several."""
    if isinstance(module, Experts):
        hidden = module.w13.shape[1] // 2
        return {
            module.w13: tuple(
                ((start, start + hidden),)
                for start in range(0, hidden * 2 * len(module.w13), hidden)
            )
        }
    heads = getattr(module, "rows_of_heads", dict)()
    return {
        module.get_parameter(name): _by_heads(
            module.get_parameter(name).shape[0], sizes, per_head
        )
        for name, sizes in heads.items()
    }


def _by_heads(rows: int, sizes: Sequence[int], per_head: bool) -> tuple[Ranges, ...]:
    """Return the rows of each kind, of which every head has sizes[kind], one after another.

    per_head: those of each head are a matrix, not those of all heads together.
    """
    kinds: list[list[Range]] = [[] for _ in sizes]
    start = 0
    while start < rows:
        for kind, size in zip(kinds, sizes, strict=True):
            kind.append((start, start + size))
            start += size
    if per_head:
        return tuple((part,) for kind in kinds for part in kind)
    return (((0, rows),),) if len(kinds) == 1 else tuple(map(tuple, kinds))
