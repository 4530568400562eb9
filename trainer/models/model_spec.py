"""What a model must bring to be trained."""

import importlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from trainer.distributed.parallel_dims import ParallelDims
from trainer.job.record import ResolvedJob
from trainer.models.registry import MODELS


class Decoder(Protocol):
    """A language model as the loop sees it: an `nn.Module` with these methods. Built on meta, then initialised."""

    def __call__(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None = None,
        attention_plan: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """tokens, positions: (B, S) int64 -> hidden: (B, S, dim). Without positions, token i stands at position i.

        attention_plan: handle of the open `context_parallel`, passed on to attention that is parallelised.
        """
        ...

    def output(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: (B, S, dim) -> logits: (B, S, vocab). Apart from the forward, so that a loss can be chunked."""
        ...

    def init_parameter(self, name: str, parameter: torch.Tensor, generator: torch.Generator) -> None:
        """Draw the whole, uncut parameter of that name in place."""
        ...

    def init_buffers(self, device: torch.device) -> None:
        """Give every buffer its first value; those that are persistent are part of a checkpoint."""
        ...


@dataclass(frozen=True)
class Counterpart:
    """A tensor of a model of Hugging Face that holds the values of one of ours: its name, and the change of layout."""

    name: str
    to_hf: Callable[[torch.Tensor], torch.Tensor] = lambda x: x
    """Whole tensor -> whole tensor; it also works on meta."""
    from_hf: Callable[[torch.Tensor], torch.Tensor] = lambda x: x


@dataclass(frozen=True)
class ModelSpec:
    """One model family. Everything the trainer calls; parallelism is applied from outside, by `parallelize`."""

    name: str
    build: Callable[[Any], Decoder]
    """(shape) -> model; called under the meta device, then cast to the storage dtype."""
    keep_stage: Callable[[Decoder, Collection[str]], None]
    """Leave in a whole model only the modules named: a stage of a pipeline, which takes the hidden states of the one
    before it in the place of tokens. Names of parameters stay."""
    parallelize: Callable[[Decoder, ParallelDims, ResolvedJob], None]
    """Apply tensor and data parallelism to the model on meta, or a stage of it, in place."""
    cp_buffers: Callable[[Decoder], list[tuple[torch.Tensor, int]]]
    """(a part of the model) -> its buffers that have a row per token, each with that dimension."""
    state_dict_adapter: Callable[[Any, str], Counterpart] | None = None
    """(shape, name of a parameter or persistent buffer) -> its counterpart at Hugging Face, for `state_dict.py`."""
    after_step: Callable[[Sequence[Decoder], ParallelDims], None] = lambda parts, dims: None
    """Move state that no gradient moves, in place, after each optimizer step; `parts` are those of this rank.

    What a forward counts for it is of this rank's tokens (`dp_cp`, with sequence parallelism also `tp`), and the
    forward of a recomputed block runs twice: use shares of what was counted, not numbers.
    """


def model_spec(name: str) -> ModelSpec:
    """Return what the loop needs to know of a model family, by its name."""
    return importlib.import_module(MODELS[name][1]).SPEC
