"""Public names of context parallelism, one sequence over many ranks; see docs/context_parallelism.md."""

from trainer.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "attention": "ContextParallelAttention context_parallel_attention",
        "context": "Region context_parallel region replicate shard unshard",
        "convolution": "ContextParallelConvolution context_parallel_convolution",
        "planning.balance": "LOAD_BALANCERS balanced build_layout",
        "planning.mask": "Band Mask by_sequence causal documents documents_of full sliding_window",
        "planning.options": "BatchPlan ContextParallelError ContextParallelOptions",
        "planning.methods": "METHODS make_plan",
        "planning.plan": "RankPlan",
        "planning.cost": "AttentionShape attention_cost",
    },
)
