"""Activation checkpointing of decoder blocks: activations that the backward recomputes instead of keeping them.

A block's `forward` is replaced, on the instance, by one that runs the same code under `torch.utils.checkpoint`. No
module is added, so that parameters keep their names, from which weights are drawn and by which checkpoints are keyed.
"""

import types
from collections import Counter
from typing import Any

from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from trainer.config.schema import ActivationCheckpoint
from trainer.distributed.sharding.forward import replace_forward

CONTEXT_PARALLEL_ATTENTION = "trainer::context_parallel_attention"
EXCHANGES = frozenset({CONTEXT_PARALLEL_ATTENTION, "trainer::context_parallel_convolution"})

# By name, because some operators exist on some builds only, and context parallelism registers its own at its first use.
# An operator's whole output is kept, for attention also the log-sum-exp, so that no key or value is sent again.
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
        # the sum of tensor parallelism's partial results
        "_c10d_functional::reduce_scatter_tensor",
    }
)
MATRIX_PRODUCTS = frozenset({"aten::mm", "aten::addmm", "aten::linear"})


def apply_activation_checkpoint(layers: nn.ModuleDict, config: ActivationCheckpoint) -> None:
    """Checkpoint all layers or every n-th layer, whole or by operator, as `config` says; in place.

    layers: by number, so that a pipeline's stages checkpoint the same layers as the whole model. Call it after tensor
    parallelism, and before `torch.compile` and `fully_shard`.
    """
    forward = _forward_keeping_inputs
    if config.mode == "memory_budget":
        forward = _forward_within_budget
    elif config.mode == "selective" and config.every is None:
        forward = _forward_keeping_operators
    for number in config.checkpointed(map(int, layers)):
        layer = layers[str(number)]
        replace_forward(layer, "activation checkpointing", types.MethodType(forward, layer))


# Functions of the block, not closures over it, so that torch.compile makes one graph for all blocks. Blocks draw no
# random numbers, so no generator state is kept.


def _forward_keeping_inputs(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return _checkpointed(self, args, kwargs)


def _forward_keeping_operators(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return _checkpointed(self, args, kwargs, context_fn=_contexts_keeping_operators)


def _forward_within_budget(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return _checkpointed(self, args, kwargs, context_fn=_contexts_keeping_exchanges)


def _checkpointed(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], **options: Any) -> Any:
    options |= {"use_reentrant": False, "preserve_rng_state": False}
    return checkpoint(type(block).forward, block, *args, **options, **kwargs)


def _contexts_keeping_exchanges() -> tuple[Any, Any]:
    """Keep attention and convolutions over several ranks; the compiler chooses the rest within its budget.

    Ranks with shards of different lengths might choose differently, and one would wait for an exchange of the other.
    """
    return create_selective_checkpoint_contexts(_keep_exchanges)


def _keep_exchanges(ctx: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = op.name().split(".")[0] in EXCHANGES
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_SAVE


def _contexts_keeping_operators() -> tuple[Any, Any]:
    return create_selective_checkpoint_contexts(_KeepOperators())


class _KeepOperators:
    """The policy of one call of one block: keep `KEPT_OPERATORS` and every second matrix product.

    It starts with the second product. A block's last one (of seven, in Llama) only feeds the residual sum, whose
    backward needs no input, so that keeping its output would save nothing.
    """

    def __init__(self) -> None:
        self.products: Counter[bool] = Counter()  # by whether it recomputes; torch 2.11 asks then too

    def __call__(self, ctx: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = op.name().split(".")[0]  # without the overload
        keep = name in KEPT_OPERATORS
        if name in MATRIX_PRODUCTS:
            self.products[ctx.is_recompute] += 1
            keep = self.products[ctx.is_recompute] % 2 == 0
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE
