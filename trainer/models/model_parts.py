"""Build the parts of a model that one rank runs."""

import torch
from torch import nn

from trainer.job.record import ResolvedJob
from trainer.models.initialization import initialize, stored_as
from trainer.models.model_spec import ModelSpec
from trainer.parallel.parallel_dims import ParallelDims


def build_model_parts(
    spec: ModelSpec, job: ResolvedJob, dims: ParallelDims, device: torch.device
) -> list[nn.Module]:
    """Build the whole model, or the pipeline stages of this rank, parallelised, with their initial weights.

    Args:
        spec: The model family.
        job: The resolved job.
        dims: The meshes of the run.
        device: Where the model computes.

    Returns:
        The model parts of this rank.
    """
    training = job.config.training
    plan = job.pipeline
    stages = [None]
    if plan is not None:
        stages = [plan.stages[number] for number in plan.stages_of(dims.rank("pp"))]
    model_parts = []
    for modules in stages:
        with torch.device("meta"):
            part = stored_as(spec.build(job.model), getattr(torch, training.dtype))
        if modules is not None:
            spec.keep_stage(part, modules)
        spec.parallelize(part, dims, job)
        initialize(part, seed=training.seed, device=device, offload=training.enable_cpu_offload)
        model_parts.append(part)
    return model_parts
