"""Prepare models for sharded tensors: some modules get another class, and the ranks check the model first.

    x = DomainTensor(local, domain)
    y = parallelize(model, x)      # the forward runs once without data
    y = model(x)                   # names of parameters, hooks and code of the model are as before

Most modules need nothing, because a `DomainTensor` has rules for the functions that they call. For a convolution with
circular padding torch pads in a step of its own, which gives the first and the last rank more rows. Its class changes:
it fetches the rows of the other end as a halo, so that the layout stays. Before the first step the ranks compare their
layouts, shapes, types, and states of random numbers.
"""

import hashlib
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.nn.modules import module as torch_modules
from torch.utils._python_dispatch import TorchDispatchMode

from longshard.domain.dispatch import (
    DomainOperatorError,
    Unhandled,
    is_sharded,
    map_tensors,
    refused,
)
from longshard.domain.neighborhood import neighborhood_attention
from longshard.domain.tensor import DomainTensor
from longshard.domain.whole import flat
from longshard.domain.windows import conv
from longshard.sharding.exchange import all_gather, has_peers


class _CircularConv:
    """The new class of a convolution with circular padding: on a sharded tensor the padding is a halo."""

    def forward(self, x: torch.Tensor | DomainTensor) -> Any:
        if not is_sharded(x):
            return super().forward(x)
        function = getattr(F, f"conv{self.weight.ndim - 2}d")
        options = (self.stride, self.padding, self.dilation, self.groups)
        try:
            return conv(function, x, self.weight, self.bias, *options, periodic=True)
        except Unhandled as why:
            raise refused(function.__name__, x, str(why)) from None


_CIRCULAR = {
    cls: type(f"Domain{cls.__name__}", (_CircularConv, cls), {})
    for cls in (nn.Conv1d, nn.Conv2d, nn.Conv3d)
}


class NeighborhoodAttention(nn.Module):
    """Neighbourhood attention of whole and sharded tensors.

    Args:
        kernel_size: See `neighborhood_attention`.
        dilation: See `neighborhood_attention`.
        stride: See `neighborhood_attention`.
        is_causal: See `neighborhood_attention`.
    """

    def __init__(
        self,
        kernel_size: int | Sequence[int],
        *,
        dilation: int | Sequence[int] = 1,
        stride: int | Sequence[int] = 1,
        is_causal: bool | Sequence[bool] = False,
    ) -> None:
        super().__init__()
        self.options = {
            "kernel_size": kernel_size,
            "dilation": dilation,
            "stride": stride,
            "is_causal": is_causal,
        }

    def forward(self, q: Any, k: Any, v: Any) -> Any:
        """Return the attention, (B, *spatial, H, D).

        Args:
            q: (B, *spatial, H, D).
            k: (B, *spatial, K, D).
            v: (B, *spatial, K, D).
        """
        return neighborhood_attention(q, k, v, **self.options)


def parallelize(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Prepare a model for sharded inputs, in place. Return its output for them, without values, on the meta device.

    A collective: all ranks must describe their inputs alike, which is compared by a hash.

    Args:
        model: The model.
        *args: Positional arguments of its forward; only shapes and domains count.
        **kwargs: Keyword arguments of its forward.

    Returns:
        The output.

    Raises:
        DomainOperatorError: The forward calls a function that is not handled, or checkpoints in the reentrant way; the
            message names the module. Also raised if a module with a hook of `register_backward_hook` gets a sharded
            tensor.
        ValueError: Layouts, shapes or types differ between ranks.
    """
    tensors = [x for x in flat((args, kwargs)) if isinstance(x, DomainTensor)]
    check_layouts(tensors)
    for module in model.modules():
        if type(module) in _CIRCULAR and module.padding_mode == "circular":
            module.__class__ = _CIRCULAR[type(module)]  # parameters, buffers and hooks stay
    with same_draws(tensors):
        return dry_run(model, *args, **kwargs)


def dry_run(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Return the output of the forward on the meta device: nothing is computed or sent. The model does not change.

    Args:
        model: The model.
        *args: Positional arguments of its forward.
        **kwargs: Keyword arguments of its forward.

    Raises:
        DomainOperatorError: As for `parallelize`.
    """
    everything = dict([*model.named_parameters(), *model.named_buffers()])
    args, kwargs, state = map_tensors(lambda x: x.to("meta"), (args, kwargs, everything))
    with torch.no_grad(), torch.device("meta"), _names_in_errors(model):
        return functional_call(model, state, args, kwargs)


@contextmanager
def _names_in_errors(model: nn.Module) -> Iterator[None]:
    """Add the name of the innermost running module to an error that is raised inside.

    An error that the forward reads a value becomes a DomainOperatorError. A module that gets a sharded tensor is
    checked by `_check_old_hooks`.
    """
    running = []

    def entered(module: nn.Module, args: tuple, kwargs: dict, name: str) -> None:
        running.append(name)
        if any(isinstance(x, DomainTensor) for x in flat((args, kwargs))):
            _check_old_hooks(module)

    def left(*_: object) -> None:
        running.pop()

    try:
        with ExitStack() as hooks:
            for name, module in model.named_modules():
                enter = partial(entered, name=name)
                hooks.enter_context(module.register_forward_pre_hook(enter, with_kwargs=True))
                hooks.enter_context(module.register_forward_hook(left))
            yield
    except (TypeError, ValueError, RuntimeError) as error:
        if "meta tensor" in str(error):
            where = f"module {running[-1]}: " if running and running[-1] else ""
            raise DomainOperatorError(
                f"{where}the forward reads the value of a tensor ({error}), which a check without data does not have; "
                "run the model without `parallelize`: a call that is not handled is then refused"
            ) from None
        if running and running[-1]:
            error.args = (f"module {running[-1]}: {error}", *error.args[1:])
        raise


def _check_old_hooks(module: nn.Module) -> None:
    """Raise DomainOperatorError if a module has a hook of `register_backward_hook`, which would not run."""
    is_global = (
        torch_modules._global_backward_hooks and not torch_modules._global_is_full_backward_hook
    )
    if is_global or (module._backward_hooks and not module._is_full_backward_hook):
        raise DomainOperatorError(
            "a hook of `register_backward_hook` of a module that gets a sharded tensor would not run; use "
            "`register_full_backward_hook`"
        )


# ---- Comparison of the ranks


def check_layouts(tensors: Iterable[DomainTensor]) -> None:
    """Compare the ranks' descriptions of the whole tensors: one all-gather of a hash for each sharded axis.

    Args:
        tensors: The tensors, of any shape.

    Raises:
        ValueError: On every rank, if layouts, global shapes or types differ.
    """
    said = [
        (
            tuple(x.shape),
            str(x.dtype),
            {dim: axis.layout.ranges for dim, axis in x.domain.axes.items()},
        )
        for x in tensors
    ]
    if not _are_equal(repr(said).encode(), tensors):
        raise ValueError(
            f"the ranks of the domain describe their tensors differently; this rank has (shape, dtype, rows of each "
            f"rank): {said}; give every rank the same whole shape, dtype and rows, such as `sized([5, 4])`"
        )


@contextmanager
def same_draws(tensors: Iterable[DomainTensor]) -> Iterator[None]:
    """Warn if functions that run inside draw random numbers, and the ranks have different random states.

    If random numbers were drawn, the end is a collective.

    Args:
        tensors: The sharded tensors, of any shape.

    Yields:
        Nothing.
    """
    with _Draws() as draws:
        yield
    if draws.names:
        states = [torch.get_rng_state()]  # sharded tensors draw by it on GPUs, too
        if any(x.is_cuda for x in tensors):
            states.append(torch.cuda.get_rng_state())
        if not _are_equal(torch.cat(states).numpy().tobytes(), tensors):
            warnings.warn(
                f"the model draws random numbers ({', '.join(sorted(draws.names))}) and the ranks of the domain have "
                "different random states, so whole tensors would differ between ranks. Call torch.manual_seed with the "
                "same seed on every rank",
                stacklevel=3,
            )


class _Draws(TorchDispatchMode):
    """Note the functions that draw random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def _are_equal(said: bytes, tensors: Iterable[DomainTensor]) -> bool:
    """Return whether all ranks of the domains pass the same bytes; if not, every rank gets False. A collective."""
    number = int.from_bytes(hashlib.sha256(said).digest()[:7]) + 1
    groups = {id(axis.group): axis.group for x in tensors for axis in x.domain.axes.values()}
    for group in filter(has_peers, groups.values()):
        is_gloo = "gloo" in dist.get_backend(group)
        device = "cpu" if is_gloo else torch.accelerator.current_accelerator()
        numbers = all_gather(torch.tensor([number], device=device), group)
        if numbers.unique().numel() > 1:
            number = 0  # the ranks along the next axis see it, too
    return number > 0
