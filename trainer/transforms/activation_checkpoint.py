"""Activation checkpointing of decoder blocks: activations that the backward recomputes instead of keeping them.

A block's `forward` is replaced, on the instance, by a forward that runs the same code under `torch.utils.checkpoint`.
No module is added, so parameters keep their names: weights are drawn from the names, and checkpoints use them as keys.
"""

import types
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from longshard.sharding.forward import replace_forward
from trainer.config.schema import ActivationCheckpoint

CONTEXT_PARALLEL_ATTENTION = "longshard::context_parallel_attention"
SPARSE_ATTENTION = "longshard::sparse_attention"
EXCHANGES = frozenset(
    {
        CONTEXT_PARALLEL_ATTENTION,
        "longshard::context_parallel_convolution",
        "longshard::linear_attention",
        SPARSE_ATTENTION,
    }
)

# By name, because some operators exist only in some builds, and context parallelism registers its own at its first use.
# The whole output of an operator is kept, for attention also the log-sum-exp, so that no key or value is sent again.
KEPT_OPERATORS = frozenset(
    {
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_attention_math",
        "aten::_scaled_dot_product_fused_attention_overrideable",
        "flex_attention",
        "torch_attn::_varlen_attn",
        CONTEXT_PARALLEL_ATTENTION,
        SPARSE_ATTENTION,
        # the sum of tensor parallelism's partial results
        "_c10d_functional::reduce_scatter_tensor",
    }
)
_ATTENTION = KEPT_OPERATORS - {"_c10d_functional::reduce_scatter_tensor"}
MATRIX_PRODUCTS = frozenset({"aten::mm", "aten::addmm", "aten::linear"})


def apply_activation_checkpoint(
    layers: Mapping[str, nn.Module],
    config: ActivationCheckpoint,
    apart: Collection[nn.Module] = (),
) -> None:
    """Checkpoint layers in place, as `config` says: whole, by operator, or within the compiler's memory budget.

    Call it after tensor parallelism, and before `torch.compile` and `fully_shard`.

    Args:
        layers: Blocks by number, so that a pipeline's stages checkpoint the same layers as the whole model.
        config: Table `[activation_checkpoint]`.
        apart: Layers that have only some of their methods compiled. By operator, two methods of such a layer are
            checkpointed instead of its forward: attention, which keeps the results of operators, and experts, which
            keep their input alone. Nothing can choose among the operators in a compiled graph.
    """
    forward = _forward_keeping_inputs
    if config.mode == "memory_budget":
        forward = _forward_within_budget
    elif config.mode == "selective" and not config.whole_layers:
        on_host = config.offload == "inputs+attention"
        forward = _forward_with_attention_on_host if on_host else _forward_keeping_operators
    for number in config.checkpointed(map(int, layers)):
        layer = layers[str(number)]
        if layer in apart and forward is _forward_keeping_operators:
            layer.with_attention = types.MethodType(_attention_keeping_operators, layer)
            layer.with_experts = types.MethodType(_experts_keeping_inputs, layer)
            continue
        replace_forward(layer, "activation checkpointing", types.MethodType(forward, layer))


_OPTIONS = {"use_reentrant": False, "preserve_rng_state": False}


def _checkpointed(part: str = "forward", **options: Any) -> Callable[..., Any]:
    """Return a function of a block, which checkpoints the block's method `part`.

    Blocks share the function, so that torch.compile makes one graph for all of them. Blocks draw no random numbers, so
    no generator state is kept.
    """

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(
            getattr(type(self), part), self, *args, **_OPTIONS, **options, **kwargs
        )

    return forward


def _forward_with_attention_on_host(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    keep_attention = getattr(self, "keep_attention", None)
    # the input of this layer stays on the device, for example of a layer for a further token
    if keep_attention is None:
        return _forward_keeping_operators(self, *args, **kwargs)
    contexts = partial(_contexts_with_attention_on_host, keep_attention)
    return _checkpointed(context_fn=contexts)(self, *args, **kwargs)


def _contexts_keeping_exchanges() -> tuple[Any, Any]:
    """Keep attention and convolutions over several ranks; the compiler chooses the other tensors within its budget.

    If ranks with shards of different lengths chose differently, one rank would wait for an exchange of the other.
    """
    return create_selective_checkpoint_contexts(_keep_exchanges)


def _keep_exchanges(
    ctx: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    kept = op.name().split(".")[0] in EXCHANGES
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_SAVE


def _contexts_keeping_operators() -> tuple[Any, Any]:
    return create_selective_checkpoint_contexts(_KeepOperators())


_forward_keeping_inputs = _checkpointed()
_forward_within_budget = _checkpointed(context_fn=_contexts_keeping_exchanges)
_forward_keeping_operators = _checkpointed(context_fn=_contexts_keeping_operators)
_attention_keeping_operators = _checkpointed(
    "with_attention", context_fn=_contexts_keeping_operators
)
_experts_keeping_inputs = _checkpointed("with_experts")


def _contexts_with_attention_on_host(
    keep: Callable[[int, Tensor], Any],
) -> tuple[Any, Any]:
    """Return the contexts of the forward and of its repetition, for selective checkpointing.

    They keep the operators of `_contexts_keeping_operators`, except attention, whose results `keep` stores.

    keep: (number of the result, tensor) -> an object whose `take` returns the result.
    """
    results = []
    modes = _AttentionOnHost(results, keep), _AttentionOnHost(results, None)
    selective = create_selective_checkpoint_contexts(_KeepOperators(_ATTENTION))
    # These modes are entered first, so the other modes do not see copies to and from the host.
    return tuple(map(_both, modes, selective))


@contextmanager
def _both(one: AbstractContextManager, other: AbstractContextManager) -> Iterator[None]:
    with one, other:
        yield


class _AttentionOnHost(TorchDispatchMode):
    """Keeps the results of attention in the forward, and returns them in the backward, where `keep` is None."""

    def __init__(
        self,
        results: list[list[Callable[[], Any]]],
        keep: Callable[[int, Tensor], Any] | None,
    ) -> None:
        super().__init__()
        self._results = results
        self._keep = keep

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        is_attention = func.name().split(".")[0] in _ATTENTION
        if is_attention and self._keep is None:
            return tuple(take() for take in self._results.pop(0))
        out = func(*args, **(kwargs or {}))
        if is_attention:
            # output and log-sum-exp; other results are small, or bytes of an exchange
            self._results.append([self._kept(number, x) for number, x in enumerate(out)])
        return out

    def _kept(self, number: int, x: Any) -> Callable[[], Any]:
        if isinstance(x, Tensor) and x.is_floating_point() and x.ndim > 2:
            return self._keep(number, x.detach()).take
        return lambda: x

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> None:
        super().__exit__(kind, value, traceback)
        if kind is None and self._keep is not None and not self._results:
            raise RuntimeError(
                "activation_checkpoint.offload = 'inputs+attention' has not seen the attention of a layer, which would "
                "be computed again; use 'inputs'"
            )


class _KeepOperators:
    """The policy of one call of one block: keep `KEPT_OPERATORS` and every second matrix product.

    It starts with the second product. The last product of a block (of seven, in Llama) only feeds the residual sum,
    whose backward needs no input, so keeping its output would save nothing.
    """

    def __init__(self, left_out: frozenset[str] = frozenset()) -> None:
        self.kept = KEPT_OPERATORS - left_out
        # counts of the forward (False) and of the recomputation (True), where torch 2.11 also calls the policy
        self.products: Counter[bool] = Counter()

    def __call__(
        self, ctx: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any
    ) -> CheckpointPolicy:
        name = op.name().split(".")[0]  # without the overload
        keep = name in self.kept
        if name in MATRIX_PRODUCTS:
            self.products[ctx.is_recompute] += 1
            keep = self.products[ctx.is_recompute] % 2 == 0
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE
