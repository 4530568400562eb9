"""Public names of domain parallelism, operators over unevenly sharded axes; see docs/domain_parallelism.md."""

from trainer.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "domain": "Axis Domain balanced gathered sized",
        "convolution": "conv conv_transpose",
        "gradients": "average_gradients",
        "modules": "DomainConv1d DomainConv2d DomainConv3d NeighborhoodAttention parallelize",
        "neighborhood": "neighborhood_attention",
        "norms": "batch_norm group_norm instance_norm layer_norm rms_norm",
        "pooling": "adaptive_avg_pool adaptive_max_pool avg_pool max_pool",
        "reductions": "domain_max domain_mean domain_norm domain_sum domain_var",
        "resample": "cumsum flip interpolate pad roll",
        "tensor": "DomainOperatorError DomainTensor rule",
        "transfer": "gather move read reshard scatter",
    },
)
