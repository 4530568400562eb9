"""A job while it is resolved: the steps of `resolution.py` fill in its decisions. Torch-free."""

from dataclasses import dataclass, field, replace

from trainer.config.schema import JobConfig
from trainer.families.args import ModelArgs
from trainer.families.registry import ModelFolder
from trainer.job.degrees import Degrees
from trainer.job.record import ResolvedJob, TaskDecisions, TaskSpec
from trainer.job.transforms import CompileOptions


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
