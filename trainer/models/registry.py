"""Names of models and flavors -> shapes (torch-free) and -> the `ModelSpec` (imports torch, on demand)."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import TYPE_CHECKING

from trainer.config.errors import ConfigError, did_you_mean
from trainer.config.schema import Model
from trainer.models.llama3.args import FLAVORS, RopeScaling, TransformerArgs

if TYPE_CHECKING:
    from trainer.models.model_spec import ModelSpec

# name -> (flavors, module that holds `SPEC`)
MODELS = {"llama3": (FLAVORS, "trainer.models.llama3.spec")}


def model_args(model: Model, *, vocab_size: int, max_seq_len: int) -> TransformerArgs:
    """Shape of the configured model, with the overrides of table `[model]` applied.

    Raises:
        ConfigError: no model or flavor of that name.
    """
    if model.name not in MODELS:
        raise ConfigError(f"model.name = {model.name!r} is not a known model{did_you_mean(model.name, MODELS)}")
    flavors = MODELS[model.name][0]
    if model.flavor not in flavors:
        raise ConfigError(
            f"model.flavor = {model.flavor!r} is not a flavor of {model.name}{did_you_mean(model.flavor, flavors)}"
        )
    args = replace(flavors[model.flavor], vocab_size=vocab_size, max_seq_len=max_seq_len, norm_type=model.norm_type)
    args = replace(args, sliding_window=model.sliding_window, sliding_window_every=model.sliding_window_every)
    args = replace(args, attention_sinks=model.attention_sinks)
    if model.rope_theta is not None:
        args = replace(args, rope_theta=model.rope_theta)
    if model.rope_scaling is not None:
        args = replace(args, rope_scaling=None if model.rope_scaling == 1.0 else RopeScaling(model.rope_scaling))
    return args


def model_spec(name: str) -> ModelSpec:
    """What the loop needs to know of a model (see `model_spec.py`)."""
    return importlib.import_module(MODELS[name][1]).SPEC
