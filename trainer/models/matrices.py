"""Decides which parameters of a model are matrices for Muon, and which rows of a parameter belong to each matrix.

The kind of the module that owns a parameter decides, never its number of dimensions. The parameters of a router, an
embedding or a convolution have two or more dimensions, but do not map features to features. Any kind of module, also
of a package, can declare `muon_matrices`, a tuple of the names of its own parameters. The kinds known here:

    nn.Linear                   one matrix, except the output, and those that `LinearArgs.gates` names
    Experts                     gate, up and down projection of each expert
    attention with gates        queries and gates apart; with `per_head`, the rows of each head
    Gated DeltaNet              queries, keys, values and gates apart, of all heads
    latent attention            the rows of keys and the rows of values apart
"""

from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from longshard.sharding.ranges import Ranges
from trainer.config.errors import ConfigError
from trainer.models.experts import Experts
from trainer.models.linear_attention import LinearAttention

_NO_MATRICES = (nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def matrices_of(
    model_parts: Iterable[nn.Module], *, per_head: bool = False
) -> dict[nn.Parameter, tuple[Ranges, ...]]:
    """Return the trained parameters that Muon updates, each with the rows of its matrices.

    A parameter is seen as 2-D: all dimensions except the last are flattened to rows. Each row belongs to one matrix.
    The rows of a matrix are ranges (start, end) of the whole parameter, without `end`.

    Args:
        model_parts: The model parts of this rank.
        per_head: Whether each head has its own matrices.

    Raises:
        ConfigError: A module does not declare whether its parameter of two or more dimensions is a matrix, or two
            modules share a parameter and disagree.
    """
    matrices = {}
    others = {}
    gates = set()
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
                    kind = type(module).__name__
                    raise ConfigError(
                        f"optimizer.name = 'Muon' does not know whether {name}.{own_name}, of a "
                        f"module {kind}, is a matrix; give {kind} an attribute muon_matrices = "
                        f"({own_name!r},), or () if AdamW is to update it"
                    )
                if own_name in names:
                    # with leading dimensions, one matrix for each of their indices
                    each = _by_heads(parameter, [parameter.shape[-2]], per_head=True)
                    matrices[parameter] = several.get(parameter, each)
                else:
                    others[parameter] = f"{name}.{own_name}"
    if twice := [name for parameter, name in others.items() if parameter in matrices]:
        raise ConfigError(
            f"optimizer.name = 'Muon': {twice[0]} is a matrix in one module and none in another that shares it; give "
            "both the same muon_matrices"
        )
    return matrices


def _names(module: nn.Module) -> Sequence[str] | None:
    """Return the names of the module's own parameters that are matrices. None if the module does not declare them."""
    usual = None
    if isinstance(module, _NO_MATRICES):
        usual = ()
    elif isinstance(module, nn.Linear):
        usual = ("weight",)
    return getattr(module, "muon_matrices", usual)


def _rows_within(
    module: nn.Module, per_head: bool
) -> Mapping[nn.Parameter, tuple[Ranges, ...]]:
    """Return the rows of each matrix for the parameters of `module` that join several matrices, by parameter.

    These are `w13` of experts, and the parameters that a module's method `rows_of_heads` names. Empty for other
    modules.
    """
    if isinstance(module, Experts):
        hidden = module.w13.shape[1] // 2
        return {module.w13: _by_heads(module.w13, [hidden], per_head=True)}
    rows = {}
    for name, sizes in getattr(module, "rows_of_heads", dict)().items():
        parameter = module.get_parameter(name)
        rows[parameter] = _by_heads(parameter, sizes, per_head=per_head)
    return rows


def _by_heads(
    parameter: nn.Parameter, sizes: Sequence[int], *, per_head: bool
) -> tuple[Ranges, ...]:
    """Return the rows of each matrix, kind after kind, of a parameter whose rows are ordered by head.

    Args:
        parameter: Its dimensions except the last are flattened to rows.
        sizes: For each kind of matrix, the number of rows of one head.
        per_head: If True, one head's rows of a kind are a matrix. If False, all heads' rows of a kind are one matrix.
    """
    kinds = [[] for _ in sizes]
    rows = parameter.shape[:-1].numel()
    start = 0
    while start < rows:
        for kind, size in zip(kinds, sizes, strict=True):
            kind.append((start, start + size))
            start += size
    if per_head:
        return tuple((part,) for kind in kinds for part in kind)
    return (((0, rows),),) if len(kinds) == 1 else tuple(map(tuple, kinds))
