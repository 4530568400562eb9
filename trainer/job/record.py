"""`ResolvedJob`, the record of all decisions before ranks start, and `TaskSpec`, which makes the decisions of a task.

The steps of `resolution.py` fill in a `Draft`, and check it. Torch-free.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from typing import Any

from longshard.context.planning.mask import Mask
from longshard.context.planning.options import ContextParallelOptions
from trainer.config.schema import JobConfig
from trainer.families.args import ModelArgs, mtp_layers_of
from trainer.families.registry import ModelFolder
from trainer.job.attention import batch_chooser
from trainer.job.degrees import Degrees
from trainer.job.loss import loss_chunk
from trainer.job.pipeline_stages import PipelinePlan
from trainer.job.training import BALANCE_GROWTH
from trainer.job.transforms import CompileOptions

ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class RankMemory:
    """Bytes that the largest rank holds from step to step, by purpose."""

    weights: int
    gradients: int
    optimizer: int
    tables: int
    """Rotary tables and the batch."""

    @property
    def total(self) -> int:
        """Sum of the parts."""
        return sum(astuple(self))

    def describe(self) -> str:
        """Return the parts of at least a hundredth of the total, each with its size, as words."""
        return ", ".join(
            f"{name} {size_words(size)}"
            for name, size in asdict(self).items()
            if size >= self.total / 100
        )


def size_words(size: float) -> str:
    """Return a size in MiB, GiB or TiB with two digits or more.

    Args:
        size: Bytes.
    """
    for unit, power in (("TiB", 40), ("GiB", 30)):
        if size >= 2**power:
            return f"{size / 2**power:,.{1 if size < 100 * 2**power else 0}f} {unit}"
    return f"{size / 2**20:,.{1 if size < 10 * 2**20 else 0}f} MiB"


@dataclass(frozen=True)
class TaskDecisions:
    """The decisions of a task."""

    pipeline: PipelinePlan | None = None
    attention: ContextParallelOptions | None = None
    """Options of planned attention; None for plain causal attention on one rank."""
    attention_reason: str = ""
    """Why `auto` chose its method; empty if the configuration names one."""
    kernel: str = ""
    """The kernel of planned attention, in words; empty without a plan."""
    head_degree: int = 1
    """Context-parallel ranks that divide the heads (hybrid)."""
    details: Any = None
    """Further decisions, which only the task reads."""


@dataclass(frozen=True, kw_only=True)
class ResolvedJob(TaskDecisions):
    """One configuration on a number of ranks of one type of device, with every decision."""

    user_config: JobConfig
    """The configuration as the user wrote it. A run saves it, and a resumed run decides again, for its own ranks."""
    config: JobConfig
    """The configuration with a decision in place of each "auto" that can be decided before ranks start."""
    degrees: Degrees
    device_type: str
    """'cuda' or 'cpu'."""
    node: int
    """Ranks on one node."""
    folder: ModelFolder | None
    """The Hugging Face folder of the model, as the checks have read it; None if a flavor by name gives the sizes."""
    task: "TaskSpec"
    model: ModelArgs
    compilation: CompileOptions
    notes: tuple[str, ...]
    """Lines for the log, such as reasons why some configured keys have no effect."""

    @property
    def compute_dtype(self) -> str:
        """Data type in which the model computes, by name."""
        return self.config.training.mixed_precision_param

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one optimizer step on each data-parallel rank, each of `local_batch_size` sequences."""
        whole = self.config.training.global_batch_size
        return (
            1
            if whole == -1
            else whole // (self.config.training.local_batch_size * self.degrees.dp)
        )

    @property
    def balances(self) -> bool:
        """Whether data-parallel ranks exchange the documents of a step, for equal work."""
        return self.config.training.balance == "step" and self.degrees.dp > 1

    @property
    def validates(self) -> bool:
        """Whether the run measures the loss on validation data."""
        return self.config.validation.enable and self.task.validates

    @property
    def chunks(self) -> int:
        """Chunks of a sequence that a rank computes one after another."""
        return self.config.training.sequence_chunks

    @property
    def tokens_of_a_pass(self) -> int:
        """Tokens of one forward of a rank; with balanced documents, the most that a forward may have."""
        rows = self.config.training.local_batch_size
        if self.balances:
            rows *= BALANCE_GROWTH
        if self.pipeline is not None:
            rows = max(rows // self.pipeline.micro_batches, 1)
        return math.ceil(
            rows * math.ceil(self.config.training.seq_len / (self.degrees.cp * self.chunks))
        )

    @property
    def mlp_tiles(self) -> int:
        """Parts into which feed-forward networks divide a rank's sequence; the same on all ranks."""
        chunk = self.config.activation_checkpoint.mlp_chunk_tokens
        return (
            max(math.ceil(self.tokens_of_a_pass / self.degrees.tp / chunk), 1) if chunk else 1
        )

    @property
    def loss_chunk(self) -> tuple[int, str]:
        """Tokens of a chunk of the loss (0 for all logits at once), and the reason of `auto`."""
        tokens = self.tokens_of_a_pass * (1 + mtp_layers_of(self.model))
        return loss_chunk(self.config, self.model, self.degrees, tokens)

    @property
    def loss_chunk_tokens(self) -> int:
        """Tokens of a chunk of the loss; 0: all logits at once."""
        return self.loss_chunk[0]

    @property
    def sequences_per_step(self) -> int:
        """Samples of one optimizer step, over all ranks."""
        return self.micro_batches * self.config.training.local_batch_size * self.degrees.dp

    @property
    def positions(self) -> int:
        """Positions of a sample, such as the tokens of a sequence."""
        return self.task.positions_of(self)

    def method_chooser(self) -> Callable[[Mask], tuple[ContextParallelOptions, str]] | None:
        """Return a function that chooses the method for the documents of a batch; None if there is no choice."""
        return self.attention and batch_chooser(
            self.user_config, self.model, self.device_type, self.attention, node=self.node
        )


class TaskSpec(ABC):
    """One kind of training. The class attributes are words and properties that messages and metrics need."""

    name: str
    """Its name, which is `ModelArgs.task` of the models that it trains."""
    module: str
    """The class that reads batches and computes losses in a rank: "package.module:Class"."""
    data: str
    """Its kind of data in a word: "text"."""
    positions: str
    """The parts of a sample: "tokens"."""
    position: str
    """Abbreviation of `positions`: "tok"."""
    sample: str
    """One element of a batch: "sequence"."""
    command: str
    """The command to run with trained weights; {} stands for the folder of the run."""
    validates: bool = False
    """Whether the table [validation] is for it."""
    copies_batches: bool = False
    """Whether its `Task` copies a rank's part of a batch to the device; otherwise the loop copies whole batches."""
    sums_losses: bool = True
    """Whether the loss of a step is a sum of losses of positions, so that each has the same cotangent."""
    uses_model: bool = False
    """Whether its `Task` has a method `use_model`, for forwards of its own."""
    fixed_shapes: bool = True
    """Whether all batches have the same shapes, so that the compiler need not expect other shapes."""

    @abstractmethod
    def model(
        self, config: JobConfig, flavor: ModelArgs, missing: list[str] | None
    ) -> ModelArgs:
        """Return the arguments of the model, with values that the data decide, such as the vocabulary.

        Args:
            config: The configuration of the run.
            flavor: The arguments of the configured flavor.
            missing: Collects messages about missing files; see `resolve`.

        Raises:
            ConfigError: No arguments fit.
        """

    @abstractmethod
    def decide(
        self, config: JobConfig, model: ModelArgs, device_type: str, *, node: int
    ) -> TaskDecisions:
        """Return the decisions that do not depend on the number of ranks.

        Args:
            config: The configuration of the run.
            model: The arguments of the model.
            device_type: "cuda" or "cpu".
            node: Ranks on one node, which have fast links.

        Raises:
            ConfigError: The task lacks a configured feature.
        """

    def next_command(self, config: JobConfig) -> str:
        """Return the command to run next: `command`, or one that fits better to the data of this run.

        Args:
            config: The configuration of the run.
        """
        return self.command

    def check(self, config: JobConfig, model: ModelArgs, degrees: Degrees) -> Sequence[str]:
        """Check settings of the task against the degrees.

        Args:
            config: The configuration of the run.
            model: The arguments of the model.
            degrees: The degrees of parallelism.

        Returns:
            Notes for the log.

        Raises:
            ConfigError: A setting does not fit.
        """
        return ()

    @abstractmethod
    def data_checks(self, config: JobConfig) -> Sequence[Callable[[JobConfig], None]]:
        """Return the quick checks of the run's data.

        A check raises MissingFile if the data are not on this machine, and ConfigError if they cannot be used.

        Args:
            config: The configuration of the run.
        """

    @abstractmethod
    def positions_of(self, job: ResolvedJob) -> int:
        """Return the number of positions of a sample.

        Args:
            job: The resolved job.
        """

    @abstractmethod
    def memory(self, job: ResolvedJob) -> RankMemory:
        """Return the estimated memory of the largest rank of the job.

        Args:
            job: The resolved job.
        """

    @abstractmethod
    def describe(self, job: ResolvedJob) -> Mapping[str, str]:
        """Return the task's paragraphs of the summary by topic, one of them "data".

        Args:
            job: The resolved job.
        """


@dataclass(frozen=True)
class Draft:
    """A configuration, its ranks, and the decisions so far."""

    config: JobConfig
    world_size: int
    device_type: str
    node: int
    """Ranks on one node."""
    missing: list[str] | None = None
    """Collects messages about files that this machine lacks, for a check of a job elsewhere. None: they are errors."""
    data_checked: bool = False
    """Whether another process of this machine has checked the data."""
    weights_checked: bool = False
    """Whether another process of this machine has checked the files of weights and checkpoints."""
    folder: ModelFolder | None = None
    """The Hugging Face folder that gives the sizes of the model; None if a flavor by name gives them."""
    task: TaskSpec | None = None
    model: ModelArgs | None = None
    degrees: Degrees | None = None
    decisions: TaskDecisions = field(default_factory=TaskDecisions)
    compilation: CompileOptions | None = None
    notes: tuple[str, ...] = ()

    def noted(self, *notes: str) -> "Draft":
        """Return the draft with further notes for the log.

        Args:
            *notes: A line each.
        """
        return replace(self, notes=(*self.notes, *notes))

    def resolved(self, config: JobConfig) -> ResolvedJob:
        """Return the resolved job.

        Args:
            config: The configuration, with a decision in place of each "auto".
        """
        return ResolvedJob(
            user_config=self.config,
            config=config,
            degrees=replace(self.degrees, cp_a2a=self.decisions.head_degree),
            device_type=self.device_type,
            node=self.node,
            folder=self.folder,
            task=self.task,
            model=self.model,
            compilation=self.compilation,
            notes=self.notes,
            **vars(self.decisions),
        )
