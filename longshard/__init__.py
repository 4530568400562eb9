"""Context parallelism for any PyTorch model: one long sequence, or one large field, over many ranks.

The library needs PyTorch alone and imports nothing of a trainer. docs/library.md is its first page.
Domain parallelism, for tensors with any sharded axes, has names of its own in `longshard.domain`.
"""

from longshard.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "sharding.layout": "AxisLayout contiguous head_tail",
        "context.attention": "AttentionResult ContextParallelAttention context_parallel_attention",
        "context.attention_inputs": "AttentionSettings",
        "context.hooks": "AttentionHooks Scores",
        "context.regions": "Region context_parallel region replicate shard unshard",
        "context.convolution": "ContextParallelConvolution context_parallel_convolution",
        "context.planning.balance": "LOAD_BALANCERS balanced build_layout",
        "context.planning.mask": "Band Mask by_sequence causal documents documents_of full sliding_window",
        "context.planning.options": "BatchPlan ContextParallelError ContextParallelOptions",
        "context.planning.methods": "METHODS make_plan",
        "context.planning.plan": "RankPlan",
        "context.planning.cost": "AttentionShape attention_cost",
        "integrations.calls": "register_transformers_attention",
        "integrations.interception": "intercept_sdpa",
    },
)
