"""Resolve and check transforms of a model: compilation, recomputation, float8. Torch-free."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from trainer.config.errors import ConfigError
from trainer.config.schema import ActivationCheckpoint, JobConfig
from trainer.families.args import ModelArgs
from trainer.job.degrees import Degrees
from trainer.job.pipeline_stages import PipelinePlan, layers_of_stages


@dataclass(frozen=True)
class CompileOptions:
    """Options of `torch.compile`."""

    model: bool
    """Compile each block."""
    loss: bool
    backend: str
    overlaps_tensor_parallel: bool
    """Overlap the collectives of tensor parallelism with its matrix products."""
    rounds_as_eager: bool
    """Compiled code rounds between operations as eager code does. Otherwise, with float8 and a scale per row, a
    recomputation may be fused differently, scale other values, and return NaN (pytorch issue 150859)."""
    splits_backward: bool
    """The pipeline splits each backward into one for inputs and one for weights."""
    memory_budget: float | None
    """Share of the activations that the compiler may keep; None: no limit."""
    recomputes_every: int
    """The compiler recomputes one of this many layers, instead of activation checkpointing; 0 means none."""
    fixed_shapes: bool
    """Shapes never change. Otherwise the compiler may take numbers that differ between layers for variables."""

    @property
    def any(self) -> bool:
        """Whether model or loss is compiled."""
        return self.model or self.loss

    @property
    def chooses_recomputation(self) -> bool:
        """Whether the compiler chooses what the backward recomputes."""
        return self.model and self.backend != "eager"


def resolve_compilation(
    config: JobConfig, *, fixed_shapes: bool, splits_backward: bool, planned_attention: bool
) -> CompileOptions:
    """Return the options of the compiler. If `compile.enable` is off, `model` and `loss` are False in them.

    Args:
        config: The configuration of the run.
        fixed_shapes: Whether all batches have the same shapes.
        splits_backward: Whether the pipeline splits each backward.
        planned_attention: Whether attention runs over a plan.

    Raises:
        ConfigError: No component is named, or a feature needs a component that is off.
    """
    settings = config.compile
    activations = config.activation_checkpoint
    if not settings.components:
        raise ConfigError(
            "compile.components = [] compiles nothing; name 'model' or 'loss', or leave it out"
        )
    model = settings.enable and "model" in settings.components
    traced = model and settings.backend != "eager"
    # With tensor parallelism and PyTorch's own attention the compiler cannot take over the activation checkpointing of
    # whole layers: torch 2.13 would save a mesh as if it were a tensor.
    cannot_checkpoint = (
        traced and config.parallelism.tensor_parallel_degree > 1 and not planned_attention
    )
    options = CompileOptions(
        model=model,
        loss=settings.enable and "loss" in settings.components,
        backend=settings.backend,
        overlaps_tensor_parallel=config.parallelism.overlaps_tensor_parallel,
        rounds_as_eager=config.float8.enable and config.float8.recipe_name == "rowwise",
        splits_backward=splits_backward,
        memory_budget=activations.memory_budget
        if activations.mode == "memory_budget"
        else None,
        recomputes_every=activations.whole_layers if cannot_checkpoint else 0,
        fixed_shapes=fixed_shapes,
    )
    _check_compilation(config, options)
    return options


def _check_compilation(config: JobConfig, options: CompileOptions) -> None:
    """Raise a ConfigError if another feature cannot run with these options, or needs others."""
    activations = config.activation_checkpoint
    if options.fixed_shapes and options.model and activations.mode != "none":
        raise ConfigError(
            f"activation_checkpoint.mode = {activations.mode!r} with compile.enable is not handled for "
            f"model.name = {config.model.name!r}; leave one of them out, or compile the loss alone with "
            "compile.components = ['loss']"
        )
    if options.overlaps_tensor_parallel and not (
        options.model and options.backend == "inductor"
    ):
        raise ConfigError(
            "parallelism.enable_async_tensor_parallel = true is the compiler's work; set compile.enable with 'model' "
            "in compile.components and compile.backend = 'inductor', or leave it out"
        )
    if options.memory_budget is not None and not options.chooses_recomputation:
        raise ConfigError(
            "activation_checkpoint.mode = 'memory_budget' leaves the choice to the compiler; set compile.enable with "
            "'model' in compile.components and a backend other than 'eager', or use the mode 'selective'"
        )


def check_activation_checkpoint(
    config: JobConfig,
    model: ModelArgs,
    compilation: CompileOptions,
    pipeline: PipelinePlan | None,
) -> tuple[str, ...]:
    """Check activation checkpointing against the model, the compiler and the pipeline.

    Args:
        config: The configuration of the run.
        model: The arguments of the model.
        compilation: The options of the compiler.
        pipeline: The plan of the pipeline, None without one.

    Returns:
        A note if the pipeline makes recomputation expensive, else ().

    Raises:
        ConfigError: The model has fewer layers than a setting names, no input is left to offload, a setting needs
            another mode, or recomputation by operator meets a split backward.
    """
    settings = config.activation_checkpoint
    option = settings.selective_ac_option
    number = int(option) if option.isdecimal() else 0
    largest = model.n_layers if settings.mode == "selective" else math.inf
    if option != "op" and not 1 <= number <= largest:
        raise ConfigError(
            f"activation_checkpoint.selective_ac_option = {option!r} must be 'op', or for every n-th layer a number "
            f"from 1 to {model.n_layers}, the layers of model.flavor = {config.model.flavor!r}, such as '2'"
        )
    if config.task == "tokens":
        _check_activations_of_layers(config, model, compilation, pipeline)
    if (
        not compilation.splits_backward
        or settings.mode == "none"
        or compilation.chooses_recomputation
    ):
        return ()
    if not settings.whole_layers:
        raise ConfigError(
            f"activation_checkpoint.mode = {settings.mode!r} by operator allows one backward, and {pipeline.schedule} "
            f"splits it; use 'none', 'full', compile.enable, or the schedule 'Interleaved1F1B'"
        )
    return (
        f"activation_checkpoint.mode = {settings.mode!r} recomputes a layer for each group of its weights, about ten "
        f"times, as {pipeline.schedule} splits the backward; faster are 'none', compile.enable, or "
        f"the schedule 'Interleaved1F1B'",
    )


def _check_activations_of_layers(
    config: JobConfig,
    model: ModelArgs,
    compilation: CompileOptions,
    pipeline: PipelinePlan | None,
) -> None:
    """Raise a ConfigError if groups of layers, offloaded inputs or feed-forward networks in parts do not fit."""
    settings = config.activation_checkpoint
    stages = layers_of_stages(pipeline, model)
    if settings.group > 1 and (settings.group > model.n_layers or compilation.splits_backward):
        why = f"and model.flavor = {config.model.flavor!r} has {model.n_layers} layers; use as many or fewer"
        if compilation.splits_backward:
            why = (
                f"computes the layers of a group for each part of a backward, and {pipeline.schedule} splits it; "
                f"use 1, or the schedule 'Interleaved1F1B'"
            )
        raise ConfigError(f"activation_checkpoint.group = {settings.group} {why}")
    if settings.offload != "none" and (few := least_offloadable(settings, stages)) is not None:
        raise ConfigError(
            f"activation_checkpoint.offload_keep_last = {settings.offload_keep_last} leaves no input to offload: "
            f"{'a pipeline stage' if pipeline else 'the model'} keeps the inputs of only {few} layers; set it to "
            f"{few - 1} or less, or activation_checkpoint.offload = 'none'"
        )
    keeps_attention = (settings.mode, settings.selective_ac_option) == (
        "selective",
        "op",
    ) and not compilation.model
    if settings.offload == "inputs+attention" and not keeps_attention:
        raise ConfigError(
            "activation_checkpoint.offload = 'inputs+attention' needs activation_checkpoint.mode = 'selective' by "
            "operator, which keeps attention's results, and a model that is not compiled; use 'inputs' instead"
        )
    if settings.mlp_chunk_tokens and (why := why_no_parts(config, compilation)):
        raise ConfigError(
            f"activation_checkpoint.mlp_chunk_tokens = {settings.mlp_chunk_tokens} {why}"
        )


def least_offloadable(
    settings: ActivationCheckpoint, stages: Iterable[list[int]]
) -> int | None:
    """Return the fewest kept inputs of a stage, among the stages in which `offload_keep_last` leaves none to offload.

    A stage without kept inputs does not count.

    Args:
        settings: The table [activation_checkpoint].
        stages: Numbers of the layers of each stage.

    Returns:
        The number of inputs; None if each stage offloads an input.
    """
    numbers = [len(kept) for layers in stages if (kept := settings.kept(layers))]
    return min(
        (number for number in numbers if number <= settings.offload_keep_last), default=None
    )


def why_no_parts(config: JobConfig, compilation: CompileOptions) -> str | None:
    """Return why feed-forward networks cannot be computed in parts, and what works; None if they can.

    Args:
        config: The configuration of the run.
        compilation: The options of the compiler.
    """
    settings = config.activation_checkpoint
    if compilation.memory_budget is not None:
        return (
            "recomputes each part, and activation_checkpoint.mode = 'memory_budget' leaves the choice to the compiler; "
            "use the mode 'full' or 'none'"
        )
    if config.float8.enable:
        return "with float8.enable would find a scale for each part; leave one of them out"
    if settings.mode == "selective" and not settings.whole_layers:
        return (
            "recomputes all products of the network, and activation_checkpoint.mode = 'selective' by operator keeps "
            "some; use the mode 'full' or 'none', or activation_checkpoint.selective_ac_option = '2'"
        )
    return None


# Float8 kernels need matrices whose sides are multiples of this.
_MULTIPLE = 16


def check_float8(config: JobConfig, args: ModelArgs, degrees: Degrees) -> None:
    """Check the table [float8] against the rest of the configuration and the sizes of the model's matrices.

    If `float8.enable` is off, nothing is checked.

    Args:
        config: The configuration of the run.
        args: The arguments of the model.
        degrees: The degrees of parallelism.

    Raises:
        ConfigError: They do not fit.
    """
    settings = config.float8
    if not settings.enable:
        return
    shapes = args.linear_shapes(degrees.tp)
    for part in settings.filter_fqns:
        if not part or not any(part in name for name in shapes):
            raise ConfigError(
                f"float8.filter_fqns = {list(settings.filter_fqns)}: {part!r} must be a part of some linear module's "
                f"name, such as 'output', 'attention.wk' or 'layers.{args.n_layers - 1}.'"
            )
    chosen = {
        name: shape
        for name, shape in shapes.items()
        if not any(part in name for part in settings.filter_fqns)
    }
    if not chosen:
        raise ConfigError(
            f"float8.filter_fqns = {list(settings.filter_fqns)} leaves no module to float8; leave some out, or "
            f"float8.enable"
        )
    for name, shape in chosen.items():
        for side, size in zip(("rows", "columns"), shape, strict=True):
            if size % _MULTIPLE:
                per_rank = (
                    f" on each of {degrees.tp} tensor-parallel ranks" if degrees.tp > 1 else ""
                )
                raise ConfigError(
                    f"float8.enable = true needs matrices whose sides are multiples of {_MULTIPLE}, and {name} has "
                    f"{size} {side}{per_rank}; add {name.split('.')[-1]!r} to float8.filter_fqns = "
                    f"{list(settings.filter_fqns)}"
                    + (", or use fewer of these ranks" if degrees.tp > 1 else "")
                )
    _check_all_gather(config, args, degrees, chosen)


def _check_all_gather(
    config: JobConfig, args: ModelArgs, degrees: Degrees, chosen: dict[str, tuple[int, int]]
) -> None:
    settings = config.float8
    gather = "float8.enable_fsdp_float8_all_gather"
    shards = degrees.dp_shard * degrees.cp
    if not settings.enable_fsdp_float8_all_gather or shards == 1:
        return
    if settings.recipe_name != "tensorwise":
        raise ConfigError(
            f"{gather} = true needs one scale for each weight, and float8.recipe_name = "
            f"{settings.recipe_name!r} has one a row; use 'tensorwise', or leave {gather} out"
        )
    for name, (rows, _) in chosen.items():
        if rows % shards:
            raise ConfigError(
                f"{gather} = true needs shards of equal size, and the {rows} rows of {name} are cut for "
                f"parallelism.data_parallel_shard_degree x parallelism.context_parallel_degree = {shards}; add "
                f"{name.split('.')[-1]!r} to float8.filter_fqns = {list(settings.filter_fqns)}, or use another degree"
            )
    if args.tie_embeddings and "output" in chosen:
        raise ConfigError(
            f"{gather} = true would gather the embedding in float8, too, as model.flavor = {config.model.flavor!r} has "
            f"one matrix for both; add 'output' to float8.filter_fqns = {list(settings.filter_fqns)}"
        )
