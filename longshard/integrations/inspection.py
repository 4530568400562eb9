"""Decide whether a model can be context parallel: only attention mixes its tokens, and it takes positions.

The rules read modules and configurations, not names of models, and import no library of models. A module with a
`config` and a `main_input_name` counts as a model of transformers.
"""

import inspect
import re
from collections.abc import Collection, Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules import batchnorm, conv, instancenorm, padding, pooling

# Parameters of layers that scan the sequence: state-space models, gated delta nets, RWKV, RG-LRU.
SCAN_PARAMETERS = {
    "A_log",
    "dt_bias",
    "time_decay",
    "time_first",
    "time_mix_key",
    "recurrent_param",
    "recurrent_gate_weight",
}
# Keys under which a configuration lists the kinds of its layers. Then kinds that are attention, or mix no tokens.
_KINDS = (
    "layer_types",
    "layers_block_type",
    "block_types",
    "hybrid_override_pattern",
    "mixer_types",
)
_ATTENTION_KINDS = {
    "full_attention",
    "sliding_attention",
    "chunked_attention",
    "attention",
    "full",
    "sliding",
    "global",
    "local",
}
TOKENWISE_KINDS = {"moe", "mlp", "dense", "sparse"}
# Kinds that are right if their layers are bound. A layer that is not bound is detected by its parameters or its call.
_BOUND_KINDS = {"linear_attention", "mamba", "mamba2", "conv", "hybrid"}
_WITHOUT_WINDOW = {"full_attention", "attention", "full", "global"} | TOKENWISE_KINDS
_WINDOWS = (
    "sliding_window",
    "sliding_window_size",
    "local_attention_window_len",
    "attention_window_size",
)
POSITIONS = re.compile("rotary|rope|position", re.IGNORECASE)
"""Names of classes that take positions."""
ATTENTION = re.compile(r"(Attention|Attn)\d*$")
"""Names of classes that attend."""
# Attention implementations of transformers that do not call F.scaled_dot_product_attention.
_CLOSED_IMPLEMENTATIONS = ("eager", "flex_attention", "flash_attention")
_MIXING = {
    nn.RNNBase: "a recurrent network",
    nn.RNNCellBase: "a recurrent network",
    batchnorm._BatchNorm: "a norm over tokens",
    instancenorm._InstanceNorm: "a norm over tokens",
    pooling._AvgPoolNd: "a pooling layer",
    pooling._MaxPoolNd: "a pooling layer",
    pooling._AdaptiveAvgPoolNd: "a pooling layer",
    pooling._AdaptiveMaxPoolNd: "a pooling layer",
    padding._ConstantPadNd: "a shift of tokens",
}


class Allowed:
    """Modules that a user checked by hand.

    Args:
        entries: Classes, class names, dotted names in the model, or kinds of layers.
    """

    def __init__(self, entries: Collection[type | str]) -> None:
        self._entries = tuple(entries)
        self._used = set()

    def has(self, module: nn.Module | None, name: str) -> bool:
        """Return whether a module, or a kind of layers, is allowed. The entries that name it are no longer `unused`.

        Args:
            module: The module; None for a kind of layers.
            name: The dotted name of the module, or the kind.
        """
        classes = [] if module is None else type(module).__mro__
        entries = {name, *classes, *(cls.__name__ for cls in classes)}.intersection(
            self._entries
        )
        self._used |= entries
        return bool(entries)

    @property
    def unused(self) -> list[str]:
        """The entries that named nothing so far."""
        return [
            x.__name__ if isinstance(x, type) else x
            for x in self._entries
            if x not in self._used
        ]


def is_model(module: nn.Module) -> bool:
    """Return whether a module is a model of transformers, not one of its layers.

    Args:
        module: The module.
    """
    return hasattr(module, "config") and hasattr(module, "main_input_name")


def reads_text(model: nn.Module) -> bool:
    """Return whether a model of transformers reads tokens, rather than images or sound.

    Args:
        model: The model.
    """
    return model.main_input_name in ("input_ids", "inputs_embeds", "decoder_input_ids")


def takes_positions(model: nn.Module) -> bool:
    """Return whether the model's forward has a parameter `position_ids`.

    Args:
        model: The model.
    """
    return "position_ids" in inspect.signature(model.forward).parameters


def checked_modules(root: nn.Module, allowed: Allowed) -> Iterator[tuple[str, nn.Module]]:
    """Yield (dotted name, module) of a model, without allowed modules and inner models of images or sound.

    A model of text and images runs on text only, without its inner models; `ModelWatch` refuses calls of them.

    Args:
        root: The model.
        allowed: Modules that a user checked by hand.
    """
    seen = set()

    def walk(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if module in seen or allowed.has(module, name):
            return
        seen.add(module)
        if module is not root and is_model(module) and not reads_text(module):
            return
        yield name, module
        for child_name, child in module.named_children():
            yield from walk(f"{name}.{child_name}" if name else child_name, child)

    return walk("", root)


def refusal_of_model(
    root: nn.Module, seq_len: int, allowed: Allowed, bound: Collection[nn.Module] = ()
) -> str | None:
    """Return why a model cannot be context parallel; None if it can.

    The result depends only on modules and configurations, so that it is the same on every rank.

    Args:
        root: The model.
        seq_len: Number of tokens of a sequence.
        allowed: Modules that a user checked by hand.
        bound: Modules whose convolutions and scans run over ranks (`scans.bind`).
    """
    checked = list(checked_modules(root, allowed))
    models = [module for _, module in checked if is_model(module)]
    names = {type(module).__name__ for _, module in checked}
    if bound and not any(
        regex.search(name) for name in names for regex in (ATTENTION, POSITIONS)
    ):
        models = []  # nothing attends, or knows positions
    for module in models:
        if refusal := _refusal_of_configuration(module, seq_len, allowed, bound):
            return refusal
    for name, module in checked:
        refusal = refusal_of_module(name or "the model", module, seq_len, bound)
        if refusal and not mixes_if_called(module, bound):
            return refusal
    if models and not any(takes_positions(module) for module in models if reads_text(module)):
        return (
            f"the forward of {type(models[0]).__name__} takes no `position_ids`, so that every rank would count "
            f"positions from 0; use a model that takes them, or, {_ALLOW}"
        )
    return None


_ALLOW = (
    "if it is right for a part of a sequence, name it in `intercept_sdpa(allow_modules=[...])`"
)


def refusal_of_module(
    name: str, module: nn.Module, seq_len: int, bound: Collection[nn.Module] = ()
) -> str | None:
    """Return why a module cannot be context parallel in any model; None if it can.

    Args:
        name: The dotted name of the module.
        module: The module.
        seq_len: Number of tokens of a sequence.
        bound: Modules whose convolutions and scans run over ranks.
    """
    mixer = _mixer(module, bound)
    if mixer:
        return (
            f"{name} ({type(module).__name__}) is {mixer}, which mixes tokens outside of attention, and a rank has "
            f"only some of them. Use a model in which attention alone mixes tokens, or, {_ALLOW}"
        )
    if getattr(module, "token_dropout", False):
        return (
            f"{name} ({type(module).__name__}) scales embeddings by the share of mask tokens among the tokens of "
            "a rank; use `token_dropout=False`"
        )
    scale = getattr(module, "floor_scale", None)
    is_tuned = getattr(module, "attn_temperature_tuning", False) and not getattr(
        module, "use_rope", True
    )
    if is_tuned and scale and seq_len >= scale:
        return (
            f"{name} ({type(module).__name__}) scales attention by positions that it counts from 0 on every rank; use "
            f"sequences of fewer than {int(scale)} tokens (`floor_scale`), or `attn_temperature_tuning=False`"
        )
    return None


def mixes_if_called(module: nn.Module, bound: Collection[nn.Module]) -> bool:
    """Return whether a module would mix tokens if it were called, and a model may run without calling it.

    A model that gets only text does not call the modules that mix the positions of images. A bound layer does not call
    its convolution; it passes the weights to a function.

    Args:
        module: The module.
        bound: Modules whose convolutions and scans run over ranks.
    """
    is_spare = type(module).__name__.endswith(("2d", "3d")) or (
        module in bound and isinstance(module, conv._ConvNd)
    )
    return is_spare and _mixer(module, bound) is not None


def _mixer(module: nn.Module, bound: Collection[nn.Module]) -> str | None:
    """Return in words how a module mixes tokens; None if it does not."""
    if isinstance(module, torch.jit.ScriptModule):
        return "compiled by torch.jit, whose attention cannot be seen,"
    if isinstance(module, conv._ConvNd):
        is_patchwise = len(module.kernel_size) > 1 and module.kernel_size == module.stride
        return (
            None
            if max(module.kernel_size) == 1 or is_patchwise
            else f"a convolution of {module.kernel_size} tokens"
        )
    for cls, words in _MIXING.items():
        if isinstance(module, cls):
            return words
    if module in bound:
        return None
    scans = SCAN_PARAMETERS.intersection(
        name for name, _ in module.named_parameters(recurse=False)
    )
    return f"a scan over the sequence (parameter {min(scans)!r})" if scans else None


def _refusal_of_configuration(
    model: nn.Module, seq_len: int, allowed: Allowed, bound: Collection[nn.Module]
) -> str | None:
    config = model.config
    name = type(model).__name__
    if getattr(config, "is_encoder_decoder", False):
        return (
            f"{name} is an encoder-decoder, whose two sequences cannot both be cut by one context; use a decoder-only "
            "model, or `region` for a part of your own"
        )
    implementation = getattr(config, "_attn_implementation", None) or ""
    if implementation.startswith(_CLOSED_IMPLEMENTATIONS):
        return (
            f"{name} has attn_implementation={implementation!r}, which does not call F.scaled_dot_product_attention; "
            'use "sdpa", or `register_transformers_attention()` and model.set_attn_implementation("context_parallel")'
        )
    for kind in layer_kinds(config):
        is_known = kind in _ATTENTION_KINDS | TOKENWISE_KINDS or (
            kind in _BOUND_KINDS and bound
        )
        if not is_known and not allowed.has(None, kind):
            return (
                f"{name} has layers of kind {kind!r}, which is no attention that can be context parallel; use a model "
                f"without, or, {_ALLOW}"
            )
    window = window_of(config)
    if implementation == "sdpa" and window and window < seq_len:
        return (
            f"{name} has a sliding window of {window} for {seq_len} tokens, but F.scaled_dot_product_attention gets "
            "only a mask for the part of a rank, or no mask. Call `register_transformers_attention()` and "
            'model.set_attn_implementation("context_parallel")'
        )
    chunk = getattr(config, "attention_chunk_size", None)
    if chunk and chunk < seq_len and "chunked_attention" in layer_kinds(config):
        return (
            f"attention in chunks of {chunk} for {seq_len} tokens cannot be context parallel; use sequences of at "
            f"most {chunk} tokens"
        )
    return None


def window_of(config: object) -> int | None:
    """Return the smallest window of attention that a configuration has for some of its layers; None if it has none.

    Args:
        config: The configuration.
    """
    kinds = layer_kinds(config)
    if kinds and _WITHOUT_WINDOW.issuperset(kinds):
        return None
    sizes = [getattr(config, key, None) for key in _WINDOWS]
    return min((size for size in sizes if isinstance(size, int) and size > 0), default=None)


def moves_tokens(
    name: str, x: object, result: Tensor, args: tuple, kwargs: dict, length: int
) -> bool:
    """Return whether a call of F.pad, roll, cumsum, flip, mean or conv1d works along the tokens of a rank.

    Args:
        name: The name of the function.
        x: Its first argument before the call: (B, tokens, ...) or (..., tokens, D), for conv1d (..., D, tokens).
        result: Its result, any shape.
        args: Its other positional arguments.
        kwargs: Its keyword arguments.
        length: Number of tokens of the rank.
    """
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return False
    if name == "conv1d":
        weight = kwargs.get("weight", args[0] if args else None)
        return weight.shape[-1] > 1 and length in (x.shape[-1], result.shape[-1])
    if x.ndim < 3:
        return False
    if name == "pad":
        pad = kwargs.get("pad", args[0] if args else ())
        dims = [x.ndim - 1 - i for i in range(len(pad) // 2) if pad[2 * i] or pad[2 * i + 1]]
    else:
        dims = _dims_of_call(name, args, kwargs)
    return any(
        dim in (1, x.ndim - 2) and length in (x.shape[dim], *result.shape[dim : dim + 1])
        for dim in (each % x.ndim for each in dims)
    )


def _dims_of_call(name: str, args: tuple, kwargs: dict) -> list[int]:
    for key in ("dim", "dims", "axis"):
        if kwargs.get(key) is not None:
            args = (kwargs[key],)
    if name == "roll":
        args = args[-1:]
    elif name != "flip":  # x.flip(0, 1), and x.mean(0, True)
        args = args[:1]
    return [
        dim
        for each in args
        for dim in (each if isinstance(each, tuple | list) else [each])
        if dim is not None
    ]


def layer_kinds(config: object) -> list[str]:
    """Return the kind of each layer by the configuration, or an empty list.

    Args:
        config: The configuration.
    """
    for key in _KINDS:
        kinds = getattr(config, key, None)
        if kinds and all(isinstance(kind, str) for kind in kinds):
            return list(kinds)
    return []
