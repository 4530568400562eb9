"""Checks of the models that run inside a context, by hooks that are removed with the context.

A model is given, or found at its first call. Its modules and configuration are checked before it runs. While it runs,
the hooks see which positions its modules use, and which layers attend without the context.
"""

import inspect
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from trainer.distributed.context_parallel.live import LivePlan
from trainer.distributed.context_parallel.planning.options import ContextParallelError
from trainer.integrations.calls import Call, outside_of_graphs
from trainer.integrations.coverage import Coverage
from trainer.integrations.inspection import (
    Allowed,
    checked_modules,
    is_model,
    mixes_if_called,
    moves_tokens,
    reads_text,
    refusal_of_model,
    refusal_of_module,
    takes_positions,
)
from trainer.integrations.positions import Positions
from trainer.integrations.rotary import GlobalLength, depends_on_length
from trainer.integrations.transformers import refusal_of_window

_POSITIONS = re.compile("rotary|rope|position", re.IGNORECASE)


class ModelWatch:
    """Hooks on the models that run in one context and one thread.

    is_in_force: returns whether attention is intercepted where it is called. model: the model that will run, if it is
    known. allowed: modules that a user checked by hand.

    Raises:
        ContextParallelError: a model cannot be context parallel, or is called in a way that is wrong for a part of a
            sequence; the same on every rank.
    """

    def __init__(
        self, live: LivePlan, is_in_force: Callable[[], bool], model: nn.Module | None, allowed: Allowed
    ) -> None:
        self.has_news = True
        """Whether a forward began, or positions were seen, since the ranks last compared their flags."""
        self._live = live
        self._model = model
        self._allowed = allowed
        self._positions = Positions(live)
        self._length = GlobalLength(live.mesh)
        self._coverage = Coverage(live, is_in_force)
        self._known: set[nn.Module] = set()
        self._handles: list[RemovableHandle] = []
        self._reads_tokens = False
        self._in_allowed = 0
        self._shift: str | None = None
        self._thread = threading.get_ident()

    def __enter__(self) -> "ModelWatch":
        self._handles.append(register_module_forward_pre_hook(self._on_call))
        try:
            if self._model is not None:
                self._adopt(self._model)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        while self._handles:
            self._handles.pop().remove()

    # ---- for the interception

    @property
    def flags(self) -> int:
        """What this rank saw of positions, for `refusal_of_ranks`."""
        return self._positions.flags

    def on_embedding(self, indices: object) -> None:
        """Check the indices of a table, which may be positions."""
        if not self._reads_tokens:
            self._see(indices)

    def _see(self, *values: object) -> None:
        for x in values:
            self.has_news |= self._positions.see(x)

    def on_shift(self, name: str, x: object, shifted: torch.Tensor, args: tuple, kwargs: dict[str, Any]) -> None:
        """Check a call such as F.pad or torch.cumsum, which mixes tokens if it works along them.

        Its refusal waits for the next attention call, where ranks may still compare, or for the end of the forward.
        """
        length = self._live.layout.local_length(self._live.mesh.get_local_rank())
        if self._in_allowed == 0 and moves_tokens(name, x, shifted, args, kwargs, length):
            self._shift = self._shift or (
                f"the model calls {name} along the {length} tokens of this rank, which mixes tokens outside of "
                "attention; use a model in which attention alone mixes tokens, or, if it is right for a part of a "
                "sequence, name the module that calls it in `intercept_sdpa(allow_modules=[...])`"
            )

    def on_attention(self, call: Call) -> str | None:
        """Return why a call cannot be context parallel, by rules that give every rank the same result, or None."""
        self._see(call.told.get("position_ids"))
        return self._shift or refusal_of_window(call, self._live.layout.length)

    def refusal_of_ranks(self, flags: list[int]) -> str | None:
        """Return why positions are wrong, by the flags of all ranks, or None."""
        self.has_news = False
        self._positions.flags = 0
        ranks = Positions.wrong_ranks(flags)
        if not ranks:
            return None
        return (
            f"the model counts positions from 0 on rank(s) {ranks} of the group, where its tokens are not the "
            "sequence's first; give it global `position_ids`, cut as a buffer of `context_parallel`, or those of "
            "documents together with their mask"
        )

    # ---- hooks, at which the compiler breaks its graph

    @outside_of_graphs
    def _on_call(self, module: nn.Module, args: tuple) -> None:
        """Adopt a called module that belongs to no known model."""
        if module not in self._known and threading.get_ident() == self._thread:
            self._adopt(module)
            self._coverage.begin(module)

    def _adopt(self, root: nn.Module) -> None:
        self._known.update(root.modules())
        refusal = refusal_of_model(root, self._live.layout.length, self._allowed)
        if refusal:
            raise ContextParallelError(refusal)
        self.has_news = True
        found = dict(checked_modules(root, self._allowed))
        for name, module in found.items():
            self._hook(module, root)
            if mixes_if_called(module):
                refusal = refusal_of_module(name, module, self._live.layout.length)
                self._handles.append(module.register_forward_pre_hook(partial(_refuse, refusal)))
        for module in root.modules():
            if module is not root and is_model(module) and not reads_text(module):
                refusal = (
                    f"{type(module).__name__} reads {module.main_input_name!r}, not the sequence that was cut; call "
                    "it outside of the context, and give the model `inputs_embeds`, cut as a buffer"
                )
                self._handles.append(module.register_forward_pre_hook(partial(_refuse, refusal)))
        for name, module in root.named_modules():
            if self._allowed.has(module, name):
                self._handles.append(module.register_forward_pre_hook(self._before_allowed))
                self._handles.append(module.register_forward_hook(self._after_allowed))
        self._handles += self._coverage.hook(found)
        self._handles.append(root.register_forward_pre_hook(self._before_root))
        self._handles.append(root.register_forward_hook(self._after_root, with_kwargs=True))

    def _hook(self, module: nn.Module, root: nn.Module) -> None:
        if is_model(module):
            self._handles.append(module.register_forward_pre_hook(_check_inputs, with_kwargs=True))
            with suppress(NotImplementedError, AttributeError):
                tokens = module.get_input_embeddings()
                self._handles.append(tokens.register_forward_pre_hook(self._before_tokens))
                self._handles.append(tokens.register_forward_hook(self._after_tokens))
            return
        by_length = depends_on_length(module)
        if by_length and module is root:
            raise ContextParallelError(
                f"{type(module).__name__} has a rotary table that depends on the largest position, and was called by "
                "itself; give the model that it belongs to as `intercept_sdpa(model)`"
            )
        if by_length or _POSITIONS.search(type(module).__name__):
            self._handles.append(module.register_forward_pre_hook(self._see_positions, with_kwargs=True))
        if by_length:
            self._handles += self._length.hook(module)

    @outside_of_graphs
    def _see_positions(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self._see(*args, *kwargs.values())

    @outside_of_graphs
    def _before_tokens(self, *_: object) -> None:
        self._reads_tokens = True

    @outside_of_graphs
    def _after_tokens(self, *_: object) -> None:
        self._reads_tokens = False

    @outside_of_graphs
    def _before_allowed(self, *_: object) -> None:
        self._in_allowed += 1

    @outside_of_graphs
    def _after_allowed(self, *_: object) -> None:
        self._in_allowed -= 1

    @outside_of_graphs
    def _before_root(self, root: nn.Module, args: tuple) -> None:
        self.has_news = True
        self._coverage.begin(root)

    @outside_of_graphs
    def _after_root(self, root: nn.Module, args: tuple, kwargs: dict[str, Any], result: object) -> None:
        if is_model(root):
            _check_inputs(root, args, kwargs)  # a model found by its call had no hook before that call
            _check_logits(root, getattr(result, "logits", None), self._live)
        elif _POSITIONS.search(type(root).__name__):
            self._see_positions(root, args, kwargs)
        refusal = self._coverage.end(root) or self._shift
        if refusal:
            raise ContextParallelError(refusal)


def _check_logits(model: nn.Module, logits: object, live: LivePlan) -> None:
    """Raise if a model has no logits for each token, but for example for the last token of a rank's part."""
    length = live.layout.local_length(live.mesh.get_local_rank())
    if isinstance(logits, torch.Tensor) and (logits.ndim < 3 or logits.shape[-2] != length):
        raise ContextParallelError(
            f"{type(model).__name__} has logits of shape {tuple(logits.shape)}, not one row for each token of a rank's "
            "part; use a model with a head for every token, such as one for causal or masked language modelling"
        )


@outside_of_graphs
def _check_inputs(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Raise if a model of transformers was called in a way that is wrong for a part of a sequence."""
    given = inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments
    given |= given.get("kwargs", {})
    name = type(model).__name__
    has_text = any(given.get(key) is not None for key in ("input_ids", "inputs_embeds"))
    if takes_positions(model) and given.get("position_ids") is None and has_text:
        raise ContextParallelError(
            f"{name} got no `position_ids`, and would count positions from 0 on every rank; give it global "
            "`position_ids`, cut as a buffer of `context_parallel`"
        )
    if given.get("labels") is not None and (given.get("shift_labels") is None or not given.get("num_items_in_batch")):
        raise ContextParallelError(
            f"{name} got `labels`, which it shifts within the part of a rank and divides by the tokens of that part; "
            "shift and cut labels as a buffer, and take the loss from the logits"
        )


@outside_of_graphs
def _refuse(refusal: str, module: nn.Module, args: tuple) -> None:
    raise ContextParallelError(refusal)
