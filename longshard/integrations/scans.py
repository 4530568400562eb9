"""Convolutions and scans of transformers' models, run over the ranks of a context by this project's operators.

Layers of transformers call them as functions of their own file, under the same names in each. `bind` replaces such a
function by one that passes its call to the `Interception` in force; without an interception, it calls the function. A
layer whose functions are all known is exact over ranks; others stay refused.
"""

import inspect
from collections.abc import Callable, Iterable
from functools import lru_cache, wraps
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import handle_torch_function

from longshard.context.convolution import context_parallel_convolution
from longshard.context.execution.linear_chunks import Tokens
from longshard.context.linear_attention import linear_attention
from longshard.context.live import LivePlan
from longshard.context.planning.mask import Mask
from longshard.context.planning.options import ContextParallelError
from longshard.integrations.calls import is_intercepted
from longshard.integrations.inspection import SCAN_PARAMETERS
from longshard.sharding.tensors import wide


class Where(NamedTuple):
    """The plan and the rows of a scan.

    Attributes:
        handle: The handle of the plan.
        positions: (B, S), the positions of this rank's rows in their documents; None for one document.
        activations: The activations that the layer's file knows, by name.
    """

    handle: Tensor
    positions: Tensor | None
    activations: Any


def run_scan(x: Tensor, name: str, function: Callable, arguments: dict) -> Any:
    """Return the result of a call from the interception in force. `function` itself is never called here.

    Args:
        x: One tensor among the arguments, any shape.
        name: The name of the function, for the error message.
        function: The function.
        arguments: All arguments, by name.
    """
    return handle_torch_function(run_scan, (x,), x, name, function, arguments)


def scanned(
    name: str,
    function: Callable,
    arguments: dict,
    handle: Tensor,
    live: LivePlan,
) -> Any:
    """Return this rank's rows of the result that a function of transformers returns for the whole sequence.

    Args:
        name: The name of the function.
        function: The function.
        arguments: All arguments, by name; tensors have this rank's rows.
        handle: The handle of the plan, (B,) int64.
        live: The plan.

    Raises:
        ContextParallelError: The call passes or requests a state, or it describes documents, which the mask should do.
    """
    if arguments.get("initial_state", arguments.get("initial_states")) is not None or any(
        map(arguments.get, _ASKED)
    ):
        raise ContextParallelError(
            f"{name} was called with a cache, whose states belong to one process; pass `use_cache=False`"
        )
    packed = [
        key
        for key in _PACKED
        if arguments.get(key, arguments.get("kwargs", {}).get(key)) is not None
    ]
    if packed:
        raise ContextParallelError(
            f"{name} got {packed[0]}, which says nothing of the tokens of other ranks; give packed "
            "documents as `context_parallel(mask=documents(...))`, and the model an all-ones "
            "`attention_mask`"
        )
    live.calls += _KNOWN[name] is not _not_fused
    x = next(x for x in arguments.values() if isinstance(x, Tensor))  # (B, ...)
    positions = positions_of(live, x.device)
    positions = None if positions is None else positions.expand(x.shape[0], -1)
    where = Where(handle, positions, inspect.unwrap(function).__globals__.get("ACT2FN"))
    return _KNOWN[name](where, **arguments)


_ASKED = ("output_final_state", "return_final_states", "return_last_state")
_PACKED = ("seq_idx", "cu_seqlens", "cu_seq_lens_q")


def positions_of(live: LivePlan, device: torch.device) -> Tensor | None:
    """Return the positions of this rank's rows in their documents, (sequences of the mask, S); None for one document.

    Args:
        live: The plan.
        device: The device of the result.

    Raises:
        ContextParallelError: The mask is not a mask of documents.
    """
    if live.mask is None:
        return None
    rows = live.layout.indices(live.rank)
    starts = [_starts(live.mask, number) for number in range(live.mask.sequences)]
    if all(len(begins) <= 1 for begins in starts):
        return None
    firsts = np.stack(
        [begins[np.searchsorted(begins, rows, side="right") - 1] for begins in starts]
    )
    return torch.from_numpy(rows - firsts).to(device)


def _starts(mask: Mask, number: int) -> np.ndarray:
    bands = mask.sequence(number).bands
    begins = sorted({band.kv_start for band in bands})
    ends = [*begins[1:], mask.q_len]
    for band in bands:
        end = ends[begins.index(band.kv_start)]
        if (
            mask.q_len != mask.kv_len
            or not band.kv_start <= band.q_start < band.q_stop <= end
            or band.kv_stop > end
        ):
            raise ContextParallelError(
                f"a scan of states cannot follow the mask {band}, which is not a mask of documents; give "
                "`documents(lengths)`, or no mask"
            )
    return np.array(begins or [0])


# ---- The functions, by their names in transformers, with its names of arguments. Its functions begin with the
# arguments that can be positional here.


def _convolution(where: Where, hidden_states, weight, bias, activation, **_: Any) -> Tensor:
    """Compute a causal convolution over all ranks, and its activation, if it has one.

    hidden_states: (B, C, S); weight: (C, kernel); bias: (C,) -> (B, C, S).
    """
    rows = hidden_states.to(weight.dtype).transpose(1, 2)
    out = context_parallel_convolution(rows, weight.unsqueeze(1), where.handle, where.positions)
    out = out if bias is None else out + bias
    out = out if activation is None else where.activations[activation](out)
    return out.transpose(1, 2).to(hidden_states.dtype)


def _delta_rule(
    where: Where, query, key, value, g, beta, **options: Any
) -> tuple[Tensor, None]:
    """Compute the gated delta rule over all ranks; return the outputs, and None in place of a final state.

    Of the options, only `use_qk_l2norm_in_kernel` is used.
    query, key: (B, S, H, K); value: (B, S, G, V); g: (B, S, G) or (B, S, G, K); beta: (B, S, G) -> (B, S, G, V).
    """
    if options.get("use_qk_l2norm_in_kernel"):
        query, key = (
            wide(x) * torch.rsqrt(wide(x).square().sum(-1, keepdim=True) + 1e-6)
            for x in (query, key)
        )
    scale = key.shape[-1] ** -0.5
    tokens = Tokens(query, key, wide(value), g, beta, where.positions, scale)
    return linear_attention(tokens, where.handle)[0].to(value.dtype), None


def _mamba2(where: Where, hidden_states, dt, A, B, C, **options: Any) -> Tensor:
    """Compute the scan of Mamba-2 over all ranks.

    hidden_states: (B, S, H, P); dt: (B, S, H); A: (H,); B, C: (B, S, groups, N); D: (H,) -> (B, S, H, P).
    """
    bias, D = options["dt_bias"], options["D"]
    step = dt if bias is None else dt + bias.to(dt.dtype)
    step = F.softplus(step) if options["dt_softplus"] else step
    step = wide(step.clamp(*options["dt_limit"]))
    x = wide(hidden_states)
    scan = C, B, x * step.unsqueeze(-1), A * step
    tokens = Tokens(*map(wide, scan), None, where.positions, 1.0)
    out = linear_attention(tokens, where.handle)[0]
    return out if D is None else out + D.unsqueeze(-1) * x


def _mamba1(where: Where, hidden_states, dt, A, B, C, **options: Any) -> Tensor:
    """Compute the scan of Mamba over all ranks. Each channel is a head of size 1.

    hidden_states, dt: (B, C, S); A: (C, N); B, C: (B, N, S) -> (B, C, S). options: `delta_bias`, `delta_softplus`,
    z, (B, C, S), and D, (C,), as in transformers.
    """
    x = hidden_states
    bias, D, z = options["delta_bias"], options["D"], options["z"]
    step = dt if bias is None else dt + bias.to(dt.dtype).unsqueeze(-1)
    step = wide(F.softplus(step) if options["delta_softplus"] else step).transpose(1, 2)
    v = wide(x).transpose(1, 2) * step
    q, k = (wide(part).transpose(1, 2).unsqueeze(2) for part in (C, B))
    log_decay = wide(A) * step.unsqueeze(-1)
    tokens = Tokens(q, k, v.unsqueeze(-1), log_decay, None, where.positions, 1.0)
    out = linear_attention(tokens, where.handle)[0]
    out = out.squeeze(-1).transpose(1, 2)
    out = out if D is None else out + x * D.unsqueeze(-1)
    return out if z is None else out * F.silu(z)


def _not_fused(where: Where, **_: Any) -> None:
    """Return None, by which transformers knows that there is no fused kernel, and runs the parts."""


_KNOWN: dict[str, Callable] = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _mamba2,
    "mamba_selective_scan": _mamba1,
    "mamba2_split_conv1d_scan_combined": _not_fused,
    "mamba_inner_fn": _not_fused,
}


# ---- Binding


def bind(modules: Iterable[nn.Module]) -> set[nn.Module]:
    """Replace known functions in the files of the modules' classes, so that they run over ranks inside a context.

    The functions are replaced for the whole process. A second call for the same classes changes nothing.

    Args:
        modules: The modules.

    Returns:
        The modules that are exact over ranks by these functions, and all their submodules.
    """
    exact = set()
    for module in modules:
        calls = _bound(type(module))
        scans = any(_KNOWN[name] in (_delta_rule, _mamba1, _mamba2) for name in calls)
        has_state = any(
            name.rpartition(".")[2] in SCAN_PARAMETERS for name, _ in module.named_parameters()
        )
        if scans or ("causal_conv1d_fn" in calls and not has_state):
            exact.update(module.modules())
    return exact


@lru_cache(maxsize=1024)
def _bound(cls: type[nn.Module]) -> frozenset[str]:
    """Replace the known functions that the forward of a class calls, in the file of the class.

    Return their names, also of functions that were replaced before. A function with other arguments is left as it is.
    """
    forward = inspect.unwrap(getattr(cls, "forward", None))  # a class of torch.jit has none
    called = inspect.getclosurevars(forward).globals if inspect.isfunction(forward) else {}
    bound = set()
    for name in _KNOWN.keys() & called.keys():
        function = called[name]
        if callable(function) and (parameters := _parameters(function)) is not None:
            _, *first = inspect.getfullargspec(_KNOWN[name]).args
            if parameters[: len(first)] == tuple(first):
                bound.add(name)
                if not hasattr(function, "runs_over_ranks"):
                    forward.__globals__[name] = _binding(name, function)
    return frozenset(bound)


def _parameters(function: Callable) -> tuple[str, ...] | None:
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # a kernel in C++
        return None


def _binding(name: str, function: Callable) -> Callable:
    signature = inspect.signature(function)

    @wraps(function)
    def bound(*args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else next(iter(kwargs.values()))
        if not is_intercepted(x):
            return function(*args, **kwargs)
        bound_arguments = signature.bind(*args, **kwargs)
        bound_arguments.apply_defaults()
        return run_scan(x, name, function, bound_arguments.arguments)

    bound.runs_over_ranks = True
    return bound
