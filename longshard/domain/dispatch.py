"""Sharded tensors that model code uses like whole ones.

A `DomainTensor` is a local shard with its `Domain`. Its `shape` is the global one. A function of torch that is called
on it computes the whole tensor's result, shard by shard, by the operators of this package. So the code of a model stays
as it is. There is no fallback: a function without a rule for sharded axes raises `DomainOperatorError`, which names it.
A tensor that is sharded nowhere is the same on every rank, and every function works on it.

    x = DomainTensor(local, Domain.on(mesh, {2: ("h", sized([5, 4]))}))    # x.shape: (2, 16, 9, 12)
    y = torch.cat([x, F.silu(norm(conv(x)))], 1)                           # y.shape: (2, 32, 9, 12), still sharded

Plain tensors among the arguments, such as weights, are whole on every rank. All gradients of whole tensors are partial:
the ranks' gradients add up. So a loss that every rank computes from a whole tensor counts once for each rank. The mean
over the ranks is the gradient of one process (gradients.py).

State of the process: The rules of functions of torch, and the class registered with PyTorch's pytrees; for ever.
"""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from longshard.domain import whole
from longshard.domain.domain import WHOLE, Domain
from longshard.domain.whole import flat

Rule = Callable[..., Any]
"""(the function of torch, its arguments) -> result, with sharded arguments."""


@dataclass(frozen=True)
class Registered:
    """A rule and its options.

    Attributes:
        function: The rule.
        by_element: See `rule`.
        draws: See `rule`.
    """

    function: Rule
    by_element: bool
    draws: bool


_RULES: dict[str, Registered] = {}


class DomainOperatorError(TypeError):
    """A function of torch was called along a sharded axis, and there is no rule for it."""


class Unhandled(DomainOperatorError):
    """Why a rule does not handle a call; `call` says which call it was."""


def rule(
    *names: str, first_only: bool = False, by_element: bool = False, draws: bool = False
) -> Callable[[Rule], Rule]:
    """Return a decorator that registers a rule for functions and methods of torch.

    It replaces an earlier rule of the same name. The rule is called as rule(function, *args, **kwargs) with at least
    one sharded `DomainTensor` among its arguments. Before, torch's own function runs on tensors of the global shapes
    without data. If the rule's result has another shape than torch's, `call` raises DomainOperatorError. If torch's
    result is a view, the rule's result must not be changed in place.

    Args:
        *names: Names of the functions and methods.
        first_only: Whether only the first argument may be sharded; the rule gets other tensors as plain ones.
        by_element: Whether a result shares memory with an argument on all ranks or on none. Then torch's function does
            not run before, and results are not checked.
        draws: Whether it draws random numbers; the rule is also called for domain tensors that are whole.
    """

    def register(function: Rule) -> Rule:
        def checked(called: Callable, x: Any, *args: Any, **kwargs: Any) -> Any:
            for other in filter(is_sharded, flat((args, kwargs))):
                raise refused(called.__name__, other, "only its first argument may be sharded")
            return function(called, x, *unwrapped(args), **unwrapped(kwargs))

        registered = Registered(checked if first_only else function, by_element, draws)
        _RULES.update(dict.fromkeys(names, registered))
        return function

    return register


@dataclass(eq=False, repr=False)  # FSDP looks for tensors in the fields of dataclasses
class DomainTensor:
    """This rank's shard of a tensor; axes of one rank count as whole.

    Args:
        local: The shard, any shape.
        domain: Which dimensions are sharded, and how.
        base: Set by `call` if torch returns a view of another tensor; the tensor must not be changed in place.

    Raises:
        ValueError: The shard does not fit the domain.
        DomainOperatorError: The tensor is made inside an autograd.Function, such as reentrant checkpointing.
    """

    local: Tensor
    domain: Domain
    base: whole.Base | None = None
    __iter__: ClassVar[None] = None  # otherwise Python iterates by __getitem__
    # Otherwise a number of numpy on the left treats this as an array.
    __array_ufunc__: ClassVar[None] = None

    def __post_init__(self) -> None:
        if _in_autograd_function():
            raise DomainOperatorError(
                "a DomainTensor is used inside an autograd.Function, which sees no tensor in it and would lose its "
                "gradients; pass use_reentrant=False to torch.utils.checkpoint.checkpoint (Hugging Face: "
                'gradient_checkpointing_kwargs={"use_reentrant": False}), and give Functions of your own the shard '
                "`x.local`"
            )
        self.shape = torch.Size(self.domain.shape(self.local))
        if any(axis.degree == 1 for axis in self.domain.axes.values()):
            self.domain = Domain(
                {dim: axis for dim, axis in self.domain.axes.items() if axis.degree > 1}
            )

    @classmethod
    def __torch_function__(
        cls, function: Callable, types: object, args: tuple = (), kwargs: Mapping | None = None
    ):
        return call(function, *args, **(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        if name in _LOCAL_ATTRIBUTES.split():
            return getattr(self.local, name)
        method = getattr(Tensor, name, None)
        if name.startswith("__") or not callable(method):
            raise AttributeError(
                f"a DomainTensor has no attribute {name!r}; its shard is the attribute `local`"
            )
        return partial(call, method, self)

    def __repr__(self) -> str:
        axes = {dim: axis.layout.ranges for dim, axis in self.domain.axes.items()}
        return f"DomainTensor(shape={tuple(self.shape)}, local={tuple(self.local.shape)}, sharded={axes})"

    def size(self, dim: int | None = None) -> Any:
        """Return the global shape, or the global size of a dimension.

        Args:
            dim: The dimension; None for the shape.
        """
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        """Return the number of elements of the whole tensor."""
        return self.shape.numel()

    def dim(self) -> int:
        """Return the number of dimensions."""
        return len(self.shape)

    @property
    def real(self) -> "DomainTensor":
        """The real parts."""
        return call(torch.real, self)

    @property
    def imag(self) -> "DomainTensor":
        """The imaginary parts."""
        return call(torch.imag, self)

    @property
    def mT(self) -> "DomainTensor":
        """The tensor with its last two dimensions transposed."""
        return self.transpose(-2, -1)

    @property
    def T(self) -> "DomainTensor":
        """The tensor with its dimensions in reverse order."""
        return self.permute(*range(self.ndim - 1, -1, -1))

    def requires_grad_(self, requires_grad: bool = True) -> "DomainTensor":
        """Return this tensor, after setting whether it requires gradients.

        Args:
            requires_grad: Whether it does.
        """
        self.local.requires_grad_(requires_grad)
        return self

    def register_hook(self, hook: Callable[["DomainTensor"], Any]) -> Any:
        """Return the handle of a hook on the gradient, as torch does.

        Args:
            hook: Gets the gradient, a domain tensor of the same shape, and may return another one.
        """
        return self.local.register_hook(lambda g: unwrapped(hook(DomainTensor(g, self.domain))))

    def __len__(self) -> int:
        return self.shape[0]

    def __copy__(self) -> "DomainTensor":
        return DomainTensor(self.local, self.domain, self.base)

    def __deepcopy__(self, memo: dict) -> "DomainTensor":
        return DomainTensor(deepcopy(self.local, memo), self.domain)

    def __reduce_ex__(self, protocol: object) -> Any:
        raise TypeError(
            "a DomainTensor cannot be pickled or saved, because its domain holds process groups; save the shard "
            "`x.local` on each rank, or the whole tensor: `gather(x).local`"
        )


AnyTensor = DomainTensor | Tensor

# Attributes that the shard and the whole tensor have in common.
_LOCAL_ATTRIBUTES = """
ndim dtype device requires_grad is_cuda is_cpu is_meta is_nested is_floating_point is_complex
"""
_OPERATORS = """
add sub mul truediv floordiv mod pow matmul and or xor radd rsub rmul rtruediv rfloordiv rmod rpow rmatmul
iadd isub imul itruediv ifloordiv imod ipow iand ior ixor neg abs invert eq ne lt le gt ge getitem setitem bool float
int array
"""
for _name in _OPERATORS.split():
    _method = getattr(Tensor, f"__{_name}__")
    setattr(
        DomainTensor,
        f"__{_name}__",
        lambda self, *args, _method=_method: call(_method, self, *args),
    )
DomainTensor.__hash__ = object.__hash__  # __eq__ compares elements

# Activation checkpointing and compilers find the shard in the arguments of a module, and so does FSDP of torch 2.11.
pytree.register_pytree_node(
    DomainTensor,
    lambda x: ([x.local], (x.domain, x.base)),
    lambda leaves, context: (
        DomainTensor(*leaves, *context) if isinstance(leaves[0], Tensor) else leaves[0]
    ),
    serialized_type_name="longshard.domain.DomainTensor",
)


def _in_autograd_function() -> bool:
    """Return whether the forward of an autograd.Function runs: only it switches off both modes of gradients."""
    return not (
        torch.compiler.is_compiling()
        or torch.is_grad_enabled()
        or torch._C._is_fwd_grad_enabled()
        or torch.is_inference_mode_enabled()
    )


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Return nested arguments with a function applied to each tensor, and to the shard of each domain tensor.

    Args:
        function: Takes and returns a tensor of any shape.
        tree: The arguments.
    """
    return pytree.tree_map_only(Tensor, function, tree)


def is_sharded(x: object) -> bool:
    """Return whether a value is a tensor, and this rank has only a part of it.

    Args:
        x: The value.
    """
    return isinstance(x, DomainTensor) and bool(x.domain.axes)


def call(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """Return the result of a function of torch with domain tensors, and perhaps tensor-parallel weights, as arguments.

    Args:
        function: The function.
        *args: Its positional arguments.
        **kwargs: Its keyword arguments.

    Raises:
        DomainOperatorError: A tensor is sharded, and the function has no rule, or gets `out`. Or an argument may be a
            copy where torch would have a view, and the tensor that it would view has been changed in place since.
    """
    leaves = [*flat((args, kwargs))]
    tensors = [x for x in leaves if isinstance(x, DomainTensor)]
    is_parallel = any(isinstance(x, DTensor) for x in leaves)
    x = next(filter(is_sharded, tensors), tensors[0])
    name = function.__name__
    registered = _RULES.get(name)
    if not (is_sharded(x) or is_parallel or (registered is not None and registered.draws)):
        return wrapped(function(*unwrapped(args), **unwrapped(kwargs)))
    if registered is None or kwargs.pop("out", None) is not None:
        raise refused(
            name,
            x,
            "it has no rule for sharded axes" if registered is None else "the argument `out`",
        )
    for other in () if torch.compiler.is_compiling() else tensors:
        if other.base and other.base.has_changed():
            raise refused(name, other, f"{VIEW}, and that tensor was changed in place since")
    if "axis" in kwargs:  # torch accepts both names of the first two arguments
        kwargs["dim"] = kwargs.pop("axis")
    args = (kwargs.pop("input"), *args) if "input" in kwargs else args
    is_simple = registered.by_element and (name == "clone" or "memory_format" not in kwargs)
    seen = None
    if not (is_simple or is_parallel):
        seen = whole.results(function, args, kwargs, (Tensor, DomainTensor))
    try:
        result = registered.function(function, *args, **kwargs)
    except Unhandled as why:
        raise refused(name, x, str(why)) from None
    if seen is not None:
        # The order of memory is not kept.
        has_format = any(isinstance(leaf, torch.memory_format) for leaf in leaves)
        _check_and_mark(name, result, seen, tensors, has_format or name == "contiguous")
    return result


VIEW = "it may be a copy where torch has a view of another tensor"


def _check_and_mark(
    name: str,
    result: Any,
    seen: tuple[whole.Seen, ...],
    inputs: list[DomainTensor],
    may_be_view: bool,
) -> None:
    """Mark results that may be views. If a result's shape is not torch's, raise DomainOperatorError."""
    outputs = [x for x in flat(result) if isinstance(x, DomainTensor)]
    if len(outputs) != len(seen):  # a rule of the user's own
        return
    for x, (shape, is_view) in zip(outputs, seen, strict=True):
        if any(x is other for other in inputs):
            continue
        if tuple(x.shape) != shape:
            raise DomainOperatorError(
                f"the rule of {name} returned the shape {tuple(x.shape)}, torch returns {shape}"
            )
        if is_view or may_be_view:
            x.base = inputs[0].base or whole.Base.of(inputs[0].local)


def refused(name: str, x: DomainTensor, why: str) -> DomainOperatorError:
    """Return the error of a call that is not handled.

    Args:
        name: The name of the function.
        x: A sharded tensor among its arguments, any shape.
        why: The reason.
    """
    dims = ", ".join(map(str, x.domain.axes))
    return DomainOperatorError(
        f"{name.removeprefix('__').removesuffix('__')} of a tensor of shape {tuple(x.shape)}, sharded in dimension "
        f"{dims}, is not handled: {why}; "
        "call it on `gather`ed tensors, or give it a rule with `longshard.domain.rule`"
    )


def refuse_unless(condition: bool, why: str) -> None:
    """Raise the reason why a rule does not handle its call, unless a condition holds.

    Args:
        condition: The condition.
        why: The reason.

    Raises:
        Unhandled: The condition does not hold.
    """
    if not condition:
        raise Unhandled(why)


def wrapped(result: Any, domain: Domain = WHOLE) -> Any:
    """Return a function's result with its plain tensors as domain tensors.

    Args:
        result: The result.
        domain: The domain of the tensors.
    """
    return whole.mapped(
        lambda x: DomainTensor(x, domain) if isinstance(x, Tensor) else x, result
    )


def unwrapped(value: Any) -> Any:
    """Return arguments with the shards of domain tensors.

    Args:
        value: The arguments.
    """
    return whole.mapped(lambda x: x.local if isinstance(x, DomainTensor) else x, value)
