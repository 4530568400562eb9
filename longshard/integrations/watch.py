"""Checks of the models that run inside a context, by hooks that are removed with the context.

A model is given, or found at its first call. Its modules and configuration are checked before it runs. While it runs,
the hooks see which positions its modules use, and which attention modules and layers attended through the context. A
layer that did not, although others did, either mixes no tokens or mixes them where the context does not see it.
"""

import inspect
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial, reduce
from operator import or_
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from longshard.context.live import LivePlan
from longshard.context.planning.options import ContextParallelError
from longshard.integrations import inspection
from longshard.integrations.calls import Call, outside_of_graphs
from longshard.integrations.inspection import Allowed
from longshard.integrations.scans import bind
from longshard.sharding.exchange import all_reduce
from longshard.sharding.tensors import version_of

_RESTARTED, _NOT_GLOBAL, _NOT_BY_DOCUMENT = 1, 2, 4


class Positions:
    """The positions that a model was seen to use on this rank.

    A model without positions counts a rank's part of the sequence from 0. This is right if the part begins a sequence
    or a document, and only if the other ranks count in the same way. So the ranks compare their `flags`.
    """

    def __init__(self, live: LivePlan) -> None:
        tokens = live.layout.indices(live.mesh.get_local_rank())
        self._global = torch.from_numpy(tokens)
        starts = [tokens] if live.mask is None else list(_places_in_documents(live, tokens))
        self._by_document = [torch.from_numpy(x) for x in starts]
        self._last: tuple[weakref.ref, int] | None = None
        self.flags = 0

    def see(self, positions: object) -> bool:
        """Check a value that may be positions: an integer tensor (..., tokens of this rank).

        Return whether it may be, and was not checked just before. No shape decides this, so that ranks agree.
        """
        if not isinstance(positions, torch.Tensor) or positions.dtype not in (
            torch.int64,
            torch.int32,
        ):
            return False
        version = version_of(positions)
        if self._last is not None and self._last[0]() is positions and self._last[1] == version:
            return False
        self._last = weakref.ref(positions), version
        self._compare(positions)
        return True

    def _compare(self, positions: torch.Tensor) -> None:
        if positions.ndim == 0 or positions.shape[-1] != len(self._global):
            return
        x = positions.detach().reshape(-1, positions.shape[-1]).to("cpu", torch.int64)
        is_global = bool(_agree(x, self._global).all())
        is_by_document = bool(
            torch.stack([_agree(x, places) for places in self._by_document]).any(0).all()
        )
        restarted = not is_global and bool(_agree(x, torch.arange(x.shape[1])).all())
        if is_global or is_by_document or restarted:
            self.flags |= _RESTARTED * restarted | _NOT_GLOBAL * (not is_global)
            self.flags |= _NOT_BY_DOCUMENT * (not is_by_document)

    def refusal_of_ranks(self, flags: list[int]) -> str | None:
        """Return why positions are wrong, by the flags of all ranks, or None if all count the sequence or documents."""
        self.flags = 0
        if reduce(or_, flags) != _RESTARTED | _NOT_GLOBAL | _NOT_BY_DOCUMENT:
            return None
        return (
            f"the model counts positions from 0 on rank(s) {[rank for rank, x in enumerate(flags) if x & _RESTARTED]} "
            "of the group, where its tokens are not the sequence's first; give it global `position_ids`, cut as a "
            "buffer of `context_parallel`, or those of documents together with their mask"
        )


def _agree(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return for each row of x (rows, n) whether it is `places` (n,) plus an offset, which some tables have."""
    offset = x - places
    return (offset == offset[:, :1]).all(1) & (offset[:, 0] >= 0)


def _places_in_documents(live: LivePlan, tokens: np.ndarray) -> list[np.ndarray]:
    """Return, for each sequence of the mask, the places of tokens counted from the first key that each may see."""
    places = []
    for number in range(live.mask.sequences):
        bands = live.mask.sequence(number).bands
        starts = np.array([band.q_start for band in bands], dtype=np.int64)
        band = np.searchsorted(starts, tokens, side="right") - 1
        firsts = np.array([band.kv_start for band in bands], dtype=np.int64)
        places.append(
            np.where(band >= 0, tokens - firsts[np.maximum(band, 0)], tokens)
            if len(bands)
            else tokens
        )
    return places


# ---- transformers' `dynamic` and `longrope`: frequencies depend on max(position_ids) + 1


def depends_on_length(module: nn.Module) -> bool:
    """Return whether a module's table depends on the largest position, of which a rank has its part only."""
    kinds = getattr(module, "rope_type", None)
    kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
    return any(
        isinstance(kind, str) and ("dynamic" in kind or kind == "longrope") for kind in kinds
    )


def lengthened(
    mesh: DeviceMesh, module: nn.Module, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict]:
    """Return a rotary module's arguments with the largest position of all ranks appended; a collective."""
    positions = kwargs.get("position_ids", args[1] if len(args) > 1 else None)
    if not isinstance(positions, torch.Tensor) or positions.ndim < 2:
        raise ContextParallelError(
            f"{type(module).__name__} has a rotary table that depends on the largest position, and was called "
            "without `position_ids`; use another rope_type, such as 'linear', 'yarn' or 'llama3'"
        )
    largest = all_reduce(positions.max().reshape(1), mesh, "max")
    longer = torch.cat([positions, largest.expand(*positions.shape[:-1], 1)], dim=-1)
    if "position_ids" in kwargs:
        return args, kwargs | {"position_ids": longer}
    return (args[0], longer, *args[2:]), kwargs


def shortened(module: nn.Module, args: tuple, kwargs: dict[str, Any], table: Any) -> Any:
    """Return a rotary module's table, or tables, without the row of the position that `lengthened` appended."""
    return (
        table[..., :-1, :]
        if isinstance(table, torch.Tensor)
        else tuple(x[..., :-1, :] for x in table)
    )


class ModelWatch:
    """Hooks on the models that run in one context and one thread.

    is_in_force: returns whether attention is intercepted where it is called. model: the model that will run, if it is
    known. allowed: modules that a user checked by hand.

    Raises:
        ContextParallelError: a model cannot be context parallel, or is called in a way that is wrong for a part of a
            sequence; the same on every rank.
    """

    def __init__(
        self,
        live: LivePlan,
        is_in_force: Callable[[], bool],
        model: nn.Module | None,
        allowed: Allowed,
    ) -> None:
        self.has_news = True
        """Whether a forward began, or positions were seen, since the ranks last compared them."""
        self.positions = Positions(live)
        self._live = live
        self._model = model
        self._allowed = allowed
        self._is_in_force = is_in_force
        self._known: set[nn.Module] = set()
        self._handles: list[RemovableHandle] = []
        # calls that run: of `tokens` (embeddings), of `allowed` modules
        self._inside: Counter[str] = Counter()
        self.shift: str | None = None
        """Why a call that mixed tokens is refused."""
        self._thread = threading.get_ident()
        self._root: nn.Module | None = None  # whose forward runs
        self._calls_before: dict[nn.Module, int] = {}
        self._attended: dict[str, bool] = {}  # of attention modules and layers, in this forward
        # of nn.ModuleLists: kinds, number
        self._stacks: dict[nn.Module, dict[str, tuple[list[str], int]]] = {}

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

    def see(self, *values: object) -> None:
        """Check values that may be positions, such as the indices of a table that is not one of tokens."""
        for x in values if not self._inside["tokens"] else ():
            self.has_news |= self.positions.see(x)

    def on_shift(
        self, name: str, x: object, shifted: torch.Tensor, args: tuple, kwargs: dict[str, Any]
    ) -> None:
        """Check a call such as F.pad or torch.cumsum, which mixes tokens if it works along them.

        Its refusal waits for the next attention call, where ranks may still compare, or for the end of the forward.
        """
        length = self._live.layout.local_length(self._live.mesh.get_local_rank())
        if not self._inside["allowed"] and inspection.moves_tokens(
            name, x, shifted, args, kwargs, length
        ):
            self.shift = self.shift or (
                f"the model calls {name} along the {length} tokens of this rank, which mixes tokens outside of "
                "attention; use a model in which attention alone mixes tokens, or, if it is right for a part of a "
                "sequence, name the module that calls it in `intercept_sdpa(allow_modules=[...])`"
            )

    def on_attention(self, call: Call) -> str | None:
        """Return why a call cannot be context parallel, by rules that give every rank the same result, or None."""
        self.see(call.positions)
        if self.shift is None and 0 < call.hides_from < self._live.layout.length:
            return (
                f"this model's mask hides tokens by a distance of {call.hides_from} in another way than a causal "
                f"window, such as chunks, for {self._live.layout.length} tokens; use a causal model, or sequences of "
                f"at most {call.hides_from} tokens"
            )
        return self.shift

    # ---- hooks, at which the compiler breaks its graph

    def _before(self, module: nn.Module, hook: Callable) -> None:
        self._handles.append(
            module.register_forward_pre_hook(outside_of_graphs(hook), with_kwargs=True)
        )

    def _after(self, module: nn.Module, hook: Callable) -> None:
        self._handles.append(
            module.register_forward_hook(outside_of_graphs(hook), with_kwargs=True)
        )

    @outside_of_graphs
    def _on_call(self, module: nn.Module, args: tuple) -> None:
        if module not in self._known and threading.get_ident() == self._thread:
            self._adopt(module)
            self._begin(module)

    def _adopt(self, root: nn.Module) -> None:
        self._known.update(root.modules())
        bound = bind(root.modules())
        if refusal := inspection.refusal_of_model(
            root, self._live.layout.length, self._allowed, bound
        ):
            raise ContextParallelError(refusal)
        self.has_news = True
        found = dict(inspection.checked_modules(root, self._allowed))
        for name, module in found.items():
            self._hook(module, root)
            if inspection.mixes_if_called(module, bound):
                refusal = inspection.refusal_of_module(name, module, self._live.layout.length)
                self._before(module, partial(_refuse, refusal))
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
                self._before(module, partial(_refuse, refusal))
            if self._allowed.has(module, name):
                self._count(module, "allowed")
        self._stacks[root] = self._cover(found)
        self._before(root, lambda module, args, kwargs: self._begin(module))
        self._after(root, self._after_root)

    def _hook(self, module: nn.Module, root: nn.Module) -> None:
        if inspection.is_model(module):
            self._before(module, _check_inputs)
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
            self._before(module, lambda module, args, kwargs: self.see(*args, *kwargs.values()))
        if by_length:
            self._before(module, partial(lengthened, self._live.mesh))
            self._after(module, shortened)

    def _count(self, module: nn.Module, what: str) -> None:
        def add(number: int, *_: object) -> None:
            self._inside[what] += number

        self._before(module, partial(add, 1))
        self._after(module, partial(add, -1))

    def _after_root(
        self, root: nn.Module, args: tuple, kwargs: dict[str, Any], result: object
    ) -> None:
        if inspection.is_model(root):
            # a model found by its call had no hook before that call
            _check_inputs(root, args, kwargs)
            _check_logits(root, getattr(result, "logits", None), self._live)
        elif inspection.POSITIONS.search(type(root).__name__):
            self.see(*args, *kwargs.values())
        if refusal := (self._end(root) or self.shift):
            raise ContextParallelError(refusal)

    # ---- which attention modules and layers attended through the context

    def _cover(self, modules: Mapping[str, nn.Module]) -> dict[str, tuple[list[str], int]]:
        """Count the context's attention calls of attention modules and layers, and return the stacks of layers.

        The context does not see a call from another thread, a function compiled by torch.jit or a C++ library. The
        module of such a call counts none.
        """
        kinds: list[str] = []
        stacks = {}
        layers = set()
        for name, module in modules.items():
            kinds = inspection.layer_kinds(getattr(module, "config", None)) or kinds
            if isinstance(module, nn.ModuleList):
                stacks[name] = kinds, len(module)
                layers.update(f"{name}.{i}" for i in range(len(module)))
            if name in layers or inspection.ATTENTION.search(type(module).__name__):
                self._before(module, self._before_layer)
                self._after(module, partial(self._after_layer, name))
        return stacks

    def _before_layer(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if not self._is_in_force():
            raise ContextParallelError(
                f"{type(module).__name__} was called in another thread, or outside of the context's interception; "
                "run the model's forward and backward in the thread that entered `context_parallel`"
            )
        self._calls_before[module] = self._live.calls

    def _after_layer(
        self, name: str, module: nn.Module, args: tuple, kwargs: dict[str, Any], result: object
    ) -> None:
        if self._root is not None:  # it is not a recomputation
            self._attended[name] = (
                self._attended.get(name, True) and self._live.calls > self._calls_before[module]
            )

    def _begin(self, root: nn.Module) -> None:
        self.has_news = True
        if self._root in (None, root):
            self._root = root
            self._attended = {}
            # a model found by its call gets hooks too late for it
            self._calls_before[root] = self._live.calls

    def _end(self, root: nn.Module) -> str | None:
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
                if not did and not inspection.is_tokenwise(kinds, i, number)
            ]
            if without and any(ran.values()):
                return (
                    f"layers {without} of {name} ran no context-parallel attention, and other layers there did; if "
                    "they mix no tokens in another way, name their class in `intercept_sdpa(allow_modules=[...])`"
                )
        return None


def _check_logits(model: nn.Module, logits: object, live: LivePlan) -> None:
    length = live.layout.local_length(live.mesh.get_local_rank())
    if isinstance(logits, torch.Tensor) and (logits.ndim < 3 or logits.shape[-2] != length):
        raise ContextParallelError(
            f"{type(model).__name__} has logits of shape {tuple(logits.shape)}, not one row for each token of a rank's "
            "part; use a model with a head for every token, such as one for causal or masked language modelling"
        )


def _check_inputs(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    given = inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments
    given |= given.get("kwargs", {})
    name = type(model).__name__
    has_text = any(given.get(key) is not None for key in ("input_ids", "inputs_embeds"))
    if inspection.takes_positions(model) and given.get("position_ids") is None and has_text:
        raise ContextParallelError(
            f"{name} got no `position_ids`, and would count positions from 0 on every rank; give it global "
            "`position_ids`, cut as a buffer of `context_parallel`"
        )
    if given.get("labels") is not None and (
        given.get("shift_labels") is None or not given.get("num_items_in_batch")
    ):
        raise ContextParallelError(
            f"{name} got `labels`, which it shifts within the part of a rank and divides by the tokens of that part; "
            "shift and cut labels as a buffer, and take the loss from the logits"
        )


def _refuse(refusal: str, *_: object) -> None:
    raise ContextParallelError(refusal)
