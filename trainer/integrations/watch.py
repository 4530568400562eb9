"""What a model does inside a context, seen by hooks on its modules that are removed with the context.

A model is found at its first call, or given. What it is made of is judged before it runs. While it runs, the hooks see
which positions its parts work with, and which layers attend without the context.
"""

import inspect
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from trainer.distributed.context_parallel.live import LivePlan
from trainer.distributed.context_parallel.planning.options import ContextParallelError
from trainer.integrations.coverage import Coverage
from trainer.integrations.inspection import (
    Allowed,
    is_model,
    mixes_if_called,
    moves_tokens,
    parts,
    reads_text,
    refusal_of_model,
    refusal_of_module,
    takes_positions,
)
from trainer.integrations.intercept import Call, outside_of_graphs
from trainer.integrations.positions import Positions
from trainer.integrations.rotary import GlobalLength, depends_on_length
from trainer.integrations.transformers import refusal_of_window, told_by_transformers

_POSITIONS = re.compile("rotary|rope|position", re.IGNORECASE)


class ModelWatch:
    """Hooks on the models that run in one context and one thread.

    is_in_force: whether attention is intercepted where it is called. model: the one that will run, if it is known.
    allowed: modules that a user checked by hand.

    Raises:
        ContextParallelError: when a model is found or given that cannot be context parallel, and when it is called in
            a way that is wrong for a part of a sequence; alike on every rank.
    """

    def __init__(
        self, live: LivePlan, is_in_force: Callable[[], bool], model: nn.Module | None, allowed: Allowed
    ) -> None:
        self.has_news = True
        """Whether a model was found since the ranks compared what they saw."""
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

    # ---- what the interception asks

    @property
    def flags(self) -> int:
        """What this rank saw of positions, as `refusal_of_ranks` reads it."""
        return self._positions.flags

    def told(self, caller: FrameType | None) -> dict[str, Any]:
        """Return what the caller of F.scaled_dot_product_attention knows of this attention beside its arguments."""
        return told_by_transformers(caller)

    def on_embedding(self, indices: object) -> None:
        """Look at the indices of a table, which may be one of positions."""
        if self.has_news and not self._reads_tokens:
            self._positions.see(indices)

    def on_shift(self, name: str, x: object, shifted: torch.Tensor, args: tuple, kwargs: dict[str, Any]) -> None:
        """Look at a call of F.pad, torch.roll or torch.cumsum, which mixes tokens where it works along them.

        Its refusal waits for the next attention call, at which ranks may still compare, or the end of the forward.
        """
        length = self._live.layout.local_length(self._live.mesh.get_local_rank())
        if self._in_allowed == 0 and moves_tokens(name, x, shifted, args, kwargs, length):
            self._shift = self._shift or (
                f"the model calls {name} along the {length} tokens of this rank, which mixes tokens outside of "
                "attention; use a model in which attention alone mixes tokens, or, if it is right for a part of a "
                "sequence, name the module that calls it in `context_parallel(allow_modules=[...])`"
            )

    def on_attention(self, call: Call) -> str | None:
        """Return why an attention call cannot be honoured, from what is the same on every rank, or None."""
        if self.has_news:
            self._positions.see(call.told.get("position_ids"))
        return self._shift or refusal_of_window(call, self._live.layout.length)

    def refusal_of_ranks(self, flags: list[int]) -> str | None:
        """Return why positions are wrong, from the flags of every rank, or None. The ranks have compared."""
        self.has_news = False
        if not Positions.are_wrong(flags):
            return None
        ranks = [rank for rank, each in enumerate(flags) if Positions.were_counted_here(each)]
        return (
            f"the model counts positions from 0 on rank(s) {ranks} of the group, where its tokens are not the "
            "sequence's first; give it global `position_ids`, cut as a buffer of `context_parallel`, or those of "
            "documents together with their mask"
        )

    # ---- hooks, which the compiler leaves its graph for

    @outside_of_graphs
    def _on_call(self, module: nn.Module, args: tuple) -> None:
        """Find a model: a module that is called and belongs to none so far."""
        if module not in self._known and threading.get_ident() == self._thread:
            self._adopt(module)
            self._coverage.begin(module)

    def _adopt(self, root: nn.Module) -> None:
        self._known.update(root.modules())
        refusal = refusal_of_model(root, self._live.layout.length, self._allowed)
        if refusal:
            raise ContextParallelError(refusal)
        self.has_news = True
        found = dict(parts(root, self._allowed))
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
        elif depends_on_length(module):
            if module is root:
                raise ContextParallelError(
                    f"{type(module).__name__} has a rotary table that depends on the largest position, and was called "
                    "by itself; give the model that it belongs to as `context_parallel(intercept_sdpa=model)`"
                )
            self._handles.append(module.register_forward_pre_hook(self._see_positions, with_kwargs=True))
            self._handles += self._length.hook(module)
        elif _POSITIONS.search(type(module).__name__):
            self._handles.append(module.register_forward_pre_hook(self._see_positions, with_kwargs=True))

    @outside_of_graphs
    def _see_positions(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if self.has_news:
            for x in (*args, *kwargs.values()):
                self._positions.see(x)

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
        self._coverage.begin(root)

    @outside_of_graphs
    def _after_root(self, root: nn.Module, args: tuple, kwargs: dict[str, Any], result: object) -> None:
        if is_model(root):
            _check_inputs(root, args, kwargs)  # a model that is found by its call has no hook before that call
            _check_logits(root, getattr(result, "logits", None), self._live)
        refusal = self._coverage.end(root) or self._shift
        if refusal:
            raise ContextParallelError(refusal)


def _check_logits(model: nn.Module, logits: object, live: LivePlan) -> None:
    """Raise where a model has logits of other things than tokens, such as of the last token of a rank's part."""
    length = live.layout.local_length(live.mesh.get_local_rank())
    if isinstance(logits, torch.Tensor) and (logits.ndim < 3 or logits.shape[-2] != length):
        raise ContextParallelError(
            f"{type(model).__name__} has logits of shape {tuple(logits.shape)}, not one row for each token of a rank's "
            "part; use a model with a head for every token, such as one for causal or masked language modelling"
        )


@outside_of_graphs
def _check_inputs(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Raise where a model of transformers was called in a way that is wrong for a part of a sequence."""
    given = inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments
    given |= given.get("kwargs", {})
    name = type(model).__name__
    if takes_positions(model) and given.get("position_ids") is None and not _skips_text(given):
        raise ContextParallelError(
            f"{name} got no `position_ids`, and would count positions from 0 on every rank; give it global "
            "`position_ids`, cut as a buffer of `context_parallel`"
        )
    if given.get("labels") is not None and (given.get("shift_labels") is None or not given.get("num_items_in_batch")):
        raise ContextParallelError(
            f"{name} got `labels`, which it shifts within the part of a rank and divides by the tokens of that part; "
            "shift and cut labels as a buffer, and take the loss from the logits"
        )


def _skips_text(given: dict[str, Any]) -> bool:
    return given.get("input_ids") is None and given.get("inputs_embeds") is None


@outside_of_graphs
def _refuse(refusal: str, module: nn.Module, args: tuple) -> None:
    raise ContextParallelError(refusal)
