"""Which layers of a model attended through the context.

A layer that did not, although others did, either mixes no tokens or mixes them where the context does not see it.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import nn
from torch.utils.hooks import RemovableHandle

from trainer.distributed.context_parallel.live import LivePlan
from trainer.distributed.context_parallel.planning.options import ContextParallelError
from trainer.integrations.calls import outside_of_graphs
from trainer.integrations.inspection import is_tokenwise, layer_kinds

_ATTENTION = re.compile(r"(Attention|Attn)\d*$")


@dataclass
class _Stack:
    """The layers of an nn.ModuleList, and which of them attended. kinds: of layers, by the configuration."""

    name: str
    kinds: list[str]
    layers: int
    attended: dict[int, bool] = field(default_factory=dict)

    def refusal(self) -> str | None:
        without = [i for i, x in self.attended.items() if not x and not is_tokenwise(self.kinds, i, self.layers)]
        if not without or not any(self.attended.values()):
            return None
        return (
            f"layers {without} of {self.name} ran no context-parallel attention, and other layers there did; if they "
            "mix no tokens in another way, name their class in `intercept_sdpa(allow_modules=[...])`"
        )


class Coverage:
    """Hooks that count the context's attention calls of each attention module and each layer of a model.

    The context does not see a call from another thread, a function compiled by torch.jit or a C++ library. The module
    of such a call counts none.
    """

    def __init__(self, live: LivePlan, is_in_force: Callable[[], bool]) -> None:
        self._live = live
        self._is_in_force = is_in_force
        self._root: nn.Module | None = None
        self._before: dict[nn.Module, int] = {}
        self._without: list[str] = []
        self._stacks: list[_Stack] = []

    def hook(self, modules: Mapping[str, nn.Module]) -> list[RemovableHandle]:
        """Put hooks on attention modules and layers; return handles that remove them. modules: by dotted name."""
        handles, kinds = [], []
        for name, module in modules.items():
            kinds = layer_kinds(getattr(module, "config", None)) or kinds
            if _ATTENTION.search(type(module).__name__):
                handles += self._around(module, lambda attended, name=name: self._attention_ended(name, attended))
            if isinstance(module, nn.ModuleList):
                stack = _Stack(name, kinds, len(module))
                self._stacks.append(stack)
                for i, layer in enumerate(module):
                    if f"{name}.{i}" in modules:
                        handles += self._around(layer, lambda x, stack=stack, i=i: stack.attended.update({i: x}))
        return handles

    def begin(self, root: nn.Module) -> None:
        """Start counting a forward of the whole model."""
        if self._root in (None, root):
            self._root, self._without = root, []
            self._before[root] = self._live.calls  # a model found by its call gets hooks too late for it

    def end(self, root: nn.Module) -> str | None:
        """Return why a part of the forward escaped the context, or None."""
        if root is not self._root:
            return None
        self._root = None
        refusals = [refusal for stack in self._stacks if (refusal := stack.refusal())]
        for stack in self._stacks:
            stack.attended.clear()
        if self._without:
            return (
                f"{self._without[0]} ran and no context-parallel attention in it: it attends in another way than by "
                "F.scaled_dot_product_attention, or in another thread; make it call that, or name it in "
                "`intercept_sdpa(allow_modules=[...])`"
            )
        return refusals[0] if refusals else None

    def _around(self, module: nn.Module, ended: Callable[[bool], None]) -> list[RemovableHandle]:
        @outside_of_graphs
        def before(module: nn.Module, args: tuple) -> None:
            if not self._is_in_force():
                raise ContextParallelError(
                    f"{type(module).__name__} was called in another thread, or outside of the context's interception; "
                    "run the model's forward and backward in the thread that entered `context_parallel`"
                )
            self._before[module] = self._live.calls

        @outside_of_graphs
        def after(module: nn.Module, args: tuple, result: object) -> None:
            if self._root is not None:  # it is not a recomputation
                ended(self._live.calls > self._before[module])

        return [module.register_forward_pre_hook(before), module.register_forward_hook(after)]

    def _attention_ended(self, name: str, attended: bool) -> None:
        if not attended:
            self._without.append(name)
