"""The tables [mixture] and [fields]: what a run reads beside training.dataset."""

from dataclasses import dataclass

from trainer.config.keys import AT_LEAST_ONE, NOT_NEGATIVE, TOKENS, Condition, key, needs

_FIELDS = Condition(lambda config, _: config.trains_fields, "without training.dataset = 'fields'")
_MIXED = needs("mixture.names", remedy="name the sources, or leave it out")


@dataclass(frozen=True)
class Mixture:
    """Several data sets of the kind training.dataset, by weights."""

    names: tuple[str, ...] = key((), when=TOKENS)
    """A name for each source, for metrics and for the state of the data; none: training.dataset_path is the data."""
    paths: tuple[str, ...] = key((), when=(TOKENS, _MIXED))
    """File, folder or glob of each source."""
    weights: tuple[float, ...] = key((), when=(TOKENS, _MIXED))
    """Share of each source in the sequences, up to a factor; may change when a run resumes. 0: left out."""


@dataclass(frozen=True)
class Fields:
    """Fields on a grid that change with time, for training.dataset = "fields"."""

    lead: int = key(1, AT_LEAST_ONE, "frames", when=_FIELDS)
    """Frames from the state that a model sees to the state that it predicts."""
    held_out: int = key(2, NOT_NEGATIVE, "trajectories", when=_FIELDS)
    """Trajectories, the last ones, that are never trained on; the prediction error is measured on them."""
