"""The table [dpo]: training on pairs of answers of which one is preferred."""

from dataclasses import dataclass
from typing import Literal

from trainer.config.keys import POSITIVE, Bounds, Condition, key, needs_value

_PAIRS = Condition(
    lambda config, _: config.training.dataset == "preferences", "without training.dataset = 'preferences'"
)


@dataclass(frozen=True)
class DPO:
    """Direct preference optimization of a run with training.dataset = "preferences"."""

    beta: float = key(0.1, POSITIVE, when=_PAIRS)
    """How much a change of an answer's log-probability counts: a reward is beta times the change."""
    loss: Literal["sigmoid", "ipo"] = key("sigmoid", when=_PAIRS)
    """sigmoid: of the difference of rewards (DPO); ipo: squared error of its mean over tokens from 1 / (2 beta)."""
    label_smoothing: float = key(
        0.0, Bounds(lambda x: 0 <= x < 0.5, "in [0, 0.5)"), when=(_PAIRS, needs_value("dpo.loss", "sigmoid"))
    )
    """Assumed share of pairs whose answers are the wrong way round."""
    reference: Literal["auto", "adapters", "copy"] = key("auto", when=_PAIRS)
    """Changes are from the model without its adapters, or a frozen copy of the first weights; auto: by lora."""
