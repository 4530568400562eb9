"""Parallelism: meshes, layouts and what is applied to a model from outside. These are the public names."""

from trainer.lazy import lazy_exports

_NAMES = {
    "LOAD_BALANCERS": "layout",
    "SequenceLayout": "layout",
    "balanced": "layout",
    "build_layout": "layout",
    "contiguous": "layout",
    "head_tail": "layout",
    "ParallelDims": "parallel_dims",
    "Process": "process_group",
    "apply_data_parallel": "data_parallel",
    "apply_tensor_parallel": "tensor_parallel",
    "apply_activation_checkpoint": "activation_checkpoint",
    "Pipeline": "pipeline_parallel",
    "PipelinePlan": "pipeline_stages",
    "SCHEDULES": "pipeline_stages",
}
__getattr__, __dir__ = lazy_exports(__name__, _NAMES)
__all__ = list(_NAMES)
