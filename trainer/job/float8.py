"""Check the table [float8] against the limits of torchao's float8 products."""

from trainer.config.errors import ConfigError
from trainer.config.schema import JobConfig
from trainer.families.args import ModelArgs
from trainer.job.degrees import Degrees

# Float8 kernels need matrices whose sides are multiples of this.
_MULTIPLE = 16


def check_float8(config: JobConfig, args: ModelArgs, degrees: Degrees) -> None:
    """Check the table against the rest of the configuration and the model's matrices.

    Raises:
        ConfigError: a setting that cannot work.
    """
    settings = config.float8
    if not settings.enable:
        return
    if config.training.dtype == "float64":
        raise ConfigError(
            "float8.enable = true computes in float32 or less, and training.dtype = 'float64' asks for more; use "
            "'float32' or 'bfloat16', or leave float8.enable out"
        )
    if config.parallelism.overlaps_tensor_parallel:
        raise ConfigError(
            "float8.enable = true and parallelism.enable_async_tensor_parallel = true do not work together: "
            "only products in high precision overlap; leave one of them out"
        )
    shapes = args.linear_shapes(degrees.tp)
    for part in settings.filter_fqns:
        if not part or not any(part in name for name in shapes):
            raise ConfigError(
                f"float8.filter_fqns = {list(settings.filter_fqns)}: {part!r} must be a part of some linear module's "
                f"name, such as 'output', 'attention.wk' or 'layers.{args.n_layers - 1}.'"
            )
    chosen = {name: shape for name, shape in shapes.items() if not any(part in name for part in settings.filter_fqns)}
    if not chosen:
        raise ConfigError(
            f"float8.filter_fqns = {list(settings.filter_fqns)} leaves no module to float8; leave some out, or "
            f"float8.enable"
        )
    for name, shape in chosen.items():
        for side, size in zip(("rows", "columns"), shape, strict=True):
            if size % _MULTIPLE:
                per_rank = f" on each of {degrees.tp} tensor-parallel ranks" if degrees.tp > 1 else ""
                raise ConfigError(
                    f"float8.enable = true needs matrices whose sides are multiples of {_MULTIPLE}, and {name} has "
                    f"{size} {side}{per_rank}; add {name.split('.')[-1]!r} to float8.filter_fqns = "
                    f"{list(settings.filter_fqns)}" + (", or use fewer of these ranks" if degrees.tp > 1 else "")
                )
    _check_all_gather(config, args, degrees, chosen)


def _check_all_gather(config: JobConfig, args: ModelArgs, degrees: Degrees, chosen: dict[str, tuple[int, int]]) -> None:
    settings, gather = config.float8, "float8.enable_fsdp_float8_all_gather"
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
