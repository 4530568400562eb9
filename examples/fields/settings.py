"""The table [fields] of the configuration. Torch-free."""

from dataclasses import dataclass

from trainer.config.keys import AT_LEAST_ONE, NOT_NEGATIVE, Condition, key

_FIELDS = Condition(lambda config, _: config.task == "fields", "without training.dataset = 'fields'")
_DIVIDED = Condition(
    lambda _, degrees: bool(degrees.domain),
    "without parallelism.domain_parallel_degrees",
    "name the degrees, or leave the rows out",
)


@dataclass(frozen=True)
class Fields:
    """Fields on a grid that change with time, for training.dataset = "fields"."""

    lead: int = key(1, AT_LEAST_ONE, "frames", when=_FIELDS)
    """Frames from the state that a model sees to the state that it predicts."""
    held_out: int = key(2, NOT_NEGATIVE, "trajectories", when=_FIELDS)
    """Trajectories, the last ones, that are never trained on; the prediction error is measured on them."""
    rows: tuple[str, ...] = key((), when=(_FIELDS, _DIVIDED))
    """Rows of each rank along each divided axis, such as "19,13"; 0 is allowed; none: as even as possible."""
