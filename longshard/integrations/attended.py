"""Record which attention modules and layers attended through the context, by hooks around them."""

from collections.abc import Callable, Mapping

from torch import nn

from longshard.context.live import LivePlan
from longshard.context.planning.options import ContextParallelError
from longshard.integrations import inspection


class AttendedLayers:
    """Counts the context's attention calls of modules while a model runs, and says which modules made none.

    Args:
        live: The plan of the context.
        is_in_force: Returns whether attention is intercepted at the place of the call.
    """

    def __init__(self, live: LivePlan, is_in_force: Callable[[], bool]) -> None:
        self._live = live
        self._is_in_force = is_in_force
        self._root = None  # the model that runs
        self._calls_before = {}
        self._attended = {}  # of attention modules and layers, in this forward
        # model -> name of each nn.ModuleList -> kinds of its layers, number of its layers
        self._stacks = {}

    def covered(
        self, root: nn.Module, modules: Mapping[str, nn.Module]
    ) -> list[tuple[str, nn.Module]]:
        """Return (name, module) of the attention modules and layers of a model, to be watched by `before` and `after`.

        The context does not see a call from another thread, from a function compiled by torch.jit or from a C++
        library. Then `end` finds that the module did not attend.

        Args:
            root: The model.
            modules: The modules of the model, by name.
        """
        kinds = []
        stacks = self._stacks[root] = {}
        layers = set()
        watched = []
        for name, module in modules.items():
            kinds = inspection.layer_kinds(getattr(module, "config", None)) or kinds
            if isinstance(module, nn.ModuleList):
                stacks[name] = kinds, len(module)
                layers.update(f"{name}.{i}" for i in range(len(module)))
            if name in layers or inspection.ATTENTION.search(type(module).__name__):
                watched.append((name, module))
        return watched

    def before(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Note the number of attention calls before the forward of a module; a hook.

        Args:
            module: The module.
            args: Its positional arguments.
            kwargs: Its keyword arguments.

        Raises:
            ContextParallelError: No interception is in force.
        """
        if not self._is_in_force():
            raise ContextParallelError(
                f"{type(module).__name__} was called in another thread, or outside of the context's interception; "
                "run the model's forward and backward in the thread that entered `context_parallel`"
            )
        self._calls_before[module] = self._live.calls

    def after(
        self, name: str, module: nn.Module, args: tuple, kwargs: dict, result: object
    ) -> None:
        """Note whether attention ran in the forward of a module; a hook. A recomputation does not count.

        Args:
            name: The name of the module.
            module: The module.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            result: Its result.
        """
        if self._root is not None:  # it is not a recomputation
            self._attended[name] = (
                self._attended.get(name, True) and self._live.calls > self._calls_before[module]
            )

    def begin(self, root: nn.Module) -> None:
        """Note that the forward of a model begins, unless the model runs inside another watched model.

        Args:
            root: The model.
        """
        if self._root in (None, root):
            self._root = root
            self._attended = {}
            # a model that is detected at its call gets its hooks after `before` would run
            self._calls_before[root] = self._live.calls

    def end(self, root: nn.Module) -> str | None:
        """Return why the forward of a model is refused, None if it is not. This ends the record of the forward.

        For a model that runs inside another watched model, return None.

        Args:
            root: The model.
        """
        if root is not self._root:
            return None
        attended = self._attended
        self._attended = {}
        self._root = None
        for name, did in attended.items():
            if not did and inspection.ATTENTION.search(type(root.get_submodule(name)).__name__):
                return (
                    f"{name} ran and no context-parallel attention in it: it attends in another way than by "
                    "F.scaled_dot_product_attention, or in another thread; make it call that, or name it in "
                    "`intercept_sdpa(allow_modules=[...])`"
                )
        for name, (kinds, number) in self._stacks[root].items():
            ran = {
                i: attended[f"{name}.{i}"] for i in range(number) if f"{name}.{i}" in attended
            }
            without = [
                i
                for i, did in ran.items()
                if not did
                and not (len(kinds) == number and kinds[i] in inspection.TOKENWISE_KINDS)
            ]
            if without and any(ran.values()):
                return (
                    f"layers {without} of {name} ran no context-parallel attention, and other layers there did; if "
                    "they mix no tokens in another way, name their class in `intercept_sdpa(allow_modules=[...])`"
                )
        return None
