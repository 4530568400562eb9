"""Kinds of data sets, and the table [mixture]: what a run reads in the place of training.dataset_path."""

from dataclasses import dataclass

from trainer.config.keys import TOKENS, Condition, key, needs

CONVERSATIONS = ("chat", "preferences")
"""Data sets whose documents have answers, and never see each other."""


def reads(*datasets: str) -> Condition:
    """Return the condition that training or validation reads data of one of these kinds."""
    return Condition(
        lambda config, _: (
            config.training.dataset in datasets or (config.validation.enable and config.validation.dataset in datasets)
        ),
        f"without training.dataset = {' or '.join(map(repr, datasets))}",
    )


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
