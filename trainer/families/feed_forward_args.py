"""The second branch of a layer: a dense feed-forward network, or experts. Torch-free."""

from dataclasses import dataclass
from typing import ClassVar

from trainer.families.mixers import Names, Shapes, Sizes


def gated_shapes(prefix: str, dim: int, hidden_dim: int) -> Shapes:
    """Return the shapes (outputs, inputs) of a gated network's three matrices `w1`, `w2` and `w3`, by name.

    Args:
        prefix: Beginning of their names.
        dim: Channels of the hidden states.
        hidden_dim: Inner channels.
    """
    return {
        f"{prefix}w1": (hidden_dim, dim),
        f"{prefix}w2": (dim, hidden_dim),
        f"{prefix}w3": (hidden_dim, dim),
    }


@dataclass(frozen=True)
class DenseArgs:
    """A gated network: SwiGLU or GEGLU (arXiv 2002.05202)."""

    hidden_dim: int
    activation: str = "silu"
    """Activation of the gates: `silu`, or `gelu_tanh`."""
    bias: bool = False

    names: ClassVar[Names] = {"w1": "mlp.gate_proj", "w2": "mlp.down_proj", "w3": "mlp.up_proj"}

    def linear_shapes(self, dim: int, tp: int = 1) -> Shapes:
        """Return (outputs, inputs) of its linear modules on one tensor-parallel rank.

        Args:
            dim: Channels of the hidden states.
            tp: Tensor-parallel degree.
        """
        return gated_shapes("", dim, self.hidden_dim // tp)

    def expert_weights(self, dim: int, *, active: bool) -> int:
        """Return 0.

        Args:
            dim: Not used.
            active: Not used.
        """
        return 0

    def vectors(self, dim: int) -> int:
        """Return the number of parameters of the biases.

        Args:
            dim: Channels of the hidden states.
        """
        return (2 * self.hidden_dim + dim) * self.bias

    def tensor_parallel_sizes(self) -> Sizes:
        """Return the inner channels."""
        return {"feed-forward channels": self.hidden_dim}


@dataclass(frozen=True)
class ExpertArgs:
    """The experts of a layer, and how a token chooses among them."""

    number: int
    per_token: int
    """Experts that a token chooses."""
    hidden_dim: int
    """Width of one expert."""
    normalise: bool = True
    """Whether the weights of a token's experts sum to one: a softmax over the chosen experts, not over all."""
    biases: bool = False
    """Whether the router and the experts have biases."""
    clamped: bool = False
    """Whether the gated unit of gpt-oss replaces SwiGLU."""
    sigmoid: bool = False
    """Scores are sigmoids, to which a bias of the weights is added for the choice (DeepSeek-V3, arXiv 2412.19437)."""
    groups: int = 1
    """Groups of neighbouring experts; the score of a group is the sum of its two best experts."""
    groups_per_token: int = 1
    """Groups that a token chooses its experts in."""
    scale: float = 1.0
    """Factor of the weights of a token's experts."""
    shared_dim: int = 0
    """Width of an expert that all tokens use in addition to the chosen ones; 0: there is none."""
    activation: str = "silu"
    """Activation of the gates, see `DenseArgs`."""
    beside_dense: bool = False
    """Whether the shared expert is the dense network of the layer, and both outputs are normalised (Gemma 4)."""
    shared_gate: bool = False
    """Whether each token multiplies the shared expert's output by a sigmoid of its own."""

    names: ClassVar[Names] = {
        "router.gate": "mlp.gate",
        "experts.w13": "mlp.experts.{}.gate_proj mlp.experts.{}.up_proj",
        "experts.w2": "mlp.experts.{}.down_proj",
        "shared.w1": "mlp.shared_expert.gate_proj",
        "shared.w2": "mlp.shared_expert.down_proj",
        "shared.w3": "mlp.shared_expert.up_proj",
        "shared_gate": "mlp.shared_expert_gate",
    }

    def weights(self, dim: int) -> int:
        """Return the number of parameters of one expert.

        Args:
            dim: Channels of the hidden states.
        """
        return 3 * dim * self.hidden_dim + (2 * self.hidden_dim + dim) * self.biases

    def linear_shapes(self, dim: int, tp: int = 1) -> Shapes:
        """Return (outputs, inputs) of the router and of the shared expert on one tensor-parallel rank, by name.

        Every rank has the whole router.

        Args:
            dim: Channels of the hidden states.
            tp: Tensor-parallel degree.
        """
        shapes = {"router.gate": (self.number, dim)}
        if self.shared_dim:
            shapes |= gated_shapes("shared.", dim, self.shared_dim // tp)
        if self.shared_gate:
            shapes["shared_gate"] = 1, dim
        return shapes

    def expert_weights(self, dim: int, *, active: bool) -> int:
        """Return the number of parameters of all experts, or of the experts that one token chooses.

        Args:
            dim: Channels of the hidden states.
            active: Count only the experts that one token chooses.
        """
        return (self.per_token if active else self.number) * self.weights(dim)

    def vectors(self, dim: int) -> int:
        """Return the number of parameters of the router's bias, of its scales, and of norms.

        Args:
            dim: Channels of the hidden states.
        """
        beside = 4 * dim + self.number  # three norms, and two scales of the router
        return self.number * self.biases + beside * self.beside_dense

    def tensor_parallel_sizes(self) -> Sizes:
        """Return the channels of the shared expert, if there is one."""
        return {"channels of the shared expert": self.shared_dim} if self.shared_dim else {}


FeedForwardArgs = DenseArgs | ExpertArgs
"""One kind of feed-forward network: its sizes, and all counts that follow from them.

`names` has modules, or their parameters -> their names in a layer of Hugging Face's files, where families agree.
"""


def has_grouped_product(dtype: str, *widths: int) -> bool:
    """Return whether one kernel computes all experts: in bfloat16, with rows of matrices at multiples of 16 bytes.

    Args:
        dtype: Name of the dtype.
        *widths: Columns of the matrices.
    """
    return dtype == "bfloat16" and all(width % 8 == 0 for width in widths)
