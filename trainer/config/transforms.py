"""Settings of changes to a model on one device: adapters, recomputation, compilation, float8."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from trainer.config.keys import (
    AT_LEAST_ONE,
    NOT_NEGATIVE,
    POSITIVE,
    TOKENS,
    Bounds,
    key,
    needs,
    needs_value,
    unless,
)
from trainer.config.parallelism import SHARDED

_COMPILED = needs("compile.enable")
_FLOAT8 = needs("float8.enable")
_ADAPTING = needs("lora.rank")

CHOOSERS = ("gate", "shared_gate", "queries", "keys", "head_weights")
"""Linear modules that choose experts, or keys; they have no adapters, and stay as they are."""
NF4_BLOCK = 64
NF4_BYTES = 36
"""Weights of a row that have one scale, and the bytes that hold them, see lora.quantize."""


@dataclass(frozen=True)
class LoRA:
    """Low-rank adapters. Only they are trained and saved; other weights stay as in checkpoint.initial_load_path."""

    rank: int = key(
        0, Bounds(NOT_NEGATIVE.test, "at least 0 (0: train all weights)"), when=TOKENS
    )
    """Rank of the adapters; 0: none, all weights are trained."""
    alpha: float = key(16.0, POSITIVE, when=_ADAPTING)
    """Scale of adapters: their product is multiplied by alpha / rank. rsLoRA: alpha x sqrt(rank)."""
    quantize: Literal["none", "nf4"] = key("none", when=_ADAPTING)
    """nf4: hold the frozen weights of linear modules in layers in 4.5 bits each (QLoRA), through bitsandbytes."""
    dropout: float = key(0.0, Bounds(lambda x: 0 <= x < 1, "in [0, 1)"), when=_ADAPTING)
    """Share of the inputs of each adapter that a step sets to zero at random; the other inputs grow to match."""
    modules: tuple[str, ...] = key((), when=_ADAPTING)
    """Linear modules of layers with adapters, such as "wq"; of experts w13, w2. []: all except routers and experts."""

    whole: tuple[str, ...] = key((), when=_ADAPTING)
    """Modules that are trained whole in addition, "tok_embeddings" and "output", for example for new tokens."""

    def quantizes(self, name: str) -> bool:
        """Return whether a linear module holds its frozen weight in four bits.

        Args:
            name: Its full name, from `layers.` on.
        """
        in_layers = name.startswith("layers.")
        return self.quantize != "none" and in_layers and name.rpartition(".")[2] not in CHOOSERS

    @property
    def scale(self) -> float:
        """Factor of an adapter's product."""
        return self.alpha / self.rank

    def adapts(self, name: str) -> bool:
        """Return whether a linear module, or a stacked weight of experts, has an adapter.

        Only names that begin with `layers.` can have one. Of these, the names whose last part is in `modules` have one.
        If `modules` is empty, all have one except `gate` and names with `.experts.`.

        Args:
            name: Its full name, from `layers.` on.
        """
        module = name.rpartition(".")[2]
        by_default = module != "gate" and ".experts." not in name
        return name.startswith("layers.") and (
            module in self.modules if self.modules else by_default
        )


@dataclass(frozen=True)
class ActivationCheckpoint:
    """Activations that the backward recomputes."""

    mode: Literal["none", "full", "selective", "memory_budget"] = "none"
    """Keep all activations; each layer's input only (full); see selective_ac_option; or as much as fits a budget."""
    selective_ac_option: str = key(
        "op", when=needs_value("activation_checkpoint.mode", "selective")
    )
    """For selective: "op" keeps attention and every second matrix product; "2" recomputes every 2nd layer in full."""
    memory_budget: float = key(
        0.5,
        Bounds(lambda x: 0 < x < 1, "in (0, 1)"),
        when=needs_value("activation_checkpoint.mode", "memory_budget"),
    )
    """For memory_budget: share of the activations that the compiler may keep."""
    group: int = key(
        1, AT_LEAST_ONE, when=(TOKENS, needs_value("activation_checkpoint.mode", "full"))
    )
    """For full: keep the input of every n-th layer; the backward recomputes the inputs of the layers between."""

    offload: Literal["none", "inputs", "inputs+attention"] = key(
        "none",
        when=(
            TOKENS,
            unless("activation_checkpoint.mode", "none", ", which keeps all activations"),
        ),
    )
    """Values of a checkpointed layer that wait on the host: its input; for "op" also attention's results."""
    offload_keep_last: int = key(
        2, NOT_NEGATIVE, when=unless("activation_checkpoint.offload", "none")
    )
    """Number of the last kept inputs that stay on the device: the backward needs them at once."""
    offload_fraction: float = key(
        1.0,
        Bounds(lambda x: 0 < x <= 1, "in (0, 1]"),
        when=unless("activation_checkpoint.offload", "none"),
    )
    """Share of the layers with kept inputs, from the first layer on, that offload them."""
    mlp_chunk_tokens: int = key(
        0, Bounds(NOT_NEGATIVE.test, "at least 0 (0: all)"), when=TOKENS
    )
    """Tokens of a rank that the feed-forward network or experts compute at a time, also in the backward; 0: all."""

    @property
    def whole_layers(self) -> int:
        """One of this many layers is recomputed from its input alone; 0: none."""
        selected = int(self.selective_ac_option) if self.selective_ac_option.isdecimal() else 0
        return {"full": 1, "selective": selected}.get(self.mode, 0)

    def checkpointed(self, layers: Iterable[int]) -> list[int]:
        """Return the indices of the layers that are checkpointed, whole or by operator.

        These are every `whole_layers`-th layer, counted from 1, and all layers if it is 0. In mode "none" there are
        none.

        Args:
            layers: Indices of the layers of a model or stage.
        """
        every = self.whole_layers or 1
        return [layer for layer in layers if self.mode != "none" and (layer + 1) % every == 0]

    def kept(self, layers: Iterable[int]) -> list[int]:
        """Return the indices of the checkpointed layers whose inputs are kept, one layer of each group.

        Args:
            layers: Indices of the layers of a model or stage.
        """
        return self.checkpointed(layers)[:: self.group]

    def offloaded(self, layers: Iterable[int]) -> list[int]:
        """Return the indices of the layers whose kept inputs go to the host: the first of the `kept` layers.

        Args:
            layers: Indices of the layers of a model or stage.
        """
        kept = self.kept(layers) if self.offload != "none" else []
        share = math.ceil(self.offload_fraction * len(kept))
        return kept[: max(min(share, len(kept) - self.offload_keep_last), 0)]


@dataclass(frozen=True)
class Compile:
    """torch.compile of each layer, as one graph, and of the loss."""

    enable: bool = False
    """Compile: less time and memory a step, but some minutes at the start."""
    components: tuple[Literal["model", "loss"], ...] = key(("model", "loss"), when=_COMPILED)
    """Compile the layers, the loss, or both."""
    backend: Literal["inductor", "aot_eager", "eager"] = key("inductor", when=_COMPILED)
    """inductor generates kernels; aot_eager and eager only trace, to find the cause of an error."""


@dataclass(frozen=True)
class Float8:
    """Matrix products in float8, through torchao (an optional extra)."""

    enable: bool = False
    """Multiply in float8 in the linear modules; on GPUs of compute capability 8.9 or more, or emulated."""
    recipe_name: Literal["tensorwise", "rowwise"] = key("tensorwise", when=_FLOAT8)
    """One scale a tensor (fastest), or one for each row and column (closer to high precision)."""
    enable_fsdp_float8_all_gather: bool = key(False, when=(_FLOAT8, SHARDED))
    """FSDP casts its shards and gathers weights in float8: less traffic; tensorwise only."""
    filter_fqns: tuple[str, ...] = key(("output",), when=_FLOAT8)
    """Modules whose name contains one of these stay in high precision, such as "output", "layers.0." or "wk"."""
    emulate: bool = key(False, when=_FLOAT8)
    """Round as float8 without its kernels: slow, on any machine."""
