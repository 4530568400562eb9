"""Public names of the trainer's parallelism: meshes, and functions that parallelise a model from outside."""

from longshard.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "parallel_dims": "ParallelDims",
        "data_parallel": "apply_data_parallel",
        "tensor_parallel": "apply_tensor_parallel",
        "pipeline_parallel": "Pipeline",
    },
)
