"""Check the models that run inside a context, by hooks that are removed with the context.

A model is passed to the interception, or detected at its first call. Its modules and configuration are checked before
it runs. While it runs, the hooks see which positions its modules use, and which attention modules and layers attended
through the context. If a layer did not, although others did, it either mixes no tokens, or it mixes them where the
context does not see it.
"""

import threading
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from longshard.context.live import LivePlan
from longshard.context.planning.options import ContextParallelError
from longshard.integrations import inspection
from longshard.integrations.arguments import check_inputs, check_logits
from longshard.integrations.attended import AttendedLayers
from longshard.integrations.calls import Call, outside_of_graphs
from longshard.integrations.inspection import Allowed
from longshard.integrations.positions import Positions
from longshard.integrations.rotary_length import depends_on_length, lengthened, shortened
from longshard.integrations.scans import bind


class ModelWatch(ExitStack):
    """Hooks on the models that run in one context and one thread. They are removed at the exit.

    Args:
        live: The plan of the context.
        is_in_force: Returns whether attention is intercepted at the place of the call.
        allowed: Modules that a user checked by hand.

    Raises:
        ContextParallelError: A model cannot be context parallel, or is called in a way that is wrong for a part of a
            sequence. The error is the same on every rank.
    """

    def __init__(
        self, live: LivePlan, is_in_force: Callable[[], bool], allowed: Allowed
    ) -> None:
        super().__init__()
        self.has_news = True
        """Whether a forward began, or positions were seen, since the ranks last compared them."""
        self.positions = Positions(live)
        self._live = live
        self._allowed = allowed
        self._known = set()
        # number of calls that run now, of `tokens` (embeddings) and of `allowed` modules
        self._inside = Counter()
        self.shift = None
        """Why a call that mixed tokens is refused; None if there was none."""
        self._thread = threading.get_ident()
        self._attended = AttendedLayers(live, is_in_force)

    # ---- For the interception

    def start(self, model: nn.Module | None) -> None:
        """Begin to watch.

        Args:
            model: The model that will run; None if it is not known.
        """
        self.enter_context(register_module_forward_pre_hook(self._on_call))
        if model is not None:
            self._adopt(model)

    def see(self, *values: object) -> None:
        """Check values that may be positions, such as the indices of a table that is not a table of tokens.

        Args:
            *values: The values.
        """
        for x in values if not self._inside["tokens"] else ():
            self.has_news |= self.positions.see(x)

    def on_shift(
        self, name: str, x: object, shifted: torch.Tensor, args: tuple, kwargs: dict
    ) -> None:
        """Check a call such as F.pad or torch.cumsum, which mixes tokens if it works along them.

        Its refusal waits for the next attention call, where ranks may still compare, or for the end of the forward.

        Args:
            name: The name of the function.
            x: Its first argument, (B, tokens, ...), if it is a tensor.
            shifted: Its result, any shape.
            args: Its other positional arguments.
            kwargs: Its keyword arguments.
        """
        length = self._live.layout.local_length(self._live.rank)
        if not self._inside["allowed"] and inspection.moves_tokens(
            name, x, shifted, args, kwargs, length
        ):
            self.shift = self.shift or (
                f"the model calls {name} along the {length} tokens of this rank, which mixes tokens outside of "
                "attention. Use a model in which attention alone mixes tokens. Or, if it is right for a part of a "
                "sequence, name the module that calls it in `intercept_sdpa(allow_modules=[...])`"
            )

    def on_attention(self, call: Call) -> str | None:
        """Return why a call cannot be context parallel, by rules that give every rank the same result; None if it can.

        If `on_shift` has refused a call, return that refusal. The positions of the call are checked as by `see`.

        Args:
            call: The attention call.
        """
        self.see(call.positions)
        if self.shift is None and 0 < call.hides_from < self._live.layout.length:
            return (
                f"this model's mask hides tokens by a distance of {call.hides_from} in another way than a causal "
                f"window, such as chunks, for {self._live.layout.length} tokens. Use a causal model, or sequences of "
                f"at most {call.hides_from} tokens"
            )
        return self.shift

    # ---- Hooks. The compiler breaks its graph at them.

    def _around(
        self, module: nn.Module, before: Callable, after: Callable | None = None
    ) -> None:
        """Call functions before and after the forward of a module, until the watch ends."""
        before = outside_of_graphs(before)
        self.enter_context(module.register_forward_pre_hook(before, with_kwargs=True))
        if after is not None:
            after = outside_of_graphs(after)
            self.enter_context(module.register_forward_hook(after, with_kwargs=True))

    @outside_of_graphs
    def _on_call(self, module: nn.Module, args: tuple) -> None:
        if module not in self._known and threading.get_ident() == self._thread:
            self._adopt(module)
            self._begin(module)

    def _begin(self, root: nn.Module) -> None:
        self.has_news = True
        self._attended.begin(root)

    def _adopt(self, root: nn.Module) -> None:
        self._known.update(root.modules())
        bound = bind(root.modules())
        if refusal := inspection.refusal_of_model(
            root, self._live.layout.length, self._allowed, bound
        ):
            raise ContextParallelError(refusal)
        self.has_news = True
        modules = dict(inspection.checked_modules(root, self._allowed))
        for name, module in modules.items():
            self._hook(module, root)
            if inspection.mixes_if_called(module, bound):
                refusal = inspection.refusal_of_module(name, module, self._live.layout.length)
                self._around(module, partial(_refuse, refusal))
        for name, module in root.named_modules():
            if (
                module is not root
                and inspection.is_model(module)
                and not inspection.reads_text(module)
            ):
                refusal = (
                    f"{type(module).__name__} reads {module.main_input_name!r}, not the sequence that was cut; call "
                    "it outside of the context, and give the model `inputs_embeds`, cut as a buffer"
                )
                self._around(module, partial(_refuse, refusal))
            if self._allowed.has(module, name):
                self._count(module, "allowed")
        for name, module in self._attended.covered(root, modules):
            self._around(module, self._attended.before, partial(self._attended.after, name))
        self._around(root, lambda module, args, kwargs: self._begin(module), self._after_root)

    def _hook(self, module: nn.Module, root: nn.Module) -> None:
        if inspection.is_model(module):
            self._around(module, check_inputs)
            with suppress(NotImplementedError, AttributeError):
                self._count(module.get_input_embeddings(), "tokens")
            return
        by_length = depends_on_length(module)
        if by_length and module is root:
            raise ContextParallelError(
                f"{type(module).__name__} has a rotary table that depends on the largest position, and was called by "
                "itself; give the model that it belongs to as `intercept_sdpa(model)`"
            )
        if by_length or inspection.POSITIONS.search(type(module).__name__):
            self._around(module, lambda module, args, kwargs: self.see(*args, *kwargs.values()))
        if by_length:
            self._around(module, partial(lengthened, self._live.mesh), shortened)

    def _count(self, module: nn.Module, kind: str) -> None:
        def add(number: int, *_: object) -> None:
            self._inside[kind] += number

        self._around(module, partial(add, 1), partial(add, -1))

    def _after_root(self, root: nn.Module, args: tuple, kwargs: dict, result: object) -> None:
        if inspection.is_model(root):
            # a model that was detected at its call had no hook before that call
            check_inputs(root, args, kwargs)
            check_logits(root, getattr(result, "logits", None), self._live)
        elif inspection.POSITIONS.search(type(root).__name__):
            self.see(*args, *kwargs.values())
        if refusal := (self._attended.end(root) or self.shift):
            raise ContextParallelError(refusal)


def _refuse(refusal: str, *_: object) -> None:
    raise ContextParallelError(refusal)
