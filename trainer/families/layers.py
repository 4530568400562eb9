"""One layer of a decoder as a record: its mixer, its feed-forward network, and its norms. Torch-free."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from trainer.families.feed_forward_args import ExpertArgs, FeedForwardArgs
from trainer.families.mixers import Mixer, Shapes

X = TypeVar("X")
_NAMES_OF_NORMS = {
    "before": {"attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"},
    "after": {
        "attention_post_norm": "post_attention_layernorm",
        "ffn_post_norm": "post_feedforward_layernorm",
    },
    "around": {
        "attention_norm": "input_layernorm",
        "attention_post_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "ffn_post_norm": "post_feedforward_layernorm",
    },
}
_WEIGHTS_OF_NORM = {"rmsnorm": 1, "layernorm": 1, "np_layernorm": 0}
"""Parameters of a norm, for each channel."""


@dataclass(frozen=True)
class NormArgs:
    """The norms of a decoder."""

    kind: str = "rmsnorm"
    """`rmsnorm`; `layernorm`, with a weight alone; or `np_layernorm`, without parameters (OLMo)."""
    eps: float = 1e-5
    offset: bool = False
    """Whether an RMSNorm multiplies by 1 + weight (Gemma, arXiv 2403.08295)."""
    place: str = "before"
    """Where a branch has norms: `before` it, `after` it, or `around` it, both."""

    @property
    def names(self) -> Mapping[str, str]:
        """Names of a layer's norms in Hugging Face's files."""
        return _NAMES_OF_NORMS[self.place]

    @property
    def before(self) -> bool:
        """Whether there is a norm before attention and network."""
        return self.place != "after"

    @property
    def after(self) -> bool:
        """Whether there is a norm behind attention and network."""
        return self.place != "before"

    def parameters(self, dim: int) -> int:
        """Return the number of parameters of one norm.

        Args:
            dim: Channels of the hidden states.
        """
        return _WEIGHTS_OF_NORM[self.kind] * dim


@dataclass(frozen=True)
class Layer:
    """One layer: a branch with the mixer, and a branch with the feed-forward network.

    A layer that predicts a further token has a projection before it, and two more norms (DeepSeek-V3).
    """

    mixer: Mixer
    feed_forward: FeedForwardArgs
    norms: NormArgs
    predicts_further: bool = False
    input_dim: int = 0
    """Channels of the embedding of tokens that only this layer has, and adds by a third branch. 0: it has none."""

    @property
    def has_experts(self) -> bool:
        """Whether the layer has experts instead of a dense network."""
        return isinstance(self.feed_forward, ExpertArgs)

    @property
    def names(self) -> dict[str, str]:
        """Modules, or their parameters -> their names in a layer of Hugging Face's files."""
        return _named(self.mixer.names, self.feed_forward.names) | self.norms.names

    def linear_shapes(self, dim: int, tp: int = 1) -> Shapes:
        """Return (outputs, inputs) of its linear modules on one tensor-parallel rank, by name in the layer.

        Routed experts are left out.

        Args:
            dim: Channels of the hidden states.
            tp: Tensor-parallel degree.
        """
        mixer = self.mixer.linear_shapes(dim, tp)
        shapes = _named(mixer, self.feed_forward.linear_shapes(dim, tp))
        if self.input_dim:
            shapes["input_gate"] = self.input_dim, dim
            shapes["input_projection"] = dim, self.input_dim
        if self.predicts_further:
            shapes["projection"] = dim, 2 * dim
        return shapes

    def parameters(self, dim: int) -> int:
        """Return the number of its parameters on all ranks together, with all experts.

        Args:
            dim: Channels of the hidden states.
        """
        norms = 2 * (self.norms.before + self.norms.after + self.predicts_further)
        norms += self.input_dim > 0
        return (
            self._products(dim, active=False)
            + self.mixer.vectors(dim)
            + self.feed_forward.vectors(dim)
            + norms * self.norms.parameters(dim)
        )

    def flops(self, dim: int, seq_len: int) -> tuple[float, float]:
        """Return FLOPs per token of a training step, as (full, causal) attention counts.

        Args:
            dim: Channels of the hidden states.
            seq_len: Number of tokens of a sequence.
        """
        weights = 6.0 * self._products(dim, active=True)
        full, causal = self.mixer.flops(seq_len)
        return weights + full, weights + causal

    def _products(self, dim: int, *, active: bool) -> int:
        """Return the number of weights that tokens are multiplied by, on all ranks together.

        active: whether to count only the experts that one token chooses.
        """
        return (
            sum(map(math.prod, self.linear_shapes(dim).values()))
            + self.mixer.other_weights()
            + self.feed_forward.expert_weights(dim, active=active)
        )


def _named(mixer: Mapping[str, X], feed_forward: Mapping[str, X]) -> dict[str, X]:
    """Return the entries of both branches, by the names of modules in a layer."""
    return {f"attention.{name}": x for name, x in mixer.items()} | {
        f"feed_forward.{name}": x for name, x in feed_forward.items()
    }
