"""Resolve the pipeline's plan, and check it against the model and the other settings."""

from dataclasses import replace

from trainer.config.errors import ConfigError
from trainer.config.schema import JobConfig
from trainer.families.args import ModelArgs, is_further
from trainer.job.pipeline_stages import PipelinePlan, pipeline_plan


def resolve_pipeline(config: JobConfig, model: ModelArgs) -> PipelinePlan | None:
    """Return the stages and the schedule, None without pipeline parallelism.

    Raises:
        ConfigError: stages, schedule and micro-batches that do not fit; tied embeddings; a stage without parameters; a
            setting that a split backward does not allow.
    """
    degree = config.parallelism.pipeline_parallel_degree
    if degree > 1 and model.tie_embeddings:
        raise ConfigError(
            f"parallelism.pipeline_parallel_degree = {degree} puts embedding and output on different stages, and "
            f"model.flavor = {config.model.flavor!r} has one matrix for both; use 1, with context, tensor or data "
            f"parallelism in its place"
        )
    # Layers that predict further tokens follow the norm, in whose stage they are.
    modules = [name for name in model.module_names() if not is_further(model, name)]
    plan = pipeline_plan(config.parallelism, modules, config.training.local_batch_size)
    if plan is None:
        return None
    further = [name for name in model.module_names() if name not in modules]
    plan = replace(plan, stages=tuple((*stage, *further) if "norm" in stage else stage for stage in plan.stages))
    if ("norm",) in plan.stages and not model.norms_have_parameters:
        raise ConfigError(
            f"a pipeline stage of 'norm' alone has no parameters with model.norm_type = {config.model.norm_type!r}; "
            f"put it together with the output"
        )
    if plan.splits_backward and config.parallelism.fsdp_reshard_after_forward == "always":
        raise ConfigError(
            f"parallelism.fsdp_reshard_after_forward = 'always' would free the parameters that the second half of a "
            f"split backward needs, and {plan.schedule} splits it; use 'default', or {plan.whole_backward}"
        )
    return plan
