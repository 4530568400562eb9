"""`ResolvedJob`, the record of all decisions before ranks start, and `resolve`, which makes and checks them."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from trainer.checkpoint.initial import check_initial_weights
from trainer.config.errors import MissingFile
from trainer.config.schema import JobConfig
from trainer.distributed.context_parallel.planning.mask import Mask
from trainer.distributed.context_parallel.planning.options import ContextParallelOptions
from trainer.distributed.pipeline_stages import PipelinePlan
from trainer.distributed.sharding.layout import AxisLayout
from trainer.job.attention import batch_chooser, kernel_of, resolve_attention, with_head_degree
from trainer.job.chat import check_chat
from trainer.job.compilation import CompileOptions, resolve_compilation
from trainer.job.degrees import Degrees, resolve_degrees
from trainer.job.experts import with_experts
from trainer.job.fields import check_samples, resolve_fields
from trainer.job.files import check_checkpoint, check_dump_folder
from trainer.job.float8 import check_float8
from trainer.job.keys import check_bounds, check_effects
from trainer.job.lora import check_lora
from trainer.job.loss import loss_chunk
from trainer.job.mixture import check_mixture, check_training_data
from trainer.job.model import check_tensor_parallel_sizes, resolve_model, with_windows_of_flavor
from trainer.job.pipeline import resolve_pipeline
from trainer.job.recompute import check_activation_checkpoint
from trainer.job.training import (
    BALANCE_GROWTH,
    check_balance,
    check_batch,
    check_profiling,
    check_schedule,
    check_trackers,
)
from trainer.job.validation import check_validation, check_validation_data
from trainer.models.args import ModelArgs
from trainer.models.registry import from_path


@dataclass(frozen=True)
class ResolvedJob:
    """One configuration on a number of ranks of one type of device, with every decision."""

    config: JobConfig
    degrees: Degrees
    device_type: str
    """'cuda' or 'cpu'."""
    model: ModelArgs
    attention: ContextParallelOptions | None
    """Options of planned attention; None: plain causal attention on one rank."""
    attention_reason: str
    """Why `auto` chose its method; empty if the configuration names one."""
    field_layouts: tuple[AxisLayout, ...]
    """Which rank has which rows of each axis of a field that is sharded; none for tokens."""
    pipeline: PipelinePlan | None
    compilation: CompileOptions
    notes: tuple[str, ...]
    """A line for each reason why some keys that are set have no effect."""

    @property
    def compute_dtype(self) -> str:
        """Name of the data type in which the model computes."""
        return self.config.training.compute_dtype(self.device_type)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one optimizer step on each data-parallel rank."""
        whole = self.config.training.global_batch_size
        return 1 if whole == -1 else whole // (self.config.training.local_batch_size * self.degrees.dp)

    @property
    def balances(self) -> bool:
        """Whether the documents of a step are dealt over the data-parallel ranks."""
        return self.config.training.balance == "step" and self.degrees.dp > 1

    @property
    def tokens_of_a_pass(self) -> int:
        """Tokens of one forward of a rank."""
        rows: float = self.config.training.local_batch_size
        if self.balances:
            rows *= BALANCE_GROWTH
        if self.pipeline is not None:
            rows = max(rows // self.pipeline.micro_batches, 1)
        return math.ceil(rows * math.ceil(self.config.training.seq_len / self.degrees.cp))

    @property
    def loss_chunk(self) -> tuple[int, str]:
        """Tokens of a chunk of the loss, 0 for all logits at once, and the reason of `auto`."""
        return loss_chunk(self.config, self.model, self.degrees, self.tokens_of_a_pass)

    @property
    def loss_chunk_tokens(self) -> int:
        """Tokens of a chunk of the loss; 0: all logits at once."""
        return self.loss_chunk[0]

    @property
    def sequences_per_step(self) -> int:
        """Sequences of one optimizer step, over all ranks."""
        return self.micro_batches * self.config.training.local_batch_size * self.degrees.dp

    @property
    def positions(self) -> int:
        """Positions of a sample: tokens of a sequence, or points of a field."""
        return self.model.height * self.model.width if self.model.task == "fields" else self.config.training.seq_len

    @property
    def kernel(self) -> str:
        """The kernel of planned attention, in words; empty without a plan.

        Raises:
            ConfigError: the configured kernel cannot run on the job's type of device.
        """
        options = self.attention
        return "" if options is None else kernel_of(self.config, self.model, self.device_type, options)

    def method_chooser(self) -> Callable[[Mask], tuple[ContextParallelOptions, str]] | None:
        """Return a function that chooses the method for the documents of a batch; None if there is no choice."""
        return self.attention and batch_chooser(self.config, self.model, self.device_type, self.attention)

    def on(self, device_type: str) -> "ResolvedJob":
        """Return the job on this type of device, for which `auto` may choose another method."""
        if device_type == self.device_type:
            return self
        if self.model.task == "fields":
            return replace(self, device_type=device_type)
        attention, reason = resolve_attention(self.config, self.model, device_type)
        degrees = with_head_degree(self.degrees, attention)
        return replace(self, device_type=device_type, attention=attention, attention_reason=reason, degrees=degrees)


def resolve(
    config: JobConfig,
    world_size: int,
    device_type: str = "cuda",
    *,
    missing: list[str] | None = None,
    data_checked: bool = False,
) -> ResolvedJob:
    """Make all decisions for `world_size` ranks, and check everything that can be checked before they start.

    missing: takes the messages about files that are not on this machine, for a check of a job elsewhere; data_checked:
    another process of this machine has checked the data.

    Raises:
        ConfigError: the first wrong setting, in one sentence: the value, the rule, what would work.
    """
    config = from_path(config)
    check_bounds(config)
    check_schedule(config)
    check_profiling(config)
    check_dump_folder(config.job.dump_folder)
    parallelism = config.parallelism
    degrees = resolve_degrees(
        dp_replicate=parallelism.data_parallel_replicate_degree,
        dp_shard=parallelism.data_parallel_shard_degree,
        cp=parallelism.context_parallel_degree,
        tp=parallelism.tensor_parallel_degree,
        pp=parallelism.pipeline_parallel_degree,
        world_size=world_size,
        domain=parallelism.domain_parallel_degrees,
    )
    notes = check_effects(with_windows_of_flavor(config), degrees)
    check_batch(config, degrees)
    notes = (*notes, *check_validation(config, degrees))
    model = resolve_model(config, missing)
    check_tensor_parallel_sizes(model, config.model.flavor, degrees)
    degrees = with_experts(degrees, config, model)
    check_balance(config, model)
    layouts: tuple[AxisLayout, ...] = ()
    pipeline, attention, reason = None, None, ""
    if model.task == "fields":
        layouts = resolve_fields(config, model, degrees)
    else:
        pipeline = resolve_pipeline(config, model)
        attention, reason = resolve_attention(config, model, device_type)
        check_float8(config, model, degrees)
        check_lora(config, model, pipeline)
    splits_backward = pipeline is not None and pipeline.splits_backward
    compilation = resolve_compilation(config, splits_backward=splits_backward, planned_attention=attention is not None)
    check_activation_checkpoint(config, model.n_layers, compilation, pipeline)
    _check_files(config, model, missing, data_checked=data_checked)
    degrees = with_head_degree(degrees, attention)
    return ResolvedJob(config, degrees, device_type, model, attention, reason, layouts, pipeline, compilation, notes)


def _check_files(config: JobConfig, model: ModelArgs, missing: list[str] | None, *, data_checked: bool) -> None:
    """Check data, packages and initial weights; missing: takes the messages about what is not on this machine."""
    if not config.trains_fields:
        check_mixture(config)
    data = partial(check_samples if config.trains_fields else check_training_data, config)
    weights = partial(check_initial_weights, config, model)
    of_data = [] if data_checked else [data, partial(check_validation_data, config), partial(check_chat, config)]
    for check in (*of_data, partial(check_trackers, config), weights, partial(check_checkpoint, config, model)):
        try:
            check()
        except MissingFile as error:
            if missing is None:
                raise
            missing.append(str(error))
