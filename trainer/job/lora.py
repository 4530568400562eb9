"""Check the table [lora], and count the parameters that it trains. Torch-free."""

import math
from itertools import chain

from trainer.config.errors import ConfigError, did_you_mean
from trainer.config.schema import JobConfig
from trainer.config.transforms import CHOOSERS, NF4_BLOCK
from trainer.families.args import ModelArgs, expert_layers, experts_of
from trainer.hugging_face.pairs import Shape
from trainer.job.pipeline_stages import PipelinePlan


def check_lora(config: JobConfig, model: ModelArgs, pipeline: PipelinePlan | None) -> None:
    """Check that the model has the named modules and initial weights, and that other settings allow adapters.

    If `lora.rank` is 0, nothing is checked.

    Args:
        config: The configuration of the run.
        model: The arguments of the model.
        pipeline: The plan of the pipeline, None without one.

    Raises:
        ConfigError: A named module does not exist, initial weights are not named, or another setting does not allow
            adapters.
    """
    settings = config.lora
    if not settings.rank:
        return
    _check_names(config, model)
    _check_dropout(config, model)
    _check_blocks(config, model)
    if config.checkpoint.initial_load_path is None:
        raise ConfigError(
            f"lora.rank = {settings.rank} adapts given weights, which are never saved again; name them with "
            "checkpoint.initial_load_path, a Hugging Face folder or a folder step-N of another run"
        )
    if pipeline is None:
        return
    if pipeline.splits_backward:
        raise ConfigError(
            f"parallelism.pipeline_parallel_schedule = {pipeline.schedule!r} computes the gradients of weights apart, "
            f"and lora.rank = {settings.rank} freezes most weights; use the schedule 'Interleaved1F1B'"
        )
    rank_stages = [
        [pipeline.stages[stage] for stage in pipeline.stages_of(rank)]
        for rank in set(pipeline.ranks)
    ]
    for modules in (pipeline.stages[0], *map(chain.from_iterable, rank_stages)):
        if not any(name.startswith("layers.") for name in modules):
            raise ConfigError(
                f"lora.rank = {settings.rank} trains layers only, so the first stage of a pipeline, and each of its "
                "ranks, must have a layer; use fewer ranks in parallelism.pipeline_parallel_degree, or other stages"
            )


def _check_names(config: JobConfig, model: ModelArgs) -> None:
    settings = config.lora
    names = sorted(
        {name.split(".")[-1] for name in weight_shapes(model) if name.startswith("layers.")}
    )
    for module in settings.modules:
        if module not in names or module in CHOOSERS:
            raise ConfigError(
                f"lora.modules = {list(settings.modules)}: {module!r} must be a linear module of a layer, or a "
                f"weight of its experts{did_you_mean(module, [name for name in names if name not in CHOOSERS])}"
            )
    for module in settings.whole:
        if module not in ("tok_embeddings", "output"):
            raise ConfigError(
                f"lora.whole = {list(settings.whole)}: {module!r} must be 'tok_embeddings' or 'output'; the modules of "
                "layers have adapters, see lora.modules"
            )


def _check_blocks(config: JobConfig, model: ModelArgs) -> None:
    tp = config.parallelism.tensor_parallel_degree
    for name, (_, inputs) in model.linear_shapes(tp).items():
        if config.lora.quantizes(name) and inputs % NF4_BLOCK:
            degree = "use a smaller parallelism.tensor_parallel_degree, or " * (tp > 1)
            raise ConfigError(
                f"lora.quantize = 'nf4' needs a multiple of {NF4_BLOCK} inputs of each weight on a rank, "
                f"and {name} has {inputs}; {degree}leave lora.quantize out"
            )


def _check_dropout(config: JobConfig, model: ModelArgs) -> None:
    settings = config.lora
    if not settings.dropout:
        return
    if experts := [m for m in settings.modules if m in ("w13", "w2") and experts_of(model)]:
        raise ConfigError(
            f"lora.dropout = {settings.dropout} does not work with the experts' weights {experts} of lora.modules; "
            "use lora.dropout = 0, or leave these weights out of lora.modules"
        )
    if any(".shared." in name and settings.adapts(name) for name in weight_shapes(model)):
        raise ConfigError(
            f"lora.dropout = {settings.dropout} does not reach shared experts, which have adapters by lora.modules = "
            f"{list(settings.modules)}; use 0, or modules of attention alone, such as ['wq', 'wv']"
        )


def adapter_shapes(
    config: JobConfig, model: ModelArgs, tp: int = 1
) -> dict[str, tuple[Shape, Shape]]:
    """Return the shapes of A and B of each adapted module, or stacked weight of experts, by name; {} without adapters.

    A has the shape (rank, inputs) and B (outputs, rank), for experts with the number of experts before.

    Args:
        config: The configuration of the run.
        model: The arguments of the model.
        tp: The tensor-parallel degree. Shapes are one rank's part, but shapes of experts are whole.
    """
    rank = config.lora.rank
    shapes = {}
    for name, (*number, outputs, inputs) in weight_shapes(model, tp).items() if rank else ():
        if config.lora.adapts(name):
            shapes[name] = (*number, rank, inputs), (*number, outputs, rank)
    return shapes


def adapter_names(module: str) -> tuple[str, str]:
    """Return the parameter names of A and B of a module.

    Args:
        module: The name of a module, or of a stacked weight of experts.
    """
    before = f"{module}{'_' if '.experts.' in module else '.'}"
    return f"{before}lora_a", f"{before}lora_b"


def adapter_sizes(config: JobConfig, model: ModelArgs, tp: int = 1) -> dict[str, int]:
    """Return the number of adapter parameters of each adapted module on one rank, by name, before FSDP divides them.

    Args:
        config: The configuration of the run.
        model: The arguments of the model.
        tp: The tensor-parallel degree. Experts are divided over these ranks too, at least by FSDP.
    """
    return {
        name: sum(map(math.prod, ab)) // (tp if len(ab[0]) == 3 else 1)
        for name, ab in adapter_shapes(config, model, tp).items()
    }


def whole_sizes(config: JobConfig, model: ModelArgs, tp: int = 1) -> dict[str, int]:
    """Return the number of parameters of each module that is trained whole in addition to adapters, by name.

    The numbers are one tensor-parallel rank's, before FSDP divides them. A tied matrix counts as the embedding.

    Args:
        config: The configuration of the run.
        model: The arguments of the model.
        tp: The tensor-parallel degree.
    """
    names = sorted(set(config.lora.whole)) if config.lora.rank else []
    if names and model.tie_embeddings:
        names = ["tok_embeddings"]
    return dict.fromkeys(names, model.vocab_size * model.dim // tp)


def weight_shapes(model: ModelArgs, tp: int = 1) -> dict[str, Shape]:
    """Return (outputs, inputs) of linear modules and (experts, outputs, inputs) of stacked weights, by name.

    Args:
        model: The arguments of the model.
        tp: The tensor-parallel degree. Shapes are one rank's part, but shapes of experts are whole.
    """
    shapes = dict(model.linear_shapes(tp))
    if (experts := experts_of(model)) is not None:
        hidden = experts.hidden_dim
        dim = model.dim
        for layer in expert_layers(model):
            prefix = f"layers.{layer}.feed_forward.experts"
            shapes[f"{prefix}.w13"] = experts.number, 2 * hidden, dim
            shapes[f"{prefix}.w2"] = experts.number, dim, hidden
    return shapes


def flops_beside(config: JobConfig, model: ModelArgs) -> float:
    """Return the FLOPs per token that a step with adapters has in addition to a step without; usually negative.

    A frozen weight has no gradient, which saves a third of its 6 FLOPs. A weight of an adapter costs 6. Among experts,
    only the ones that a token chooses count.

    Args:
        config: The configuration of the run.
        model: The arguments of the model.
    """
    sizes = adapter_sizes(config, model)
    if not sizes:
        return 0.0
    frozen = sum(map(math.prod, model.linear_shapes().values()))
    if (experts := experts_of(model)) is not None:
        frozen += len(expert_layers(model)) * experts.per_token * experts.weights(model.dim)
    expert_size = sum(size for name, size in sizes.items() if ".experts." in name)
    idle = expert_size * (1 - experts.per_token / experts.number) if expert_size else 0.0
    trained = whole_sizes(config, model)
    if "output" in trained or (model.tie_embeddings and trained):
        frozen -= math.prod(model.linear_shapes()["output"])
    return 6.0 * (sum(sizes.values()) - idle) - 2.0 * frozen
