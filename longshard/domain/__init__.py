"""Public names of domain parallelism, tensors with unevenly sharded axes; see docs/domain_parallelism.md."""

from longshard.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "domain": "Axis Domain balanced gathered sized",
        "gradients": "average_gradients",
        "modules": "NeighborhoodAttention parallelize",
        "neighborhood": "neighborhood_attention",
        "points": "nearest within",
        "tensor": "DomainOperatorError DomainTensor rule",
        "transfer": "from_dtensor gather move read reshard scatter to_dtensor",
    },
)
