"""Full backward hooks of modules that take or return domain tensors.

For each call of a module with these hooks torch makes a `BackwardHook`, which looks for arguments of the class
`torch.Tensor`. This module replaces it by a class that passes the shards to torch's own, and calls hooks with the
gradients as domain tensors. Calls without domain tensors, and compiled code, work as before.

State of the process: The class by which torch sets up backward hooks of modules takes domain tensors; for ever.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.modules import module as torch_modules
from torch.utils.hooks import BackwardHook

from longshard.domain.dispatch import DomainTensor
from longshard.domain.domain import Domain
from longshard.domain.elementwise import own_part


class _DomainBackwardHook(BackwardHook):
    """The hooks of one call of a module; `domains` has the domains of its inputs and outputs, None for other values."""

    def __init__(
        self,
        module: torch.nn.Module,
        user_hooks: Sequence[Callable],
        user_pre_hooks: Sequence[Callable],
    ):
        self.domains = {}
        hooks = [self._on_shards(hook, "inputs", "outputs") for hook in user_hooks]
        super().__init__(
            module, hooks, [self._on_shards(hook, "outputs") for hook in user_pre_hooks]
        )

    def _on_shards(self, hook: Callable, *names: str) -> Callable:
        """Return a hook of shards that calls `hook`, a hook of domain tensors.

        names: "inputs", "outputs" or both, in this order: the values whose gradients `hook` gets.
        """

        def called(module: torch.nn.Module, *gradients: tuple) -> Any:
            gradients_of_hook = [
                tuple(map(_whole, g, self.domains[name]))
                for g, name in zip(gradients, names, strict=True)
            ]
            changed = hook(module, *gradients_of_hook)
            if not isinstance(changed, tuple) or len(changed) != len(gradients_of_hook[0]):
                return changed  # torch reports the error
            return tuple(
                own_part(new, g.domain, g.shape)
                if isinstance(g, DomainTensor) and new is not None
                else new
                for new, g in zip(changed, gradients_of_hook[0], strict=True)
            )

        return called

    def setup_input_hook(self, args: tuple) -> tuple:
        return self._with_shards(super().setup_input_hook, "inputs", args)

    def setup_output_hook(self, args: Any) -> Any:
        outputs = args if isinstance(args, tuple) else (args,)
        results = self._with_shards(super().setup_output_hook, "outputs", outputs)
        return results if outputs is args else results[0]

    def _with_shards(self, set_up: Callable, name: str, args: tuple) -> tuple:
        self.domains[name] = [x.domain if isinstance(x, DomainTensor) else None for x in args]
        shards = set_up(
            _like(args, [x.local if isinstance(x, DomainTensor) else x for x in args])
        )
        return _like(args, [_linked(x, shard) for x, shard in zip(args, shards, strict=True)])


def _whole(gradient: torch.Tensor | None, domain: Domain | None) -> Any:
    return gradient if gradient is None or domain is None else DomainTensor(gradient, domain)


def _linked(x: Any, shard: Any) -> Any:
    """Return x with the shard through which its gradient reaches the hooks."""
    if not isinstance(x, DomainTensor):
        return shard
    return x if shard is x.local else DomainTensor(shard, x.domain, x.base)


def _like(args: tuple, values: list) -> tuple:
    return tuple(values) if type(args) is tuple else type(args)(*values)


def _backward_hook(*args: Any) -> BackwardHook:
    return (BackwardHook if torch.compiler.is_compiling() else _DomainBackwardHook)(*args)


torch_modules.BackwardHook = _backward_hook
# The hooks are called, although torch warns that they are not.
warnings.filterwarnings("ignore", r"For backward hooks to be called.*DomainTensor")
