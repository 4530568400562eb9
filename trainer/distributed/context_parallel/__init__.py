"""Context parallelism: one sequence over many ranks. Public names; see docs/context_parallelism.md."""

from trainer.lazy import lazy_exports

_NAMES = {
    "ContextParallelAttention": "attention",
    "context_parallel_attention": "attention",
    "ContextParallel": "context",
    "context_parallel": "context",
    "Band": "mask",
    "Mask": "mask",
    "by_row": "mask",
    "causal": "mask",
    "cumulative": "mask",
    "documents": "mask",
    "documents_of": "mask",
    "full": "mask",
    "sliding_window": "mask",
    "BatchPlan": "options",
    "ContextParallelError": "options",
    "ContextParallelOptions": "options",
    "METHODS": "plan",
    "RankPlan": "plan",
    "make_plan": "plan",
    "AttentionShape": "cost",
    "attention_cost": "cost",
    "Region": "regions",
    "borrow": "regions",
    "give_back": "regions",
    "region": "regions",
    "replicate": "regions",
    "shard": "regions",
    "unshard": "regions",
}
__getattr__, __dir__ = lazy_exports(__name__, _NAMES)
__all__ = list(_NAMES)
