"""Settings of the update rule and of the learning rate over the steps."""

import json
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import ClassVar, Literal

from trainer.config.errors import ConfigError
from trainer.config.keys import (
    AT_LEAST_ONE,
    DECAY,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    TOKENS,
    Condition,
    key,
    needs_value,
    unless,
)

_AFTER_WARMUP = Condition(
    lambda config, _: (
        config.training.steps - config.lr_scheduler.restart_step
        > config.lr_scheduler.warmup_steps
    ),
    "because all training.steps = {0.training.steps} are in the warm-up",
)
_DECAYS = Condition(
    lambda config, _: config.lr_scheduler.decays_within(config.training.steps),
    "because the learning rate does not decay within training.steps = {0.training.steps}",
)
_ADAM = needs_value(
    "optimizer.name", "AdamW", "Adam", "Muon", why=", which has settings of its own"
)
_MUON = needs_value("optimizer.name", "Muon")
_NOT_FLOAT64 = unless("training.dtype", "float64", ", in which they are computed")
_HALF = Condition(
    lambda config, _: "bfloat16" in (config.training.dtype, config.state_dtype),
    "where nothing is stored in bfloat16 (training.dtype, optimizer.state_dtype)",
)
_WHOLE = Condition(
    lambda config, _: config.lora.rank == 0 and config.training.dataset != "preferences",
    "with adapters (lora.rank), which it would not scale, or preferences (training.dataset)",
    "leave it out",
)
OPTIMIZERS_HERE = ("AdamW", "Adam", "Muon")


@dataclass(frozen=True, repr=False)
class ParameterGroup:
    """A table of `optimizer.groups`: settings of the parameters whose names fit a pattern.

    lr_factor: factor of the peak learning rate. None: what the parameters have without this table.
    """

    EXAMPLE: ClassVar = '{parameters = "tok_embeddings.*", lr_factor = 0.1, weight_decay = 0.0}'

    parameters: str
    lr_factor: float | None = None
    weight_decay: float | None = None

    def __post_init__(self) -> None:
        numbers = [x for x in (self.lr_factor, self.weight_decay) if x is not None]
        if not self.parameters.strip() or not numbers or min(numbers) < 0:
            raise ConfigError(
                f"optimizer.groups has {self}, which needs a pattern of names as `parameters`, and `lr_factor` or "
                "`weight_decay`, or both, at least 0"
            )

    def __repr__(self) -> str:
        """Return the group as a table of TOML."""
        settings = {name: value for name, value in vars(self).items() if value is not None}
        return f"{{{', '.join(f'{name} = {json.dumps(x)}' for name, x in settings.items())}}}"


@dataclass(frozen=True)
class Optimizer:
    """The update rule."""

    name: Literal["AdamW", "Adam", "Muon"] = "AdamW"
    """AdamW, Adam (adds the decay to the gradient), Muon (matrices by [muon], the rest by AdamW), or of job.imports."""
    lr: float = key(8e-4, POSITIVE)
    """Peak learning rate; lr_scheduler scales it."""
    beta1: float = key(0.9, DECAY, when=_ADAM)
    """Decay of the running mean of the gradient."""
    beta2: float = key(0.95, DECAY, when=_ADAM)
    """Decay of the running mean of the squared gradient."""
    eps: float = key(1e-8, POSITIVE, when=_ADAM)
    """Term that is added to the root of the second moment."""
    weight_decay: float = key(0.1, NOT_NEGATIVE)
    """Weight decay of parameters with two dimensions or more, except embeddings and biases of experts."""
    groups: tuple[ParameterGroup, ...] = key((), when=_ADAM)
    """Rates and decays of parameters by name: tables [[optimizer.groups]]. The first group that fits counts."""
    implementation: Literal["auto", "for-loop", "foreach", "fused"] = key("auto", when=_ADAM)
    """One kernel per parameter, per list, or for all; auto: fused on CUDA and with offload to CPU, else foreach."""
    state_dtype: Literal["float32", "bfloat16"] | None = key(None, when=_ADAM)
    """Data type in which both moments are stored; the update is computed in float32. None: training.dtype."""
    rounding: Literal["stochastic", "nearest"] = key("stochastic", when=(_ADAM, _HALF))
    """How updated values are rounded to bfloat16; nearest: an update below half a unit in the last place is lost."""

    qk_clip: float | None = key(None, POSITIVE, example=100.0, when=(TOKENS, _WHOLE))
    """Bound of attention logits: after a step, heads that passed it are scaled down (QK-clip, Kimi K2); None: none."""

    def group_of(self, name: str) -> ParameterGroup | None:
        """Return the first group that fits a parameter's name, None if no group fits.

        Args:
            name: The name of the parameter.
        """
        fitting = (group for group in self.groups if fnmatchcase(name, group.parameters))
        return next(fitting, None)

    def implementation_on(self, device_type: str) -> str:
        """Return the implementation on a type of device.

        Args:
            device_type: "cuda" or "cpu".
        """
        if self.implementation != "auto":
            return self.implementation
        return "fused" if device_type == "cuda" else "foreach"


@dataclass(frozen=True)
class Muon:
    """Momentum made orthogonal by Newton-Schulz, for the matrices of layers (Jordan et al., 2024; arXiv 2502.16982)."""

    lr: float | None = key(None, POSITIVE, example=0.02, when=_MUON)
    """Peak learning rate of the matrices; None: optimizer.lr."""
    lr_rule: Literal["match_rms_adamw", "original"] = key("match_rms_adamw", when=_MUON)
    """Factor of it for a matrix (A, B): 0.2 sqrt(max(A, B)), so that AdamW's rates fit, or sqrt(max(1, A / B))."""
    weight_decay: float | None = key(None, NOT_NEGATIVE, example=0.1, when=_MUON)
    """Weight decay of the matrices; None: optimizer.weight_decay."""
    momentum: float = key(0.95, DECAY, when=_MUON)
    """Decay of the running mean of the gradient."""
    nesterov: bool = key(True, when=_MUON)
    """Take the mean that the next gradient would give if it were this one."""
    per_head: bool = key(False, when=_MUON)
    """Make the queries, keys and values of each head orthogonal by themselves, not all heads together."""
    dtype: Literal["auto", "bfloat16", "float32"] = key("auto", when=(_MUON, _NOT_FLOAT64))
    """Data type of the Newton-Schulz products; auto: bfloat16 on GPUs, float32 on CPUs."""

    def dtype_on(self, device_type: str) -> str:
        """Return the data type of the products on a type of device.

        Args:
            device_type: "cuda" or "cpu".
        """
        if self.dtype != "auto":
            return self.dtype
        return "bfloat16" if device_type == "cuda" else "float32"


@dataclass(frozen=True)
class LRScheduler:
    """The learning rate over the steps: linear warm-up, constant, decay."""

    warmup_steps: int = key(200, NOT_NEGATIVE, "steps")
    """Steps of the linear warm-up; a run may be shorter."""
    total_steps: int | None = key(
        None, AT_LEAST_ONE, "steps", example=10000, when=_AFTER_WARMUP
    )
    """Steps until the end of the decay; None: training.steps."""
    decay_ratio: float | None = key(None, SHARE, example=0.2, when=_AFTER_WARMUP)
    """Share of the total steps, at their end, in which the rate decays; None: all steps after the warm-up."""
    decay_type: Literal["linear", "sqrt", "cosine"] = key(
        "linear", when=(_AFTER_WARMUP, _DECAYS)
    )
    """Shape of the decay."""
    min_lr_factor: float = key(0.0, SHARE, when=(_AFTER_WARMUP, _DECAYS))
    """Learning rate at the end of the decay, as a share of optimizer.lr."""
    restart_step: int = key(0, NOT_NEGATIVE, "steps")
    """Step after which the schedule starts again, with its warm-up, in a run that continues a finished one."""

    def length(self, steps: int) -> int:
        """Return the number of steps of the schedule, counted from `restart_step`.

        Args:
            steps: Steps of the run.
        """
        return (self.total_steps or steps) - self.restart_step

    def decay_steps(self, total_steps: int) -> int:
        """Return for how many of the last steps of the schedule the learning rate decays.

        Args:
            total_steps: Steps of the schedule.
        """
        after_warmup = total_steps - self.warmup_steps
        return (
            after_warmup
            if self.decay_ratio is None
            else min(round(self.decay_ratio * total_steps), after_warmup)
        )

    def decays_within(self, steps: int) -> bool:
        """Return whether the learning rate decays within the run.

        Args:
            steps: Steps of the run.
        """
        decay = self.decay_steps(self.length(steps))
        return decay > 0 and self.length(steps) - decay < steps - self.restart_step - 1
