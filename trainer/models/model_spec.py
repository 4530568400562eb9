"""The interface of a model family to the trainer.

`trainer/families/registry.py` names the module of each family; its `SPEC` is a `ModelSpec`.
"""

import importlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from trainer.config.errors import ConfigError
from trainer.families.args import is_further, mtp_layers_of
from trainer.families.decoder_config_json import HFDecoder
from trainer.families.registry import MODELS
from trainer.hugging_face.pairs import HFModel, HFTensor
from trainer.job.record import ResolvedJob
from trainer.observer import Observer
from trainer.parallel.parallel_dims import ParallelDims


class Model(Protocol):
    """A model for the loop: an `nn.Module` with these methods, built on meta, then initialised."""

    def __call__(self, inputs: Any) -> Any:
        """Inputs -> hidden states."""

    def output(self, hidden: Any) -> Any:
        """Return the input of the task's losses. It is not a part of the forward, so that a loss can be chunked.

        Args:
            hidden: The hidden states.
        """

    def init_parameter(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """Fill a whole parameter in place, before it is sharded. A submodule may do it for its own parameters.

        Args:
            name: Name of the parameter in this module.
            parameter: The whole parameter, any shape.
            generator: The source of random numbers.
        """

    def init_buffers(self, device: torch.device) -> None:
        """Set every buffer to its first value; persistent buffers are part of a checkpoint.

        Args:
            device: The device of the buffers.
        """


class Decoder(Model, Protocol):
    """A language model for the loop."""

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        attention_plan: Tensor | None = None,
    ) -> Tensor:
        """Return the hidden states, (B, S, dim).

        tokens, positions: (B, S), int64. Without positions, token i of the sequence has position i. Under context
        parallelism these positions are `own_positions(attention_plan, device)`, which also cuts tables.
        attention_plan: handle of the open `context_parallel`, for parallelised attention.

        With `lora.dropout` also `token_numbers`, (B, S), int64, for the linear modules of layers. With
        `model.mtp_layers` also `next_tokens`, (B, S, layers), int64; the hidden states of further tokens then follow:
        (B (1 + layers), S, dim).
        """

    def output(self, hidden: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return logits, (B, S, vocab), or with labels the loss of each token, (B, S).

        The model's own module takes no labels: `apply_chunked_loss` adds them if a job computes its loss in chunks.

        Args:
            hidden: (B, S, dim).
            labels: (B, S), int64. None for logits.
        """


@dataclass(frozen=True)
class ModelSpec:
    """One model family: everything that the trainer calls."""

    build: Callable[[Any], Model]
    """Model arguments -> model, on the meta device; the trainer casts it to the storage dtype."""
    parallelize: Callable[[Model, ParallelDims, ResolvedJob], None]
    """Apply parallelism from outside to the model on meta, or to a stage of it, in place."""
    keep_stage: Callable[[Decoder, Collection[str]], None] | None = None
    """For decoders: remove all modules from a whole model, except the named modules of a pipeline stage. Names of
    parameters stay; the forward takes the previous stage's hidden states instead of tokens."""
    cp_buffers: Callable[[Decoder], list[tuple[Tensor, int]]] = lambda part: []
    """For decoders: model part -> its buffers with a row per position, each with the dimension of the positions. A
    model without such buffers computes the rows of its positions, as `Transformer` does."""
    state_dict_adapter: Callable[[Any, str], HFTensor | None] | None = None
    """(model arguments, name of a parameter or persistent buffer) -> its tensor at Hugging Face. None: a buffer without
    such a tensor; it starts with its first value."""
    hf_unread: Callable[[Any], tuple[str, ...]] = lambda args: ()
    """Model arguments -> name prefixes of tensors in Hugging Face's folders that are not read."""
    observer: Callable[[Sequence[Model], ParallelDims], Observer] = lambda model_parts, dims: (
        Observer()
    )
    """(model parts of this rank, meshes) -> the observer that prepares, updates and reports state without gradients.

    A forward sees the tokens of this rank only: reduce its counts over `dp_cp`, with sequence parallelism also over
    `tp`. The forward runs twice in a recomputed block, so use shares of a count, not numbers.
    """


def model_spec(name: str) -> ModelSpec:
    """Return the spec of a model family, whose module it imports.

    Args:
        name: Name of the family, a key of `MODELS`.

    Raises:
        KeyError: The name is not in `MODELS`.
    """
    there = MODELS[name].hugging_face
    spec = importlib.import_module(MODELS[name].spec).SPEC
    if isinstance(there, HFDecoder):
        spec = replace(spec, state_dict_adapter=there.tensor, hf_unread=there.unread)
    return spec


def hf_model(spec: ModelSpec, args: Any) -> HFModel:
    """Return the tensors of a model that have a counterpart at Hugging Face.

    Args:
        spec: The model family.
        args: The arguments of the model.

    Raises:
        ConfigError: The family, or a feature of it, is not in transformers.
    """
    if spec.state_dict_adapter is None:
        raise ConfigError(
            "a model of this family has no counterpart in Hugging Face's transformers"
        )
    with torch.device("meta"):
        state = spec.build(args).state_dict(keep_vars=True)
    names = {}
    for name, x in state.items():
        names.setdefault(x, []).append(name)
    pairs = {}
    places = {}
    second_names = {}
    for x, (first, *others) in names.items():
        if (there := spec.state_dict_adapter(args, first)) is not None:
            pairs[first] = x, there
            places.setdefault(there.names[0], len(places))
            second_names |= {
                spec.state_dict_adapter(args, other).name: there.name for other in others
            }
    in_order = sorted(
        pairs.items(), key=lambda item: (places[item[1][1].names[0]], item[1][1].first_row)
    )
    further = frozenset(name for name in pairs if is_further(args, name))
    return HFModel(
        dict(in_order), second_names, spec.hf_unread(args), further, mtp_layers_of(args) > 0
    )
