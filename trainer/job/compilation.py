"""Resolve and check the options of torch.compile. Torch-free."""

from dataclasses import dataclass

from trainer.config.errors import ConfigError
from trainer.config.schema import JobConfig


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
    recomputation may be fused differently, apply its scales to other values, and give NaN (pytorch issue 150859)."""
    splits_backward: bool
    """The pipeline splits each backward into one for inputs and one for weights."""
    memory_budget: float | None
    """Share of the activations that the compiler may keep; None: no limit."""
    recomputes_every: int
    """Every so many layers the compiler recomputes one whole, in place of activation checkpointing; 0: none."""
    fixed_shapes: bool
    """Shapes never change. Else the compiler may take numbers that differ between layers for variables."""

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
    """Return the options of the compiler.

    Raises:
        ConfigError: no component to compile, or a feature that needs the compiler without it.
    """
    settings, activations = config.compile, config.activation_checkpoint
    if not settings.components:
        raise ConfigError("compile.components = [] compiles nothing; name 'model' or 'loss', or leave it out")
    model = settings.enable and "model" in settings.components
    traced = model and settings.backend != "eager"
    # With tensor parallelism and PyTorch's own attention the compiler cannot take over the activation checkpointing of
    # whole layers: torch 2.13 would save a mesh as if it were a tensor.
    cannot_checkpoint = traced and config.parallelism.tensor_parallel_degree > 1 and not planned_attention
    options = CompileOptions(
        model=model,
        loss=settings.enable and "loss" in settings.components,
        backend=settings.backend,
        overlaps_tensor_parallel=config.parallelism.overlaps_tensor_parallel,
        rounds_as_eager=config.float8.enable and config.float8.recipe_name == "rowwise",
        splits_backward=splits_backward,
        memory_budget=activations.memory_budget if activations.mode == "memory_budget" else None,
        recomputes_every=activations.whole_layers if cannot_checkpoint else 0,
        fixed_shapes=fixed_shapes,
    )
    if fixed_shapes and model and activations.mode != "none":
        raise ConfigError(
            f"activation_checkpoint.mode = {activations.mode!r} with compile.enable is not handled for "
            f"model.name = {config.model.name!r}; leave one of them out, or compile the loss alone with "
            "compile.components = ['loss']"
        )
    if options.overlaps_tensor_parallel and not (options.model and options.backend == "inductor"):
        raise ConfigError(
            "parallelism.enable_async_tensor_parallel = true is the compiler's work; set compile.enable with 'model' "
            "in compile.components and compile.backend = 'inductor', or leave it out"
        )
    if options.memory_budget is not None and not options.chooses_recomputation:
        raise ConfigError(
            "activation_checkpoint.mode = 'memory_budget' leaves the choice to the compiler; set compile.enable with "
            "'model' in compile.components and a backend other than 'eager', or use the mode 'selective'"
        )
    return options
