"""The tables [mixture] (several data sets), [chat] (how conversations are read) and [dpo] (pairs of answers)."""

import json
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from typing import Any, Literal

from trainer.config.errors import ConfigError
from trainer.config.keys import POSITIVE, TOKENS, Bounds, Condition, key, needs, needs_value

CONVERSATIONS = ("chat", "preferences")
"""Data sets whose documents have answers, and never see each other."""


def reads(*datasets: str) -> Condition:
    """Return the condition that training or validation reads data of one of these kinds.

    Args:
        *datasets: Values of `training.dataset`.
    """
    return Condition(
        lambda config, _: (
            config.training.dataset in datasets
            or (config.validation.enable and config.validation.dataset in datasets)
        ),
        f"without training.dataset = {' or '.join(map(repr, datasets))}",
    )


CHAT = reads(*CONVERSATIONS)
_PAIRS = Condition(
    lambda config, _: config.training.dataset == "preferences",
    "without training.dataset = 'preferences'",
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
    """Share of each source in the sequences, up to a factor; may change when a run resumes. 0 leaves it out."""


@dataclass(frozen=True)
class Chat:
    """How conversations become tokens and labels, with training.dataset = "chat" or "preferences"."""

    arguments: tuple[str, ...] = key((), when=CHAT, named=True)
    """Arguments of the chat template, each name=value in JSON, such as enable_thinking=false."""
    date: str | None = key(None, when=CHAT)
    """Date that a template gets as today's (strftime_now), as YEAR-MONTH-DAY; None: it has no clock."""
    answers: Literal["all", "last"] = key("all", when=CHAT)
    """Answers of a conversation that are learned. A message with "weight": 0 is never learned."""
    too_long: Literal["drop", "cut"] = key("cut", when=reads("chat"))
    """A conversation longer than training.seq_len is left out, or cut after the last answer that fits whole."""

    @property
    def values(self) -> dict[str, Any]:
        """Arguments of the template by name. Raises ConfigError for an argument or a date of the wrong form."""
        values = {}
        for argument in self.arguments:
            name, equals, text = (part.strip() for part in argument.partition("="))
            if not equals or not name.isidentifier():
                raise ConfigError(
                    f"chat.arguments: {argument!r} is not name=value; write enable_thinking=false or language=English"
                )
            values[name] = text
            with suppress(ValueError):
                values[name] = json.loads(text)
        try:
            date.fromisoformat(self.date or "2026-01-31")
        except ValueError:
            raise ConfigError(
                f"chat.date = {self.date!r} is no date; write one as 2026-01-31"
            ) from None
        return values


@dataclass(frozen=True)
class DPO:
    """Direct preference optimization of a run with training.dataset = "preferences"."""

    beta: float = key(0.1, POSITIVE, when=_PAIRS)
    """Factor of rewards: a reward is beta times the change of an answer's log-probability."""
    loss: Literal["sigmoid", "ipo"] = key("sigmoid", when=_PAIRS)
    """sigmoid: of the difference of rewards (DPO); ipo: squared error of its mean over tokens from 1 / (2 beta)."""
    label_smoothing: float = key(
        0.0,
        Bounds(lambda x: 0 <= x < 0.5, "in [0, 0.5)"),
        when=(_PAIRS, needs_value("dpo.loss", "sigmoid")),
    )
    """Assumed share of pairs with swapped answers."""
    reference: Literal["auto", "adapters", "copy"] = key("auto", when=_PAIRS)
    """Reference of changes: the model without its adapters, or a frozen copy of the first weights; auto: by lora."""
