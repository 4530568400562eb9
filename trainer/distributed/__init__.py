"""Public names of parallelism: meshes, layouts, and functions that parallelise a model from outside."""

from trainer.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "sharding.layout": "AxisLayout contiguous head_tail",
        "parallel_dims": "ParallelDims",
        "data_parallel": "apply_data_parallel",
        "tensor_parallel": "apply_tensor_parallel",
        "pipeline_parallel": "Pipeline",
    },
)
